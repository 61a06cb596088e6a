"""The scheduler's features as a user of a server meets them: flags on the command line, HTTP, /metrics.

Every server answers like a plain one, which overlaps, shares, cuts and moves nothing; what /metrics and the streams
tell shows that the features are at work. All models are tiny and in float32. With --all prefixes and chunks are
shared and cut with two workers, too, under mp and under Ray: one scheduler is above them all, and the tests of
tests/distributed do the same without HTTP.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.beam_search_reference import reference_mode, reference_model
from tests.server import (
    GENERATE_SERVER,
    OPENAI_SERVER,
    arrangement_params,
    arrangements,
    is_idle,
    metric,
    running,
    wait_until,
)
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.slow

MAX_MODEL_LEN = 32768
FLAGS = ["--served-model-name", "tiny", "--dtype", "float32"]
# the checkpoints say 512; more is fine for what is compared here
ENV = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
# a guard
TIMEOUT_S = 180.0
LONG_FLAGS = [*FLAGS, "--max-model-len", str(MAX_MODEL_LEN)]
GREEDY = {"model": "tiny", "temperature": 0, "ignore_eos": True}
# more than anybody waits for: it runs until its client goes
ENDLESS = GREEDY | {"prompt": "Hello", "max_tokens": 30000, "stream": True}


@contextlib.contextmanager
def client_of(flags: list[str], model: str = "qwen2", env: dict[str, str] | None = None) -> Iterator[httpx.Client]:
    """A client of a server that was started with these flags."""
    with (
        running(OPENAI_SERVER, ["--model", tiny_model(model), *flags], ENV | (env or {}), TIMEOUT_S) as server,
        httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def plain() -> Iterator[httpx.Client]:
    """Nothing is on, and no step is made while another one runs; eight sequences at a time."""
    flags = ["--disable-async-output-proc", "--block-size", "16", "--num-gpu-blocks-override", "2048"]
    with client_of([*LONG_FLAGS, *flags, "--max-num-seqs", "8"]) as client:
        yield client


@pytest.fixture(scope="module", params=arrangement_params())
def chunked(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """Prefix cache and chunked prefill; a step computes 64 tokens at most."""
    flags = ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--block-size", "16"]
    flags += ["--enable-chunked-prefill", "--max-num-batched-tokens", "64", "--max-num-seqs", "32"]
    flags += arrangements()[request.param]
    env = request.getfixturevalue("ray_environment") if "ray" in flags else None
    with client_of([*LONG_FLAGS, *flags, "--num-gpu-blocks-override", "2048"], env=env) as client:
        yield client


@pytest.fixture(scope="module")
def single() -> Iterator[httpx.Client]:
    """One sequence at a time, by priority, four tokens at a time, in large blocks."""
    flags = ["--num-scheduler-steps", "4", "--multi-step-stream-outputs", "false", "--block-size", "128"]
    flags += ["--max-num-seqs", "1", "--scheduling-policy", "priority", "--num-gpu-blocks-override", "256"]
    with client_of([*LONG_FLAGS, *flags]) as client:
        yield client


@pytest.fixture(scope="module")
def tight() -> Iterator[httpx.Client]:
    """Hardly more than one long sequence fits; the others are swapped."""
    flags = ["--num-scheduler-steps", "4", "--multi-step-stream-outputs", "true", "--block-size", "64"]
    flags += ["--preemption-mode", "swap", "--swap-space", "0.01", "--num-gpu-blocks-override", "8"]
    with client_of([*FLAGS, *flags, "--max-num-seqs", "16", "--scheduler-delay-factor", "0.5"]) as client:
        yield client


def ask(http: httpx.Client, **fields: Any) -> Any:
    """The answer of /v1/completions."""
    response = http.post("/v1/completions", json=GREEDY | {"prompt": "Hello"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def ask_all(http: httpx.Client, requests: list[dict[str, Any]]) -> list[list[str]]:
    """Texts of requests that are sent at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return [texts(answer) for answer in pool.map(lambda fields: ask(http, **fields), requests)]


@contextlib.contextmanager
def streaming(http: httpx.Client, **fields: Any) -> Iterator[Iterator[Any]]:
    """The events of a stream; its connection is closed behind the block, wherever the stream is."""
    with http.stream("POST", "/v1/completions", json=ENDLESS | fields) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        yield (json.loads(line) for line in lines if line != "[DONE]")


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def num_waiting_is(http: httpx.Client, count: int) -> bool:
    return metric(http, "num_requests_waiting") == count


def make_prompt(length: int, first: int = 0) -> list[int]:
    return [3 + (first + i * (1 + first % 5)) % 380 for i in range(length)]


