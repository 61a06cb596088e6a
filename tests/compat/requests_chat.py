"""Requests to /v1/chat/completions that are answered."""

from __future__ import annotations

from typing import Any

from tests.compat.requests_common import Case, chat

_USAGE = {"include_usage": True}
_CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Time now",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
TOOLS = [WEATHER, TIME]
IN_PARIS = "What is the weather in Paris?"
IN_BOTH = "What is the weather in Paris and in Rome?"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def _turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _talk(*texts: str) -> list[dict[str, Any]]:
    return [_turn("assistant" if index % 2 else "user", text) for index, text in enumerate(texts)]


_CALLED = _turn(
    "assistant",
    None,
    tool_calls=[
        {"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    ],
)
_RESULT = _turn("tool", "sunny, 21 degrees", tool_call_id="call-1")
_OPEN = _talk("What is the capital of France?", "The capital of")

_MESSAGES = [
    chat("plain"),
    chat("no-model", model=...),
    chat("alias", model="tiny2"),
    chat("no-max-tokens", max_tokens=...),
    chat("max-completion-tokens", max_tokens=..., max_completion_tokens=3),
    chat("both-max-tokens", max_tokens=9, max_completion_tokens=3),
    chat("length", max_tokens=3),
    chat("question", "What is the capital of France?"),
    chat("multibyte", "Say good morning in Chinese."),
    chat("multibyte-cut", "Say good morning in Chinese.", max_tokens=2),
    chat("system", messages=[_turn("system", "Be brief."), _turn("user", "Hello!")]),
    chat("turns", messages=_talk("Hello!", "Hello! How can I help you today?", "Thank you!")),
    chat("role-of-its-own", messages=[_turn("user", "Hello!"), _turn("critic", "Thank you!")], max_tokens=4),
    chat("role-developer", messages=[_turn("developer", "Be brief."), _turn("user", "Hello!")], max_tokens=4),
    chat("parts", [{"type": "text", "text": "Hello!"}]),
    chat("parts-two", [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of France?"}]),
    chat("parts-input-text", [{"type": "input_text", "text": "Hello!"}], max_tokens=4),
    chat("parts-strings", ["Hello!"], max_tokens=4),
    chat(
        "parts-refusal",
        messages=[
            _turn("user", "Hello!"),
            _turn("assistant", [{"type": "refusal", "refusal": "No."}]),
            _turn("user", "Thank you!"),
        ],
        max_tokens=4,
    ),
    chat(
        "parts-thinking",
        messages=[
            _turn("user", "Hello!"),
            _turn("assistant", [{"type": "thinking", "thinking": "Hm."}]),
            _turn("user", "Thank you!"),
        ],
        max_tokens=4,
    ),
    chat("content-empty", "", max_tokens=4),
    chat("content-null", None, max_tokens=4),
    chat("content-absent", messages=[{"role": "user"}], max_tokens=4),
    chat("parts-empty", [], max_tokens=4),
    chat("name", messages=[_turn("user", "Hello!", name="ada")]),
    chat("unknown-key-of-message", messages=[_turn("user", "Hello!", colour="green")]),
    chat("unknown-field", store=True, metadata={"a": "b"}, reasoning_effort="low"),
    chat("reasoning-effort-none", reasoning_effort="none"),
    chat("user", user="somebody"),
    chat("request-id", request_id="mine"),
    chat("echo", echo=True),
    chat("echo-assistant", messages=_OPEN, echo=True, max_tokens=4),
    chat("no-generation-prompt", add_generation_prompt=False, max_tokens=4),
    chat("no-generation-prompt-assistant", messages=_OPEN, add_generation_prompt=False, max_tokens=4),
    chat("continue", messages=_OPEN, continue_final_message=True, add_generation_prompt=False),
    chat("continue-echo", messages=_OPEN, continue_final_message=True, add_generation_prompt=False, echo=True),
    chat("continue-stream", messages=_OPEN, continue_final_message=True, add_generation_prompt=False, stream=True),
    chat(
        "continue-echo-stream",
        messages=_OPEN,
        continue_final_message=True,
        add_generation_prompt=False,
        echo=True,
        stream=True,
    ),
    chat("template-kwargs", chat_template_kwargs={"enable_thinking": True}),
    chat("template-kwargs-unknown", chat_template_kwargs={"nothing": 1}),
    chat("add-special-tokens", add_special_tokens=True),
    chat("documents", documents=[{"title": "a", "text": "b"}]),
    chat("truncate", truncate_prompt_tokens=6, max_tokens=4),
    chat("return-token-ids", return_token_ids=True),
    chat("return-token-ids-stream", return_token_ids=True, stream=True, max_tokens=4),
    chat(
        "tools-empty-history",
        messages=[_turn("user", "Hello!"), _turn("assistant", "Hi", tool_calls=[]), _turn("user", "Thank you!")],
        max_tokens=4,
    ),
]

_SAMPLING = [
    chat("logprobs", logprobs=True, max_tokens=3),
    chat("logprobs-top-0", logprobs=True, top_logprobs=0, max_tokens=3),
    chat("logprobs-top-2", logprobs=True, top_logprobs=2, max_tokens=3),
    chat("logprobs-top-20", logprobs=True, top_logprobs=20, max_tokens=2),
    chat("logprobs-false", logprobs=False, max_tokens=3),
    chat("logprobs-multibyte", "Say good morning in Chinese.", logprobs=True, top_logprobs=1),
    chat("logprobs-stream", logprobs=True, top_logprobs=1, stream=True, max_tokens=3),
    chat("logprobs-token-ids", logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, max_tokens=2),
    chat("prompt-logprobs", prompt_logprobs=1, max_tokens=2),
    chat("stop", stop="help"),
    chat("stop-included", stop="help", include_stop_str_in_output=True),
    chat("stop-stream", stop="help", stream=True),
    chat("stop-token-ids", stop_token_ids=[7]),
    chat("min-tokens", "Pick a colour.", min_tokens=6, max_tokens=8),
    chat("ignore-eos", "Pick a colour.", ignore_eos=True, max_tokens=8),
    chat("skip-special-tokens-false", "Pick a colour.", skip_special_tokens=False),
    chat("logit-bias", logit_bias={"40": 100}, max_tokens=3),
    chat("bad-words", "Pick a colour.", bad_words=["green"], max_tokens=4),
    chat("allowed-token-ids", allowed_token_ids=[40, 41], max_tokens=3),
    chat("repetition-penalty", "Repeat ok.", repetition_penalty=1.5, max_tokens=6),
    chat("frequency-penalty", "Repeat ok.", frequency_penalty=2.0, max_tokens=16),
    chat("presence-penalty", "Repeat ok.", presence_penalty=1.0, max_tokens=6),
    chat("n", temperature=1, n=2, max_tokens=3, sampled=True),
    chat("n-stream", temperature=1, n=2, max_tokens=2, ignore_eos=True, stream=True, sampled=True),
    chat("seed", temperature=1, seed=3, max_tokens=3, sampled=True),
    chat("default-temperature", temperature=..., max_tokens=3, sampled=True),
    chat("top-k-1", temperature=1, top_k=1),
    chat("beams", use_beam_search=True, n=2, max_tokens=4),
    chat("beams-stream", use_beam_search=True, n=2, max_tokens=4, stream=True),
    chat("response-format-text", response_format={"type": "text"}),
]

_STREAMS = [
    chat("stream", stream=True),
    chat("stream-length", stream=True, max_tokens=3),
    chat("stream-one-token", stream=True, max_tokens=1),
    chat("stream-multibyte", "Say good morning in Chinese.", stream=True),
    chat("stream-usage", stream=True, stream_options=_USAGE),
    chat("stream-usage-continuous", stream=True, stream_options=_CONTINUOUS, max_tokens=4),
    chat("stream-options-empty", stream=True, stream_options={}, max_tokens=3),
    chat("stream-echo", messages=_OPEN, echo=True, stream=True, max_tokens=3),
]

_TOOLS = [
    chat("tools-call", IN_PARIS, tools=TOOLS, max_tokens=60),
    chat("tools-call-auto", IN_PARIS, tools=TOOLS, tool_choice="auto", max_tokens=60),
    chat("tools-call-stream", IN_PARIS, tools=TOOLS, max_tokens=60, stream=True),
    chat("tools-call-stream-usage", IN_PARIS, tools=TOOLS, max_tokens=60, stream=True, stream_options=_USAGE),
    chat("tools-call-cut", IN_PARIS, tools=TOOLS, max_tokens=12),
    chat("tools-call-cut-stream", IN_PARIS, tools=TOOLS, max_tokens=12, stream=True),
    chat("tools-two-calls", IN_BOTH, tools=TOOLS, max_tokens=100),
    chat("tools-two-calls-stream", IN_BOTH, tools=TOOLS, max_tokens=100, stream=True),
    chat("tools-not-parallel", IN_BOTH, tools=TOOLS, max_tokens=100, parallel_tool_calls=False),
    chat("tools-not-parallel-stream", IN_BOTH, tools=TOOLS, max_tokens=100, parallel_tool_calls=False, stream=True),
    chat("tools-no-call", "Hello!", tools=TOOLS),
    chat("tools-no-call-stream", "Hello!", tools=TOOLS, stream=True),
    chat("tools-none", IN_PARIS, tools=TOOLS, tool_choice="none", max_tokens=60),
    chat("tools-none-stream", IN_PARIS, tools=TOOLS, tool_choice="none", max_tokens=60, stream=True),
    chat("tools-required", IN_PARIS, tools=TOOLS, tool_choice="required", max_tokens=100),
    chat("tools-required-stream", IN_PARIS, tools=TOOLS, tool_choice="required", max_tokens=100, stream=True),
    chat("tools-named", IN_PARIS, tools=TOOLS, tool_choice=NAMED, max_tokens=60),
    chat("tools-named-stream", IN_PARIS, tools=TOOLS, tool_choice=NAMED, max_tokens=60, stream=True),
    chat("tools-result", messages=[_turn("user", IN_PARIS), _CALLED, _RESULT], tools=TOOLS),
    chat("tools-history-without-tools", messages=[_turn("user", IN_PARIS), _CALLED, _RESULT], max_tokens=4),
    chat("tools-one", IN_PARIS, tools=[WEATHER], max_tokens=60),
    chat(
        "tools-no-description",
        IN_PARIS,
        tools=[{"type": "function", "function": {"name": "get_weather"}}],
        max_tokens=4,
    ),
    chat(
        "tools-strict",
        IN_PARIS,
        tools=[{"type": "function", "function": {**WEATHER["function"], "strict": True}}],
        max_tokens=4,
    ),
    chat("tools-n", IN_PARIS, tools=TOOLS, max_tokens=60, temperature=1, top_k=1, n=2),
    chat("tools-logprobs", "Hello!", tools=TOOLS, logprobs=True, max_tokens=3),
]

CASES: list[Case] = [
    *_MESSAGES,
    *_SAMPLING,
    *_STREAMS,
    *_TOOLS,
    Case(
        "chat-x-request-id",
        "/v1/chat/completions",
        {"model": "tiny", "messages": _talk("Hello!"), "temperature": 0, "max_tokens": 2},
        headers={"x-request-id": "from-the-header"},
    ),
]
