"""What a conversation may hold, looked at before it costs the time of its chat template.

A message and each part of its content are a token at least, so that more of them than the model has tokens cannot be
a prompt. What templates print of the rest (tools, documents, arguments of past calls) is bounded by its size, and by
its depth: Python's own functions go no deeper than its stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from ascend_vllm.errors import RequestError

# characters and values together
_MAX_SIZE = 4 * 1024 * 1024
_SIZE_PER_TOKEN = 8
_MAX_DEPTH = 128


def check_number(number: int, max_model_len: int, param: str = "messages") -> None:
    """Refuse more messages, parts of contents, or tools than any prompt can hold.

    Args:
        number: of them.
        max_model_len: most tokens of the model.
        param: the field of the request.

    Raises:
        RequestError: there are too many.
    """
    if number > max_model_len:
        what = "tools" if param == "tools" else "messages and parts of their contents"
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, your request has {number} "
            f"{what}. Please reduce their number.",
            param,
        )


def check_conversation(
    messages: Sequence[BaseModel],
    max_model_len: int,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
    any_length: bool = False,
) -> int:
    """Refuse a conversation that no prompt can hold; its size: characters and values together.

    Args:
        messages: each with a content.
        max_model_len: most tokens of the model.
        tools: functions that the model may call.
        template_kwargs: further variables of the template.
        any_length: the prompt is cut or only told, so that there may be more messages.

    Raises:
        RequestError: there is too much of it, or it is nested too deeply.
    """
    if not any_length:
        contents = (getattr(message, "content", None) for message in messages)
        num_parts = sum(len(content) for content in contents if isinstance(content, list))
        check_number(max(len(messages), num_parts), max_model_len)
        check_number(len(tools), max_model_len, "tools")
    limit = max(_MAX_SIZE, _SIZE_PER_TOKEN * max_model_len)
    size = _measure(messages, limit, "messages")
    size += _measure(tools, limit, "tools")
    return size + _measure((template_kwargs or {}).values(), limit, "chat_template_kwargs")


def _measure(values: Iterable[Any], limit: int, param: str) -> int:
    """Characters and values of a field of a request.

    Raises:
        RequestError: it has more than the limit, or is nested too deeply.
    """
    size, level = 0, list(values)
    for _ in range(_MAX_DEPTH):
        size += len(level)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, Mapping):
                size += sum(len(key) for key in value if isinstance(key, str))
                inner.extend(value.values())
            elif isinstance(value, list | tuple):
                inner.extend(value)
            elif isinstance(value, BaseModel):
                inner.extend(value.__dict__.values())
                inner.extend((value.model_extra or {}).values())
            if size + len(inner) > limit:
                raise RequestError(
                    f"`{param}` has more than {limit} characters and values, which no prompt holds. Please reduce "
                    "its length.",
                    param,
                )
        if not inner:
            return size
        level = inner
    raise RequestError(f"`{param}` is nested too deeply: the limit is {_MAX_DEPTH} levels.", param)
