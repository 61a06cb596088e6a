"""Limits on what one request may hold, and the time that large and wrong ones take."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from ascend_vllm.entrypoints.anthropic.protocol import MessagesRequest
from ascend_vllm.entrypoints.http.errors import to_http_error
from ascend_vllm.entrypoints.http.streaming import merge
from ascend_vllm.entrypoints.http.validation import _read, check_num_values, validated
from ascend_vllm.entrypoints.openai import protocol_common, request_limits
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionRequest
from ascend_vllm.entrypoints.openai.protocol_misc import DetokenizeRequest
from ascend_vllm.entrypoints.openai.protocol_pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from ascend_vllm.entrypoints.openai.protocol_responses import ResponsesRequest
from ascend_vllm.entrypoints.openai.serving_chat_batch import ChatBatchRequest
from ascend_vllm.errors import RequestError
from tests.server import Server, is_idle, wait_until

MESSAGES = [{"role": "user", "content": "one"}]
MANY = 200_000
# of the processor. One million wrong ids took 11 and 0.9 GB; what is left of it is the reading of the JSON.
SECONDS = 1.0

COMPLETION = {"prompt": "one"}
CHAT = {"messages": MESSAGES}
LONG: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "ids below 0": (CompletionRequest, {"prompt": [-1] * MANY}),
    "ids with a fraction": (CompletionRequest, {"prompt": [1.5] * MANY}),
    "ids as text among ids": (CompletionRequest, {"prompt": [1, "x"] * MANY}),
    "prompts of two kinds": (CompletionRequest, {"prompt": ["x", [1]] * MANY}),
    "many prompts": (CompletionRequest, {"prompt": ["x"] * MANY}),
    "many prompts of ids": (CompletionRequest, {"prompt": [[1]] * MANY}),
    "a prompt of wrong lists": (CompletionRequest, {"prompt": [[1.5] * MANY]}),
    "stop": (CompletionRequest, COMPLETION | {"stop": ["x"] * MANY}),
    "wrong stop": (CompletionRequest, COMPLETION | {"stop": [1] * MANY}),
    "long stop": (CompletionRequest, COMPLETION | {"stop": ["x" * MANY]}),
    "stop_token_ids": (CompletionRequest, COMPLETION | {"stop_token_ids": ["x"] * MANY}),
    "bad_words": (CompletionRequest, COMPLETION | {"bad_words": ["x"] * MANY}),
    "long bad_words": (CompletionRequest, COMPLETION | {"bad_words": ["x" * MANY]}),
    "allowed_token_ids": (CompletionRequest, COMPLETION | {"allowed_token_ids": ["x"] * MANY}),
    "logit_bias": (CompletionRequest, COMPLETION | {"logit_bias": {f"x{i}": "x" for i in range(60_000)}}),
    "unknown fields": (CompletionRequest, COMPLETION | {f"x{i}": 1 for i in range(MANY)}),
    "guided_choice": (CompletionRequest, COMPLETION | {"guided_choice": [1] * MANY}),
    "messages": (ChatCompletionRequest, {"messages": [1] * MANY}),
    "parts": (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    "tools": (ChatCompletionRequest, CHAT | {"tools": [1] * MANY}),
    "documents": (ChatCompletionRequest, CHAT | {"documents": [1] * MANY}),
    "parts of a batch": (ChatBatchRequest, {"messages": [[{"role": "user", "content": [1] * MANY}]]}),
    "conversations": (ChatBatchRequest, {"messages": [[1]] * MANY}),
    "blocks": (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [{"role": "x", "content": [1] * MANY}]}),
    "stop_sequences": (MessagesRequest, CHAT | {"model": "m", "max_tokens": 1, "stop_sequences": [1] * MANY}),
    "items": (ResponsesRequest, {"input": [{}] * MANY}),
    "include": (ResponsesRequest, {"input": "one", "include": ["x"] * MANY}),
    "metadata": (ResponsesRequest, {"input": "one", "metadata": {f"x{i}": 1 for i in range(MANY)}}),
    "inputs": (EmbeddingRequest, {"input": ["x", [1]] * MANY}),
    "texts": (ScoreRequest, {"text_1": "x", "text_2": [1] * MANY}),
    "documents to rank": (RerankRequest, {"query": "x", "documents": [1] * MANY}),
    "tokens": (DetokenizeRequest, {"tokens": ["x"] * MANY}),
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_wrong_field_is_refused_soon(name: str) -> None:
    model, value = LONG[name]
    body = json.dumps(value).encode()
    start = time.thread_time()
    with pytest.raises((RequestError, ValidationError)) as caught:
        _read(body, model)
    error = to_http_error(caught.value)
    assert time.thread_time() - start < SECONDS
    assert error.status == 400
    assert len(error.body["message"]) < 10_000
    field = name.split()[-1]
    assert field not in request_limits.LIMITS or field in error.body["message"]


def test_findings_of_a_short_body_are_all_told() -> None:
    """As before: one for every entry, and for every type that the list may have."""
    with pytest.raises(ValidationError) as caught:
        validated(CompletionRequest, {"prompt": ["a", [1, 2]], "stop": [1, 2]})
    assert caught.value.error_count() == 5 + 3
    with pytest.raises(ValidationError) as caught:
        validated(CompletionRequest, {"prompt": [1.5] * 1000})
    error = to_http_error(caught.value)
    assert caught.value.error_count() == 4
    assert (
        "'loc': 'body.prompt.0', 'msg': 'Input should be a valid integer, got a number with a fractional"
        in (error.body["message"])
    )


@pytest.mark.parametrize(
    "prompt",
    [
        [5] * 1000,
        ["5"] * 999 + ["6"],
        [[5, 6]] * 999 + [["7"]],
        ["a"] * 1000,
        [2.0] * 1000,
        "a" * 1000,
        [True] * 1000,
    ],
)
def test_a_long_body_means_what_a_short_one_means(prompt: Any) -> None:
    short = prompt[-2:]
    expected = CompletionRequest.model_validate({"prompt": short}).prompt
    found = validated(CompletionRequest, {"prompt": prompt})
    assert type(found) is CompletionRequest
    assert isinstance(found.prompt, list | str)
    assert found.prompt[-2:] == expected
    assert found.model_fields_set == {"prompt"}


def test_the_log_of_unknown_fields_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 18 MB with a million names took 6.6 s, and was logged in one line."""
    known: set[str] = set()
    monkeypatch.setattr(protocol_common, "_logged_fields", known)
    for number in range(40):
        protocol_common.log_unknown_fields(f"field {number}.{index}" for index in range(1000))
    assert len(known) == 1000