def cached_tokens(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def step_sizes(http: httpx.Client) -> dict[str, float]:
    """The histogram of tokens per step: upper bound → steps up to it; "count" and "sum" beside them."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("vllm:iteration_tokens_total_"):
                found[sample.labels.get("le") or sample.name.rpartition("_")[2]] = sample.value
    return found


# ---- prefix cache --------------------------------------------------------------------------------------------


def test_requests_share_prefixes(chunked: httpx.Client, plain: httpx.Client) -> None:
    shared = make_prompt(170, 1)
    prompts = [shared + make_prompt(length, 50 + length) for length in (1, 20, 40)]
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    before = [metric(chunked, name) for name in names]
    answers = [ask(chunked, prompt=prompt, max_tokens=20) for prompt in prompts]
    assert [cached_tokens(answer) for answer in answers] == [0, 160, 160]
    assert [texts(answer) for answer in answers] == [
        texts(ask(plain, prompt=prompt, max_tokens=20)) for prompt in prompts
    ]
    queries, hits = (metric(chunked, name) for name in names)
    assert (queries - before[0], hits - before[1]) == (sum(map(len, prompts)), 320)
    assert metric(chunked, "gpu_prefix_cache_hit_rate") == pytest.approx(hits / queries)
    assert metric(plain, "gpu_prefix_cache_hit_rate") == -1


def test_a_salt_separates(chunked: httpx.Client) -> None:
    prompt = make_prompt(100, 2)
    answers = [ask(chunked, prompt=prompt, cache_salt=salt) for salt in ("a", "b", "a", None, "b", None)]
    assert [cached_tokens(answer) for answer in answers] == [0, 0, 96, 0, 96, 96]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1


def test_turns_of_a_chat_find_those_before(chunked: httpx.Client, plain: httpx.Client) -> None:
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 3}]
    known = 0
    for turn in range(4):
        body = GREEDY | {"messages": messages, "max_tokens": 24}
        answer, expected = (http.post("/v1/chat/completions", json=body).json() for http in (chunked, plain))
        content = answer["choices"][0]["message"]["content"]
        assert content == expected["choices"][0]["message"]["content"]
        assert cached_tokens(answer) >= known // 16 * 16
        assert (cached_tokens(answer) > 0) == (turn > 0)
        known = answer["usage"]["prompt_tokens"]
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"And {turn}?"}]


# ---- chunked prefill -----------------------------------------------------------------------------------------


def test_a_stream_goes_on_while_a_long_prompt_comes_in(chunked: httpx.Client, plain: httpx.Client) -> None:
    long = {"prompt": make_prompt(3000, 3), "max_tokens": 3}
    expected = texts(ask(plain, **long))
    before = step_sizes(chunked)
    num_seen = 0
    with (
        streaming(chunked, return_token_ids=True) as events,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        next(events)
        answer = pool.submit(ask, chunked, **long)
        while not answer.done():
            # a client that reads slowly gets the tokens of several steps in one event
            num_seen += len(next(events)["choices"][0]["token_ids"])
        assert texts(answer.result()) == expected
        # the prompt comes in 48 steps, each of which gives the stream a token
        assert num_seen >= 10
    after = step_sizes(chunked)
    assert after["64.0"] == after["count"], "a step computes no more than --max-num-batched-tokens"
    assert after["count"] - before["count"] >= 48
    assert after["count"] - after["32.0"] - (before["count"] - before["32.0"]) >= 46, "chunks fill their steps"
    # the stream's client has gone, and so have its blocks
    assert wait_until(lambda: is_idle(chunked)), chunked.get("/metrics").text


def test_lost_clients_free_their_blocks(chunked: httpx.Client) -> None:
    with streaming(chunked, n=3, temperature=1.0) as first, streaming(chunked, prompt=make_prompt(200)) as second:
        next(first)
        next(second)
        assert wait_until(lambda: metric(chunked, "num_requests_running") == 4)
        assert metric(chunked, "kv_cache_usage_perc") > 0
    assert wait_until(lambda: is_idle(chunked)), chunked.get("/metrics").text


# ---- several steps at once -----------------------------------------------------------------------------------


def assert_steps_are_one_answer(http: httpx.Client, plain: httpx.Client) -> list[int]:
    """Compares a stream with the plain server's answer and returns how many tokens each event brought."""
    fields: dict[str, Any] = {
        "prompt": make_prompt(130, 4),
        "max_tokens": 11,
        "logprobs": 2,
        "return_token_ids": True,
    }
    for more in ({}, {"temperature": 0.8, "seed": 5, "presence_penalty": 0.6, "repetition_penalty": 1.2}):
        whole = ask(plain, **fields, **more)["choices"][0]
        with streaming(http, **fields, **more) as events:
            choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert joined(choice["token_ids"] for choice in choices) == whole["token_ids"]
        logprobs = joined(choice["logprobs"]["token_logprobs"] for choice in choices)
        assert logprobs == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-4)
        top = joined(choice["logprobs"]["top_logprobs"] for choice in choices)
        assert [list(one) for one in top] == [list(one) for one in whole["logprobs"]["top_logprobs"]]
        assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"
    return [len(choice["token_ids"]) for choice in choices]


