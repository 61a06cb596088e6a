"""Requests to /v1/responses and /v1/messages."""

from __future__ import annotations

from typing import Any

from tests.compat.requests_chat import IN_PARIS, WEATHER
from tests.compat.requests_common import Case

_FUNCTION = {"type": "function", **WEATHER["function"]}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_ANTHROPIC_TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": WEATHER["function"]["parameters"],
}


def _response(name: str, given: Any = "Hello!", **fields: Any) -> Case:
    body = {"model": "tiny", "input": given, "temperature": 0, "max_output_tokens": 24, **fields}
    return Case(f"response-{name}", "/v1/responses", {k: v for k, v in body.items() if v is not ...})


def _message(name: str, content: Any = "Hello!", path: str = "/v1/messages", **fields: Any) -> Case:
    messages = [{"role": "user", "content": content}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 24, **fields}
    return Case(f"message-{name}", path, {k: v for k, v in body.items() if v is not ...})


def _item(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


_CALL = {"type": "function_call", "call_id": "call-1", "name": "get_weather", "arguments": '{"city": "Paris"}'}
_OUTPUT = {"type": "function_call_output", "call_id": "call-1", "output": "sunny, 21 degrees"}

_RESPONSES = [
    _response("plain"),
    _response("no-model", model=...),
    _response("length", max_output_tokens=3),
    _response("instructions", instructions="Be brief."),
    _response("items", [_item("user", "Hello!")]),
    _response("items-parts", [_item("user", [{"type": "input_text", "text": "Hello!"}])]),
    _response("items-typed", [{"type": "message", **_item("user", "Hello!")}]),
    _response(
        "items-turns",
        [
            _item("user", "Hello!"),
            _item("assistant", "Hello! How can I help you today?"),
            _item("user", "Thank you!"),
        ],
    ),
    _response("items-system", [_item("system", "Be brief."), _item("user", "Hello!")]),
    _response("multibyte", "Say good morning in Chinese."),
    _response("metadata", metadata={"a": "b"}, user="somebody", parallel_tool_calls=False),
    _response("top-p", top_p=0.5, top_k=1),
    _response("stream", stream=True),
    _response("stream-length", stream=True, max_output_tokens=3),
    _response("stream-instructions", stream=True, instructions="Be brief.", max_output_tokens=3),
    _response("logprobs", include=["message.output_text.logprobs"], top_logprobs=1, max_output_tokens=3),
    _response(
        "json-schema",
        "Give me a person as JSON.",
        text={"format": {"type": "json_schema", "name": "person", "schema": _PERSON}},
    ),
    _response("json-object", "Give me a person as JSON.", text={"format": {"type": "json_object"}}),
    _response("text-format", text={"format": {"type": "text"}}, max_output_tokens=3),
    _response("tools", IN_PARIS, tools=[_FUNCTION], max_output_tokens=60),
    _response("tools-none", IN_PARIS, tools=[_FUNCTION], tool_choice="none", max_output_tokens=60),
    _response("tools-no-call", "Hello!", tools=[_FUNCTION]),
    _response("tools-stream", IN_PARIS, tools=[_FUNCTION], max_output_tokens=60, stream=True),
    _response("tools-result", [_item("user", IN_PARIS), _CALL, _OUTPUT], tools=[_FUNCTION]),
    _response("store-false", store=False, max_output_tokens=3),
    _response("bad-model", model="nope"),
    _response("bad-model-stream", model="nope", stream=True),
    _response("bad-input-absent", ...),
    _response("bad-input-number", 5),
    _response("bad-input-empty", []),
    _response("bad-temperature", temperature=-1),
    _response("bad-top-p", top_p=2),
    _response("bad-max-output-tokens", max_output_tokens=0),
    _response("bad-too-long", "tick tock " * 300),
    _response("bad-previous", previous_response_id="resp_nope"),
    _response("bad-previous-form", previous_response_id="nope"),
    _response("bad-background-without-store", background=True, store=False),
    _response("bad-tool-type", tools=[{"type": "zzz"}]),
    Case("response-get-unknown", "/v1/responses/resp_nope", method="GET"),
    Case("response-get-form", "/v1/responses/nope", method="GET"),
    Case("response-cancel-unknown", "/v1/responses/resp_nope/cancel"),
    Case("response-bad-json", "/v1/responses", raw="{nope"),
    Case("response-get", "/v1/responses", method="GET"),
]

_MESSAGES = [
    _message("plain"),
    _message("length", max_tokens=3),
    _message("system", system="Be brief."),
    _message("system-blocks", system=[{"type": "text", "text": "Be brief."}]),
    _message("blocks", [{"type": "text", "text": "Hello!"}]),
    _message(
        "turns",
        messages=[
            _item("user", "Hello!"),
            _item("assistant", "Hello! How can I help you today?"),
            _item("user", "Thank you!"),
        ],
    ),
    _message("multibyte", "Say good morning in Chinese."),
    _message("stop-sequences", stop_sequences=["help"]),
    _message("stop-sequences-unused", stop_sequences=["zzz"]),
    _message("top-k", top_k=1, top_p=0.5, metadata={"user_id": "a"}),
    _message("stream", stream=True),
    _message("stream-length", stream=True, max_tokens=3),
    _message("stream-stop-sequences", stream=True, stop_sequences=["help"]),
    _message("tools", IN_PARIS, tools=[_ANTHROPIC_TOOL], max_tokens=60),
    _message("tools-auto", IN_PARIS, tools=[_ANTHROPIC_TOOL], tool_choice={"type": "auto"}, max_tokens=60),
    _message("tools-none", IN_PARIS, tools=[_ANTHROPIC_TOOL], tool_choice={"type": "none"}, max_tokens=60),
    _message("tools-any", IN_PARIS, tools=[_ANTHROPIC_TOOL], tool_choice={"type": "any"}, max_tokens=60),
    _message(
        "tools-named",
        IN_PARIS,
        tools=[_ANTHROPIC_TOOL],
        tool_choice={"type": "tool", "name": "get_weather"},
        max_tokens=60,
    ),
    _message("tools-no-call", "Hello!", tools=[_ANTHROPIC_TOOL]),
    _message("tools-stream", IN_PARIS, tools=[_ANTHROPIC_TOOL], max_tokens=60, stream=True),
    _message(
        "tools-result",
        messages=[
            _item("user", IN_PARIS),
            _item(
                "assistant", [{"type": "tool_use", "id": "call-1", "name": "get_weather", "input": {"city": "Paris"}}]
            ),
            _item("user", [{"type": "tool_result", "tool_use_id": "call-1", "content": "sunny, 21 degrees"}]),
        ],
        tools=[_ANTHROPIC_TOOL],
    ),
    _message("count", path="/v1/messages/count_tokens", max_tokens=..., temperature=...),
    _message("count-system", path="/v1/messages/count_tokens", max_tokens=..., temperature=..., system="Be brief."),
    _message(
        "count-tools", path="/v1/messages/count_tokens", max_tokens=..., temperature=..., tools=[_ANTHROPIC_TOOL]
    ),
    _message("bad-model", model="nope"),
    _message("bad-model-stream", model="nope", stream=True),
    _message("bad-no-max-tokens", max_tokens=...),
    _message("bad-max-tokens", max_tokens=0),
    _message("bad-no-messages", messages=...),
    _message("bad-messages-empty", messages=[]),
    _message("bad-role", messages=[_item("zzz", "Hello!")]),
    _message("bad-temperature", temperature=-1),
    _message("bad-too-long", "tick tock " * 300),
    _message("bad-block-type", [{"type": "zzz"}]),
    _message("bad-count-model", path="/v1/messages/count_tokens", max_tokens=..., model="nope"),
    Case("message-bad-json", "/v1/messages", raw="{nope"),
    Case("message-get", "/v1/messages", method="GET"),
]

CASES: list[Case] = [*_RESPONSES, *_MESSAGES]