def test_brackets_in_texts_are_no_lists() -> None:
    text = '[{:,\\"' * 200_000
    assert _read(json.dumps({"prompt": text}).encode(), CompletionRequest).prompt == text
    with pytest.raises(RequestError, match="too many lists and objects; it may have at most 66560"):
        check_num_values(json.dumps({"prompt": text, "x": [[]] * 66_560}).encode())


def test_lists_count_for_each_prompt() -> None:
    request = CompletionRequest(prompt="x", logit_bias={str(token): 1.0 for token in range(2000)}, stop=["a"] * 10)
    request_limits.check_lists(request, 500)
    with pytest.raises(RequestError, match="logit_bias has 2000 entries for each of 600 prompts") as caught:
        request_limits.check_lists(request, 600)
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize(("num_beams", "num_stop_ids"), [(2, 1024), (16, 1024), (32, 256), (256, 4), (1024, 0)])
def test_beams_and_their_ends_are_limited_together(num_beams: int, num_stop_ids: int) -> None:
    request_limits.check_beams(num_beams, num_stop_ids)
    with pytest.raises(RequestError, match=f"in a beam search with {num_beams} beams") as caught:
        request_limits.check_beams(num_beams, 1 << 20)
    assert caught.value.param == "stop_token_ids"


def test_what_is_told_of_prompts_is_limited() -> None:
    """64 choices that each repeated 20 log-probabilities of 30,000 prompt tokens made an answer of 3 GB."""
    request_limits.check_repeated_prompts(30_000, 1, 20, are_repeated=True)
    request_limits.check_repeated_prompts(30_000, 200, None, are_repeated=True)
    request_limits.check_repeated_prompts(30_000, 1024, None, are_repeated=False)
    with pytest.raises(RequestError, match="21 log-probabilities of each of 30000 prompt tokens, for 64 choices"):
        request_limits.check_repeated_prompts(30_000, 64, 20, are_repeated=False)
    with pytest.raises(RequestError, match="repeat 30720000 tokens"):
        request_limits.check_repeated_prompts(30_000, 1024, None, are_repeated=True)


async def test_the_prompts_of_a_request_do_not_begin_all_at_once() -> None:
    """Starting a thousand prompts at once blocked the event loop for all other clients."""
    begun = 0

    async def answers() -> AsyncGenerator[int, None]:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.001)
        yield begun

    together = []

    async def watch() -> None:
        while begun < 200:
            before = begun
            await asyncio.sleep(0)
            together.append(begun - before)

    watching = asyncio.ensure_future(watch())
    assert len([pair async for pair in merge([answers() for _ in range(200)])]) == 200
    await watching
    assert max(together) <= 32


