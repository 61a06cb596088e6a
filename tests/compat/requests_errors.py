"""Bad requests: all of the contract's common ones, and some more."""

from __future__ import annotations

from typing import Any

from tests.compat.requests_chat import NAMED, TOOLS, WEATHER
from tests.compat.requests_common import Case, chat, completion

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_JSON = {"content-type": "application/json"}
# more tokens than the model takes
_LONG = "Tick tock" + " tick tock" * 200


def _raw(name: str, path: str, raw: str, content_type: str = "application/json") -> Case:
    return Case(name, path, raw=raw, headers={"content-type": content_type})


# field → values that are refused; each is sent to both endpoints
_FIELDS: dict[str, tuple[Any, ...]] = {
    "temperature": (-1, 3, "x", []),
    "top_p": (0, 1.5, -1, "x"),
    "top_k": (-2, 1.5, "x"),
    "min_p": (-0.1, 2),
    "n": (0, -1, "x", 2),
    "presence_penalty": (3, -3),
    "frequency_penalty": (3, -3),
    "repetition_penalty": (0, -1),
    "min_tokens": (-1, 100),
    "max_tokens": (0, -1, "x", 1.5),
    "seed": (2**63, "x"),
    "stop": ([""], 5, [5]),
    "stop_token_ids": (["x"], 5),
    "logit_bias": ({"abc": 1}, {"9999999": 1}, [1], {"1": "x"}),
    "allowed_token_ids": ([9999999], [], ["x"]),
    "bad_words": ([""], 5),
    "prompt_logprobs": (-2, "x"),
    "stream": ("x",),
    "stream_options": ({"include_usage": True},),
    "truncate_prompt_tokens": (0, -2, 1000),
    "response_format": ({"type": "xml"}, "x", {}),
    "ignore_eos": ("x", None),
    "model": ("nope", 5),
    "priority": ("x",),
}


def _label(value: Any) -> str:
    kind = {list: "list-", dict: "object-"}.get(type(value), "")
    text = "".join(c if c.isalnum() or c in "-." else "_" for c in str(value)).strip("_")
    return kind + text[:24]


def _both(field: str, value: Any) -> list[Case]:
    label = f"bad-{field}-{_label(value)}"
    return [completion(label, **{field: value}), chat(label, **{field: value})]


_BODIES = [
    *(
        case
        for path, kind in ((_COMPLETIONS, "completion"), (_CHAT, "chat"))
        for case in (
            _raw(f"{kind}-bad-json", path, "{nope"),
            _raw(f"{kind}-bad-json-trailing", path, '{"model": "tiny",}'),
            _raw(f"{kind}-bad-empty", path, ""),
            _raw(f"{kind}-bad-array", path, "[1, 2]"),
            _raw(f"{kind}-bad-string", path, '"hello"'),
            _raw(f"{kind}-bad-null", path, "null"),
            _raw(f"{kind}-bad-content-type", path, '{"model": "tiny"}', "text/plain"),
            _raw(f"{kind}-bad-form", path, "a=b", "application/x-www-form-urlencoded"),
            _raw(f"{kind}-empty-object", path, "{}"),
        )
    ),
    _raw(
        "completion-bad-temperature-nan",
        _COMPLETIONS,
        '{"model": "tiny", "prompt": "One", "max_tokens": 2, "temperature": NaN}',
    ),
]

