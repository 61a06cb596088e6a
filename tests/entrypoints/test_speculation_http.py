"""A server that drafts tokens: what its usage and its metrics say of drafts, beside a server that does not."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.entrypoints.conftest import ENGINE_FLAGS
from tests.server import OPENAI_SERVER, Server, wait_until

# most of what a tiny model says recurs; with the limit every step drafts, whatever it costs
FLAGS = ["--speculative-model", "[ngram]", "--num-speculative-tokens", "3", "--ngram-prompt-lookup-max", "2"]
FLAGS += ["--use-v2-block-manager", "--speculative-disable-by-batch-size", "64"]
# engines and API servers of their own
FLAGS += ["--data-parallel-size", "2", "--api-server-count", "2"]
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
COMPLETION = BASE | {"prompt": "One two three one two three"}
CHAT = BASE | {"messages": [{"role": "user", "content": "One two three one two three"}]}
NAMES = ("accepted_prediction_tokens", "rejected_prediction_tokens")


@pytest.fixture(scope="module")
def drafting(tiny_dir: str) -> Iterator[httpx.Client]:
    flags = ["--model", tiny_dir, "--served-model-name", "tiny", *ENGINE_FLAGS, *FLAGS]
    with contextlib.closing(Server(OPENAI_SERVER, flags)) as server:
        server.wait_ready()
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def usages(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Usage of every chunk of a stream."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    with http.stream("POST", path, json=body | {"stream": True, "stream_options": options}) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(event)["usage"] for event in events[:-1]]


def counts(usage: dict[str, Any]) -> tuple[int, int]:
    details = usage["completion_tokens_details"]
    assert tuple(details) == NAMES
    return details[NAMES[0]], details[NAMES[1]]


def totals(http: httpx.Client) -> tuple[float, float]:
    """Accepted and rejected drafts of both engines."""
    text = http.get("/metrics").text
    pattern = r"^vllm:spec_decode_num_%s_tokens_total\{.*\} (\S+)$"
    accepted, drafted = (
        sum(map(float, re.findall(pattern % name, text, re.MULTILINE))) for name in ("accepted", "draft")
    )
    return accepted, drafted - accepted


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)])
def test_usage_counts_a_requests_own_drafts(
    drafting: httpx.Client, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    before = totals(drafting)
    plain, answer = (ask(client, path, body) for client in (http, drafting))
    texts = [one["choices"][0].get("text") or one["choices"][0]["message"]["content"] for one in (plain, answer)]
    assert texts[0] == texts[1]
    accepted, rejected = counts(answer["usage"])
    assert 0 < accepted < answer["usage"]["completion_tokens"]
    # one of the two API servers hears from the engines of all steps
    expected = before[0] + accepted, before[1] + rejected
    assert wait_until(lambda: totals(drafting) == expected), (totals(drafting), expected)
    assert plain["usage"]["completion_tokens_details"] is None
    # a stream counts the same, and on its way never backwards
    chunks = [counts(usage) for usage in usages(drafting, path, body)]
    assert chunks[-1] == (accepted, rejected)
    assert all(list(column) == sorted(column) for column in zip(*chunks, strict=True))


def test_choices_and_prompts_add_up(drafting: httpx.Client) -> None:
    whole = ask(drafting, "/v1/completions", COMPLETION)["usage"]
    both = ask(drafting, "/v1/completions", COMPLETION | {"prompt": [COMPLETION["prompt"]] * 2})["usage"]
    assert counts(both) == tuple(2 * count for count in counts(whole))
    choices = CHAT | {"n": 2, "temperature": 0.5, "seed": 3}
    whole = ask(drafting, "/v1/chat/completions", choices)["usage"]
    *parts, last = usages(drafting, "/v1/chat/completions", choices)
    assert counts(last) == counts(whole)
    assert max(counts(part)[0] for part in parts) < counts(whole)[0]


def test_a_server_without_drafts_has_no_such_metrics(drafting: httpx.Client, http: httpx.Client) -> None:
    assert "spec_decode" not in http.get("/metrics").text
    pattern = r'^vllm:spec_decode_efficiency\{engine="(\d)".*$'
    assert re.findall(pattern, drafting.get("/metrics").text, re.MULTILINE) == ["0", "1"]
