"""Tokens, models, versions and other small routes."""

from __future__ import annotations

from typing import Any

from tests.compat.requests_chat import TOOLS
from tests.compat.requests_common import Case

_MESSAGES = [{"role": "user", "content": "Hello!"}]


def _tokenize(name: str, **body: Any) -> Case:
    return Case(f"tokenize-{name}", "/tokenize", {"model": "tiny", **body})


def _detokenize(name: str, tokens: Any, **body: Any) -> Case:
    return Case(f"detokenize-{name}", "/detokenize", {"model": "tiny", "tokens": tokens, **body})


_TOKENS = [
    _tokenize("prompt", prompt="One two three"),
    _tokenize("unicode", prompt="早上好 🎉"),
    _tokenize("empty", prompt=""),
    _tokenize("special", prompt="<|im_start|>user<think>"),
    _tokenize("strings", prompt="One two 早", return_token_strs=True),
    _tokenize("add-special-tokens", prompt="One", add_special_tokens=False),
    _tokenize("longer-than-the-model", prompt="Tick tock" * 400),
    Case("tokenize-no-model", "/tokenize", {"prompt": "One"}),
    Case("tokenize-alias", "/tokenize", {"model": "tiny2", "prompt": "One"}),
    _tokenize("messages", messages=_MESSAGES),
    _tokenize("messages-no-generation-prompt", messages=_MESSAGES, add_generation_prompt=False),
    _tokenize(
        "messages-continue",
        messages=[*_MESSAGES, {"role": "assistant", "content": "I am"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    _tokenize("messages-special-tokens", messages=_MESSAGES, add_special_tokens=True),
    _tokenize("messages-kwargs", messages=_MESSAGES, chat_template_kwargs={"enable_thinking": True}),
    _tokenize("messages-tools", messages=_MESSAGES, tools=TOOLS),
    _tokenize("messages-strings", messages=_MESSAGES, return_token_strs=True),
    _tokenize("messages-empty", messages=[]),
    _tokenize("messages-template", messages=_MESSAGES, chat_template="{{ messages[0].content }}"),
    _tokenize("messages-both", messages=_MESSAGES, continue_final_message=True, add_generation_prompt=True),
    _tokenize("nothing"),
    _tokenize("number", prompt=5),
    _tokenize("list", prompt=["One"]),
    _tokenize("both", prompt="One", messages=_MESSAGES),
    Case("tokenize-wrong-model", "/tokenize", {"model": "nope", "prompt": "One"}),
    Case("tokenize-bad-json", "/tokenize", raw="{nope"),
    Case("tokenize-get", "/tokenize", method="GET"),
    _detokenize("ids", [51, 80, 71, 40]),
    _detokenize("empty", []),
    _detokenize("special", [1, 40, 2]),
    _detokenize("half-a-character", [160]),
    _detokenize("out-of-vocabulary", [99999]),
    _detokenize("negative", [-1]),
    _detokenize("string", "x"),
    _detokenize("strings", ["x"]),
    _detokenize("absent", None),
    Case("detokenize-no-model", "/detokenize", {"tokens": [40]}),
    Case("detokenize-wrong-model", "/detokenize", {"model": "nope", "tokens": [40]}),
]

_ROUTES = [
    Case("models", "/v1/models", method="GET"),
    Case("models-post", "/v1/models", {}),
    Case("models-one", "/v1/models/tiny", method="GET"),
    Case("health", "/health", method="GET"),
    Case("health-post", "/health", {}),
    Case("health-head", "/health", method="HEAD"),
    Case("ping", "/ping", method="GET"),
    Case("ping-post", "/ping"),
    Case("version", "/version", method="GET"),
    Case("load", "/load", method="GET"),
    Case("unknown-route", "/v1/nothing", {}),
    Case("unknown-route-get", "/nothing", method="GET"),
    Case("root", "/", method="GET"),
    Case("generate", "/generate", {"prompt": "One"}),
    Case("completions-get", "/v1/completions", method="GET"),
    Case("chat-get", "/v1/chat/completions", method="GET"),
    Case("chat-delete", "/v1/chat/completions", method="DELETE"),
    Case("completions-slash", "/v1/completions/", {"model": "tiny", "prompt": "One"}),
    Case("embeddings-of-a-generator", "/v1/embeddings", {"model": "tiny", "input": "One"}),
    Case("pooling-of-a-generator", "/pooling", {"model": "tiny", "input": "One"}),
    Case("score-of-a-generator", "/score", {"model": "tiny", "text_1": "One", "text_2": "Two"}),
    Case("rerank-of-a-generator", "/rerank", {"model": "tiny", "query": "One", "documents": ["Two"]}),
    Case("classify-of-a-generator", "/classify", {"model": "tiny", "input": "One"}),
    Case("sleep-without-development", "/sleep"),
    Case("is-sleeping-without-development", "/is_sleeping", method="GET"),
    Case("wake-up-without-development", "/wake_up"),
    Case("reset-prefix-cache-without-development", "/reset_prefix_cache"),
    Case("server-info-without-development", "/server_info", method="GET"),
    Case("profile-not-configured", "/start_profile"),
    Case("lora-not-enabled", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    Case("tokenizer-info-not-enabled", "/tokenizer_info", method="GET"),
    Case("scale-out-generate", "/inference/v1/generate", {"model": "tiny"}),
    Case("scale-out-render-chat", "/v1/chat/completions/render", {"model": "tiny"}),
    Case("scale-out-render", "/v1/completions/render", {"model": "tiny"}),
    Case(
        "invocations-completion",
        "/invocations",
        {"model": "tiny", "prompt": "One two", "temperature": 0, "max_tokens": 3},
    ),
    Case(
        "invocations-chat",
        "/invocations",
        {"model": "tiny", "messages": _MESSAGES, "temperature": 0, "max_tokens": 3},
    ),
    Case("invocations-neither", "/invocations", {"model": "tiny"}),
    Case(
        "chat-batch",
        "/v1/chat/completions/batch",
        {"model": "tiny", "messages": [_MESSAGES, _MESSAGES], "temperature": 0, "max_tokens": 3},
    ),
    Case("chat-batch-flat", "/v1/chat/completions/batch", {"model": "tiny", "messages": _MESSAGES, "max_tokens": 3}),
    Case("chat-batch-empty", "/v1/chat/completions/batch", {"model": "tiny", "messages": [], "max_tokens": 3}),
]

CASES: list[Case] = [*_TOKENS, *_ROUTES]