@dataclasses.dataclass(frozen=True)
class TooMany:
    """A request for more sequences than the server below allows: 8.

    Attributes:
        path: of the endpoint.
        fields: of the body.
        param: that the error names.
        text: part of its sentence.
    """

    path: str
    fields: dict[str, Any]
    param: str
    text: str


C, BATCH = "/v1/completions", "/v1/chat/completions/batch"
TOO_MANY = {
    "n": TooMany(C, {"prompt": "a", "n": 9}, "n", "n must be at most 8, got 9."),
    # 15 GB, 42 s and a 500
    "n of ten digits": TooMany(C, {"prompt": "a", "n": 10**9}, "n", "n must be at most 8, got 1000000000."),
    "n in a stream": TooMany(C, {"prompt": "a", "n": 10**9, "stream": True}, "n", "n must be at most 8"),
    "best_of": TooMany(C, {"prompt": "a", "best_of": 10**9}, "best_of", "best_of must be at most 8"),
    "beams": TooMany(C, {"prompt": "a", "best_of": 9, "use_beam_search": True}, "best_of", "best_of must be at most"),
    "prompts": TooMany(
        C, {"prompt": ["a"] * 9}, "prompt", "at most 8 sequences (--max-sequences-per-request), got 9"
    ),
    "prompts of ids": TooMany(C, {"prompt": [[5]] * 9}, "prompt", "at most 8 sequences"),
    "n times prompts": TooMany(C, {"prompt": ["a"] * 3, "n": 3}, "prompt", "3 prompts with n=3 are 9"),
    "best_of times prompts": TooMany(
        C, {"prompt": [[5]] * 3, "best_of": 4}, "prompt", "3 prompts with best_of=4 are"
    ),
    "chat": TooMany("/v1/chat/completions", CHAT | {"n": 10**9}, "n", "n must be at most 8, got 1000000000."),
    "conversations": TooMany(BATCH, {"messages": [MESSAGES] * 9}, "messages", "at most 8 sequences"),
    "conversations times best_of": TooMany(
        BATCH, {"messages": [MESSAGES] * 3, "best_of": 4}, "messages", "3 prompts with best_of=4 are 12"
    ),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_sequences_are_refused_before_anything_is_made(name: str, patient_server: Server) -> None:
    case = TOO_MANY[name]
    start = time.perf_counter()
    response = httpx.post(
        patient_server.url + case.path, json={"max_tokens": 1, "temperature": 1} | case.fields, timeout=60
    )
    assert time.perf_counter() - start < 5
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, case.param), error
    assert case.text in error["message"]


def test_as_many_sequences_as_allowed(patient_server: Server) -> None:
    body = {
        "prompt": [
            "a",
            [5, 6],
        ][:1]
        * 4,
        "n": 2,
        "max_tokens": 2,
        "temperature": 1,
    }
    response = httpx.post(patient_server.url + C, json=body, timeout=60)
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(8))


def test_bad_words_without_number_or_end(patient_server: Server) -> None:
    """A hundred thousand words, and one of as many letters, made a table of 179 GiB, which ended the engine."""
    with httpx.Client(base_url=patient_server.url, timeout=60) as http:
        for words in (["a"] * 100_000, ["a", "b" * 120_000], ["ab"] * 1000 + ["b" * 60_000]):
            response = http.post(C, json={"prompt": "a", "max_tokens": 2, "bad_words": words})
            assert response.status_code == 400, words[:1]
            assert response.json()["error"]["param"] == "bad_words"
        many = ["ab cd"] * 600 + ["b " * 500]
        assert http.post(C, json={"prompt": "a", "max_tokens": 2, "bad_words": many}).status_code == 200
        assert wait_until(lambda: is_idle(http))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 71}, "n"),
        ({"n": 10**9, "stream": True}, "n"),
        ({"n": 1, "best_of": 71}, "best_of"),
        ({"stop": ["x"] * 1025}, "stop"),
        ({"bad_words": ["x"] * 1025}, "bad_words"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(16_385)}}, "logit_bias"),
    ],
)
def test_limits_of_generate(generate_server: Server, fields: dict[str, Any], param: str) -> None:
    response = httpx.post(
        f"{generate_server.url}/generate", json={"prompt": "a", "temperature": 1} | fields, timeout=60
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
