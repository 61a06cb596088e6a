"""Converts input items of /v1/responses to the messages of a chat.

A conversation is a list of items: messages, reasoning, function calls and their outputs. The items of one
turn of the assistant become one message of a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ascend_vllm.errors import RequestError

_ROLES = ("user", "assistant", "system", "developer")
# statuses of an assistant's message that the answer continues
_UNFINISHED = ("in_progress", "incomplete")
# fields of a content part that chat messages have, too
_PART_FIELDS = ("type", "text", "refusal")
# type of an item → beginning of its id
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def input_items(value: str | Sequence[Any]) -> list[dict[str, Any]]:
    """`input` as a list of items; a string becomes a user's message.

    Raises:
        RequestError: an item is not an object.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise _wrong(index, f"must be an object, but is of type {type(item).__name__}")
    return list(value)


def listed_items(items: Sequence[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Input items as they are listed: each with its type, an id and a status, and texts as lists of parts.

    Args:
        items: that a response was made of.
        response_id: part of the ids of items that came without one.
    """
    return [_listed_item(item, f"{response_id}_{index}") for index, item in enumerate(items)]


def _listed_item(item: dict[str, Any], default_id: str) -> dict[str, Any]:
    kind = str(_kind(item))
    own = {name: value for name, value in item.items() if value is not None}
    default_id = f"{_ID_PREFIXES.get(kind, 'item')}_{default_id}"
    listed: dict[str, Any] = {"id": default_id, "type": kind, "status": "completed"} | own
    content = listed.get("content")
    if isinstance(content, str):
        is_output = listed.get("role") == "assistant"
        part = {"type": "output_text", "text": content, "annotations": []}
        listed["content"] = [part if is_output else {"type": "input_text", "text": content}]
    return listed


def continues_message(items: Sequence[dict[str, Any]]) -> bool:
    """Whether the last item is an unfinished message of the assistant, which the answer continues."""
    if not items:
        return False
    last = items[-1]
    return _kind(last) == "message" and last.get("role") == "assistant" and last.get("status") in _UNFINISHED


def to_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts items to chat messages.

    Consecutive reasoning, text and calls become one message of the assistant. Reasoning is passed to the
    template as `reasoning` and as `reasoning_content`, the names that templates use.

    Args:
        items: messages, reasoning, function_call and function_call_output items.

    Raises:
        RequestError: an item is of another type, or lacks something.

    Example::

        to_messages([{"role": "user", "content": "Hello"}])  # [{"role": "user", "content": "Hello"}]
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        add = _READERS.get(_kind(item))
        if add is None:
            raise RequestError(f"Unsupported input item type: {_kind(item)}", "input")
        add(messages, index, item)
    return messages


def _kind(item: dict[str, Any]) -> Any:
    kind = item.get("type", "message" if "role" in item else None)
    return kind if isinstance(kind, str | None) else str(kind)


def _add_message(messages: list[dict[str, Any]], index: int, item: dict[str, Any]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(index, f"has the role {role!r}, but must have one of {', '.join(_ROLES)}")
    content = _content(index, item, "content")
    if role == "assistant":
        _turn(messages, lambda message: message["content"] is None)["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _add_reasoning(messages: list[dict[str, Any]], index: int, item: dict[str, Any]) -> None:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _wrong(index, "must have a list of objects as its content and as its summary")
    texts = [part.get("text") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(index, "has a part without a text")
    message = _turn(messages, lambda message: not message.keys() & {"reasoning", "tool_calls"})
    message["reasoning"] = message["reasoning_content"] = "\n".join(map(str, texts))


def _add_call(messages: list[dict[str, Any]], index: int, item: dict[str, Any]) -> None:
    name, arguments = _text(index, item, "name"), _text(index, item, "arguments")
    call = {
        "id": _text(index, item, "call_id"),
        "type": "function",
        # the arguments of a truncated call are not valid JSON
        "function": {"name": name, "arguments": arguments if is_json_object(arguments) else "{}"},
    }
    _turn(messages, lambda _: True).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], index: int, item: dict[str, Any]) -> None:
    call_id = _text(index, item, "call_id")
    messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(index, item, "output")})


_READERS: dict[str | None, Callable[[list[dict[str, Any]], int, dict[str, Any]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _turn(messages: list[dict[str, Any]], can_take: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The assistant's message to add to: the last message if `can_take` accepts it, else a new one."""
    if not (messages and messages[-1]["role"] == "assistant" and can_take(messages[-1])):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(index: int, item: dict[str, Any], field: str) -> Any:
    """Text or a list of parts, whose types are checked when the template is rendered."""
    value = item.get(field)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise _wrong(index, f"must have a string or a list of parts as its {field}")
    return [{name: part[name] for name in _PART_FIELDS if name in part} for part in value]


def _text(index: int, item: dict[str, Any], field: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise _wrong(index, f"must have a string as its {field}")
    return value


def is_json_object(arguments: str) -> bool:
    """Whether a text is a JSON object, as the arguments of a call are unless they were cut off."""
    try:
        return isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False


def _wrong(index: int, finding: str) -> RequestError:
    return RequestError(f"The input item at index {index} {finding}.", "input")