def test_tokens_of_several_steps_come_together(single: httpx.Client, plain: httpx.Client) -> None:
    """The prompt's step gives one token; a client that reads slowly gets the tokens of several calls in one event."""
    ends = list(itertools.accumulate(assert_steps_are_one_answer(single, plain)))
    assert set(ends) <= {1, 5, 9, 11}
    assert ends[-1] == 11


def test_tokens_of_several_steps_come_one_by_one(tight: httpx.Client, plain: httpx.Client) -> None:
    assert assert_steps_are_one_answer(tight, plain) == [1] * 11


# ---- order ---------------------------------------------------------------------------------------------------


def test_urgent_requests_are_answered_first(single: httpx.Client, plain: httpx.Client) -> None:
    finished: list[int] = []
    prompt = make_prompt(20, 6)

    def wait_for(priority: int) -> list[int]:
        """The first tokens of a request that makes room for the next one only when it is closed."""
        token_ids: list[int] = []
        with streaming(single, prompt=prompt, priority=priority, return_token_ids=True) as events:
            while len(token_ids) < 200:
                token_ids += next(events)["choices"][0]["token_ids"]
            finished.append(priority)
        return token_ids[:200]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        with streaming(single, priority=-10) as occupant:
            next(occupant)
            answers = []
            for number, priority in enumerate((5, 3, 1)):
                answers.append(pool.submit(wait_for, priority))
                assert wait_until(functools.partial(num_waiting_is, single, number + 1))
            assert finished == []
        (expected,) = ask(plain, prompt=prompt, max_tokens=200, return_token_ids=True)["choices"]
        assert [answer.result() for answer in answers] == [expected["token_ids"]] * 3
    assert finished == [1, 3, 5]
    assert wait_until(lambda: is_idle(single))


def test_an_urgent_request_does_not_wait_for_the_running_one(single: httpx.Client, plain: httpx.Client) -> None:
    fields: dict[str, Any] = {"prompt": make_prompt(20, 7), "max_tokens": 8}
    before = metric(single, "num_preemptions_total")
    with streaming(single, return_token_ids=True) as events:
        token_ids = next(events)["choices"][0]["token_ids"]
        # there is one place only
        assert texts(ask(single, **fields, priority=-1)) == texts(ask(plain, **fields))
        assert metric(single, "num_preemptions_total") == before + 1
        while len(token_ids) < 600:
            token_ids += next(events)["choices"][0]["token_ids"]
    with streaming(plain, return_token_ids=True) as events:
        expected = joined(event["choices"][0]["token_ids"] for event in itertools.islice(events, 600))
    assert token_ids[:600] == expected[:600]
    assert wait_until(lambda: is_idle(single))


# ---- preemption ----------------------------------------------------------------------------------------------