_PROMPTS = [
    completion("bad-prompt-absent", prompt=...),
    completion("bad-prompt-null", prompt=None),
    completion("bad-prompt-empty", ""),
    completion("bad-prompt-empty-list", []),
    completion("bad-prompt-list-of-empty", [[]]),
    completion("bad-prompt-list-of-empty-string", [""]),
    completion("bad-prompt-mixed", ["a", [1, 2]]),
    completion("bad-prompt-number", 5),
    completion("bad-prompt-object", {"a": 1}),
    completion("bad-prompt-out-of-vocabulary", [99999]),
    completion("bad-prompt-negative-id", [-1]),
    completion("bad-prompt-too-long", _LONG),
    completion("bad-prompt-too-long-ids", [40] * 400),
    completion("bad-prompt-as-long-as-the-model", [40] * 320),
    completion("prompt-one-below-the-limit", [40] * 319, max_tokens=5),
    completion("bad-prompt-too-long-no-max-tokens", [40] * 400, max_tokens=...),
    completion("bad-prompt-too-long-stream", [40] * 400, stream=True),
    completion("bad-prompt-list-of-empty-stream", [[]], stream=True),
    completion("bad-batch-one-too-long", ["One", [40] * 400]),
    completion("bad-suffix", suffix="end"),
    completion("bad-logprobs-21", logprobs=21),
    completion("bad-logprobs-21-stream", logprobs=21, stream=True),
    completion("bad-logprobs-minus-1", logprobs=-1),
    completion("bad-logprobs-minus-2", logprobs=-2),
    completion("bad-logprobs-string", logprobs="x"),
    completion("bad-prompt-logprobs-21", prompt_logprobs=21),
    completion("bad-prompt-logprobs-minus-1", prompt_logprobs=-1),
    completion("bad-prompt-logprobs-stream", prompt_logprobs=1, stream=True),
    completion("bad-echo-string", echo="x"),
    completion("bad-best-of", n=2, best_of=1, temperature=1, sampled=True),
    completion("bad-beams-stream", use_beam_search=True, n=2, stream=True),
    completion("bad-model-stream", model="nope", stream=True),
    completion("bad-temperature-stream", temperature=-1, stream=True),
    completion("bad-two-fields", temperature="x", top_p="y"),
]

_CHATS = [
    chat("bad-messages-absent", messages=...),
    chat("bad-messages-null", messages=None),
    chat("bad-messages-empty", messages=[]),
    chat("bad-messages-string", messages="hi"),
    chat("bad-messages-object", messages={"role": "user", "content": "hi"}),
    chat("bad-message-string", messages=["hi"]),
    chat("bad-no-role", messages=[{"content": "hi"}]),
    chat("bad-role-number", messages=[{"role": 5, "content": "hi"}]),
    chat("bad-content-number", 5),
    chat("bad-content-object", {"a": 1}),
    chat("bad-part-type", [{"type": "zzz"}]),
    chat("bad-part-no-type", [{"nothing": 1}]),
    chat("bad-part-text-missing", [{"type": "text"}]),
    chat("bad-part-image", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
    chat("bad-part-audio", [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]),
    chat("bad-too-long", _LONG),
    chat("bad-too-long-stream", _LONG, stream=True),
    chat("bad-max-tokens-huge", max_tokens=10000),
    chat("bad-max-completion-tokens-huge", max_tokens=..., max_completion_tokens=10000),
    chat("bad-max-tokens-not-fitting", max_tokens=319),
    chat("bad-top-logprobs-alone", top_logprobs=2),
    chat("bad-top-logprobs-negative", logprobs=True, top_logprobs=-1),
    chat("bad-top-logprobs-minus-2", logprobs=True, top_logprobs=-2),
    chat("bad-top-logprobs-21", logprobs=True, top_logprobs=21),
    chat("bad-top-logprobs-21-stream", logprobs=True, top_logprobs=21, stream=True),
    chat("bad-logprobs-string", logprobs="many"),
    chat("bad-prompt-logprobs-stream", prompt_logprobs=1, stream=True),
    chat("bad-continue-and-generate", continue_final_message=True, add_generation_prompt=True),
    chat("bad-continue-user", continue_final_message=True, add_generation_prompt=True, max_tokens=2),
    chat("bad-template", chat_template="{{ messages[0].content }}"),
    chat("bad-template-kwargs", chat_template_kwargs="x"),
    chat("bad-model-stream", model="nope", stream=True),
    chat("bad-temperature-stream", temperature=-1, stream=True),
]

_TOOLS = [
    chat("bad-tools-empty", tools=[]),
    chat("bad-tools-string", tools="x"),
    chat("bad-tools-no-function", tools=[{"type": "function"}]),
    chat("bad-tools-no-name", tools=[{"type": "function", "function": {}}]),
    chat("bad-tools-type", tools=[{"type": "zzz", "function": {"name": "a"}}]),
    chat("bad-tools-parameters", tools=[{"type": "function", "function": {"name": "a", "parameters": 5}}]),
    chat("bad-tool-choice-without-tools", tool_choice="auto"),
    chat("bad-tool-choice-none-without-tools", tool_choice="none"),
    chat("bad-tool-choice-required-without-tools", tool_choice="required"),
    chat("bad-tool-choice-named-without-tools", tool_choice=NAMED),
    chat("bad-tool-choice-word", tools=TOOLS, tool_choice="zzz"),
    chat("bad-tool-choice-unknown", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "zzz"}}),
    chat("bad-tool-choice-no-name", tools=TOOLS, tool_choice={"type": "function", "function": {}}),
    chat("bad-tool-choice-no-function", tools=TOOLS, tool_choice={"type": "function"}),
    chat("bad-tool-choice-type", tools=TOOLS, tool_choice={"type": "zzz", "function": {"name": "get_weather"}}),
    chat(
        "bad-tool-arguments",
        messages=[
            {"role": "user", "content": "Hello!"},
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{nope"}}
                ],
            },
        ],
        max_tokens=2,
    ),
]

