"""Messages of a chat request as chat templates want them: plain dicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ascend_vllm.entrypoints.openai.protocol_chat import ChatMessage
from ascend_vllm.errors import RequestError

_MEDIA_PARTS = {"image_url", "input_image", "image", "audio_url", "input_audio", "audio", "video_url", "video"}


def conversation(messages: Sequence[ChatMessage], content_format: str, model_name: str) -> list[dict[str, Any]]:
    """The conversation for the template.

    Args:
        messages: the request's messages.
        content_format: "string" joins text parts with newlines into one string; "openai" keeps lists of parts.
        model_name: for messages of errors.

    Raises:
        RequestError: no message, or a part this server cannot use.
    """
    if not messages:
        raise RequestError(
            "Cannot apply chat template to an empty conversation. Provide at least one message.", param="messages"
        )
    return [_message(message, content_format, model_name) for message in messages]


def _message(message: ChatMessage, content_format: str, model_name: str) -> dict[str, Any]:
    texts = _texts(message.content, model_name)
    content: Any = "\n".join(texts)
    if content_format == "openai":
        content = [{"type": "text", "text": text} for text in texts]
    result: dict[str, Any] = {"role": message.role, "content": content, **(message.model_extra or {})}
    calls = result.get("tool_calls")
    if isinstance(calls, list):
        result["tool_calls"] = [_tool_call(call) for call in calls]
    return result


def _texts(content: str | list[dict[str, Any] | str] | None, model_name: str) -> list[str]:
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    return [_part_text(part, model_name) for part in content]


def _part_text(part: dict[str, Any] | str, model_name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind is None and "text" in part:
        kind = "text"
    if kind in _MEDIA_PARTS:
        raise RequestError(f"{model_name} is not a multimodal model", param="messages")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(f"Unknown part type: {kind}", param="messages")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"A content part of type {kind!r} has no text", param="messages")
    return text


def _tool_call(call: Any) -> Any:
    """A past tool call with its arguments parsed: templates print objects, not strings of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments else {}
    except ValueError as error:
        raise RequestError(f"The arguments of a tool call are not JSON: {error}", param="messages") from error
    return {**call, "function": {**function, "arguments": parsed}}