def test_swapped_requests_answer_the_same(tight: httpx.Client, plain: httpx.Client) -> None:
    """Two of these never fit at a time; sequences of one prompt are among them."""
    requests: list[dict[str, Any]] = [
        {"prompt": make_prompt(30 + number, number), "max_tokens": 300 + number} for number in range(6)
    ]
    requests += [{"prompt": make_prompt(70, 9), "max_tokens": 100, "n": 3, "temperature": 0.8, "seed": 3}]
    before = metric(tight, "num_preemptions_total")
    assert ask_all(tight, requests) == ask_all(plain, requests)
    assert metric(tight, "num_preemptions_total") > before
    assert wait_until(lambda: is_idle(tight))
    for name in ("num_requests_swapped", "cpu_cache_usage_perc"):
        assert metric(tight, name) == 0
    (info,) = [line for line in tight.get("/metrics").text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="64"' in info
    assert 'num_gpu_blocks="8"' in info
    assert 'num_cpu_blocks="0"' not in info


# ---- several sequences ---------------------------------------------------------------------------------------

SAMPLED = {"temperature": 0.9, "seed": 11, "max_tokens": 12, "ignore_eos": True}
SEVERAL: list[dict[str, Any]] = [
    SAMPLED | {"n": 3},
    SAMPLED | {"n": 2, "best_of": 5},
    {"n": 3, "use_beam_search": True, "temperature": 0, "max_tokens": 12, "ignore_eos": True},
]


@pytest.mark.parametrize("fields", SEVERAL, ids=["n", "best_of", "beams"])
def test_sequences_of_one_prompt(
    chunked: httpx.Client, tight: httpx.Client, plain: httpx.Client, fields: dict[str, Any]
) -> None:
    prompt = "The quick brown fox jumps over the lazy dog while the sun shines."
    chat = {"messages": [{"role": "user", "content": prompt}]}

    def ask_chat(http: httpx.Client) -> list[str]:
        response = http.post("/v1/chat/completions", json={"model": "tiny"} | chat | fields)
        assert response.status_code == 200, response.text
        return [choice["message"]["content"] for choice in response.json()["choices"]]

    expected = texts(ask(plain, prompt=prompt, **fields))
    assert len(set(expected)) == fields["n"]
    for http in (chunked, tight):
        assert texts(ask(http, prompt=prompt, **fields)) == expected
        assert ask_chat(http) == ask_chat(plain)
        assert wait_until(functools.partial(is_idle, http))


def test_sequences_of_one_prompt_by_generate(plain: httpx.Client) -> None:
    flags = ["--dtype", "float32", "--enable-prefix-caching", "--enable-chunked-prefill", "--block-size", "64"]
    flags += ["--max-num-batched-tokens", "64", "--max-num-seqs", "16", "--num-scheduler-steps", "4"]
    prompt = "The quick brown fox jumps over the lazy dog while the sun shines."
    flags += ["--model", tiny_model("qwen2"), "--num-gpu-blocks-override", "64"]
    with running(GENERATE_SERVER, flags) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for fields in SEVERAL:
            expected = [prompt + text for text in texts(ask(plain, prompt=prompt, **fields))]
            # the second time the prompt is in the cache
            for _ in range(2):
                response = http.post("/generate", json={"prompt": prompt} | fields)
                assert response.status_code == 200, response.text
                assert response.json()["text"] == expected
        # two searches have run
        assert server.log.count("meanwhile steps are made one at a time, not 4 (--num-scheduler-steps)") == 1


# ---- sliding window ------------------------------------------------------------------------------------------


# how few blocks a row keeps is in test_scheduler_sliding_window.py; what it reads, and its tokens, in
# test_sliding_window.py and test_equivalence_matrix.py
@pytest.mark.exhaustive
def test_a_sliding_window_keeps_few_blocks() -> None:
    """It has 40 tokens: 4 blocks of 16 hold them wherever it lies, and what four steps add."""
    flags = ["--block-size", "16", "--num-gpu-blocks-override", "2048", "--num-scheduler-steps", "4"]
    prompt = make_prompt(100, 8)
    ids = torch.tensor([prompt])
    with reference_mode():
        expected = reference_model("mistral").generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=200, eos_token_id=None
        )[0, len(prompt) :]
    blocks_in_use: list[float] = []
    with client_of([*LONG_FLAGS, *flags], model="mistral") as http:

        def has_gone_far() -> bool:
            blocks_in_use.append(metric(http, "kv_cache_usage_perc") * 2048)
            return metric(http, "generation_tokens_total") >= 2000

        with streaming(http, prompt=prompt, return_token_ids=True) as events:
            found = joined(event["choices"][0]["token_ids"] for event in itertools.islice(events, 200))
            assert wait_until(has_gone_far)
        assert min(blocks_in_use) > 0
        assert max(blocks_in_use) <= 4
        assert wait_until(lambda: is_idle(http))
    assert found[:200] == expected.tolist()


# ---- room for others --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hello", "n": 40}),
        ("/v1/completions", {"prompt": ["Hello"] * 40}),
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "Hello"}]] * 40}),
    ],
)
def test_a_request_of_many_sequences_lets_another_one_pass(
    plain: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    body = {"model": "tiny", "temperature": 1, "ignore_eos": True, "max_tokens": 400, **fields}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        large = pool.submit(plain.post, path, json=body)
        # the first sequence, which may have ended by now, and six others
        assert wait_until(lambda: metric(plain, "num_requests_running") >= 6)
        small = plain.post("/v1/completions", json=GREEDY | {"prompt": "Hello", "max_tokens": 4})
        assert small.status_code == 200
        # and five times as many sequences waited before it
        assert not large.done() and metric(plain, "num_requests_waiting") > 0
        answer = large.result()
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 40, answer.text