CASES: list[Case] = [
    *_BODIES,
    *_PROMPTS,
    *(case for field, values in _FIELDS.items() for value in values for case in _both(field, value)),
    *_CHATS,
    *_TOOLS,
]

# sent to a server without a parser of tool calls, with an API key
_KEY = {"authorization": "Bearer secret"}


def _keyed(case: Case) -> Case:
    return Case(case.name, case.path, case.body, case.method, case.raw, case.headers | _KEY, case.sampled)


PLAIN_SERVER_CASES: list[Case] = [
    *map(
        _keyed,
        (
            chat("toolless-auto", tools=TOOLS),
            chat("toolless-auto-named", tools=TOOLS, tool_choice="auto"),
            chat("toolless-required", tools=TOOLS, tool_choice="required"),
            chat("toolless-named", tools=TOOLS, tool_choice=NAMED),
            chat("toolless-none", tools=[WEATHER], tool_choice="none", max_tokens=4),
            chat("toolless-auto-stream", tools=TOOLS, stream=True),
            chat("thoughts", chat_template_kwargs={"enable_thinking": True}, max_tokens=60),
            chat("thoughts-stream", chat_template_kwargs={"enable_thinking": True}, max_tokens=60, stream=True),
            chat("thoughts-cut", chat_template_kwargs={"enable_thinking": True}, max_tokens=6),
            chat(
                "thoughts-hidden",
                chat_template_kwargs={"enable_thinking": True},
                max_tokens=60,
                include_reasoning=False,
            ),
            chat("thoughts-none", chat_template_kwargs={"enable_thinking": False}, max_tokens=20),
            chat(
                "template-of-the-request", chat_template="<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
            ),
            chat("max-logprobs-5", logprobs=True, top_logprobs=6),
            completion("max-logprobs-5", logprobs=6),
            completion("tokens-as-ids", logprobs=1, max_tokens=2),
            chat("tokens-as-ids", logprobs=True, top_logprobs=1, max_tokens=2),
            completion("forced-usage", stream=True, max_tokens=2),
            chat("forced-usage", stream=True, max_tokens=2),
            completion("cached-tokens", max_tokens=2),
            completion("override-generation-config", temperature=..., max_tokens=4),
        ),
    ),
    Case("key-missing", _COMPLETIONS, {"model": "tiny", "prompt": "One"}),
    Case("key-wrong", _COMPLETIONS, {"model": "tiny", "prompt": "One"}, headers={"authorization": "Bearer wrong"}),
    Case("key-without-bearer", _COMPLETIONS, {"model": "tiny", "prompt": "One"}, headers={"authorization": "secret"}),
    Case("key-missing-models", "/v1/models", method="GET"),
    Case("key-models", "/v1/models", method="GET", headers=_KEY),
    Case("key-not-needed-health", "/health", method="GET"),
    Case("key-not-needed-version", "/version", method="GET"),
    Case("key-not-needed-tokenize", "/tokenize", {"model": "tiny", "prompt": "One"}),
    Case("key-unknown-route", "/v1/nothing", {"a": 1}),
    Case("key-options", _COMPLETIONS, method="OPTIONS"),
    Case(
        "key-preflight",
        _COMPLETIONS,
        method="OPTIONS",
        headers={"origin": "http://a.example", "access-control-request-method": "POST"},
    ),
]
