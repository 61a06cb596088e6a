"""Prefix caching through the scheduler: which tokens are computed or found, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import RequestStatus
from ascend_vllm.types.messages import EngineCoreOutput
from tests.core.memory_executor import (
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    entries,
    make_core,
    make_request,
    run,
    scheduled,
    serve,
    step,
)

# 10 tokens, 2 full blocks of 4
PROMPT = list(range(1, 11))
OTHER = list(range(21, 31))


def make_cache(num_blocks: int = 64, **given: Any) -> tuple[EngineCore, MemoryExecutor]:
    return make_core(num_blocks, **{"prefix_caching": True, **given})


def num_found(core: EngineCore, prompt: list[int], request_id: str = "probe") -> int:
    """Number of a prompt's tokens that a new request finds; it runs, and its own blocks are cached."""
    core.add_request(make_request(request_id, prompt, max_tokens=1))
    return run(core)[request_id].num_cached_tokens


@pytest.mark.parametrize(("prefix_caching", "num_cached"), [(True, 8), (False, 0)])
def test_only_tokens_that_are_not_cached_are_computed(prefix_caching: bool, num_cached: int) -> None:
    core, executor = make_core(prefix_caching=prefix_caching)
    first, second = make_request("first", PROMPT), make_request("second", PROMPT, seed=2)
    core.add_request(first)
    results = run(core)
    core.add_request(second)
    results |= run(core)
    assert_tokens(results, [first, second])
    row = entries(executor, "second")[0]
    index = next(i for i, made in enumerate(executor.steps) if row in made.new_rows)
    assert (row.num_computed_tokens, scheduled(executor)[index]) == (num_cached, {"second": 10 - num_cached})
    assert (results["first"].num_cached_tokens, results["second"].num_cached_tokens) == (0, num_cached)


@pytest.mark.parametrize("steps", [1, 4])
def test_cached_tokens_are_emitted_with_the_first_output_only(steps: int) -> None:
    core, _ = make_cache(num_scheduler_steps=steps)
    num_found(core, PROMPT)
    core.add_request(make_request("a", PROMPT))
    outputs: list[EngineCoreOutput] = []
    while core.has_unfinished():
        outputs += core.step().outputs
    assert len(outputs) > 1
    assert [output.num_cached_tokens for output in outputs] == [8] + [0] * (len(outputs) - 1)


@pytest.mark.parametrize(("length", "num_cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_full_blocks_are_found_and_one_token_is_left_to_compute(length: int, num_cached: int) -> None:
    core, _ = make_cache()
    prompt = list(range(length))
    assert [num_found(core, prompt), num_found(core, prompt)] == [0, num_cached]


@pytest.mark.parametrize("length", [3, 4, 7, 8, 10])
def test_common_prefixes_of_prompts_are_found(length: int) -> None:
    core, _ = make_cache()
    num_found(core, PROMPT)
    assert num_found(core, PROMPT[:length] + OTHER) == min(length // 4, 2) * 4


def test_two_in_one_step_share() -> None:
    core, executor = make_cache()
    requests = [make_request("a", PROMPT), make_request("b", PROMPT, seed=2)]
    add_all(core, requests)
    collected = step(core)
    assert scheduled(executor) == [{"a": 10, "b": 2}]
    a, b = entries(executor, "a")[0].block_ids, entries(executor, "b")[0].block_ids
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    pool = core._scheduler.kv_cache.pool
    assert [pool.reference_counts[block_id] for block_id in (*a, b[2])] == [2, 2, 1, 1]
    assert pool.num_free == pool.num_blocks - 4
    assert_tokens(run(core, collected), requests)


def test_cached_tokens_take_no_budget() -> None:
    core, executor = make_cache(max_num_batched_tokens=12, max_model_len=12)
    num_found(core, PROMPT)
    for name in "abcd":
        core.add_request(make_request(name, PROMPT, max_tokens=1))
    core.step()
    # 40 tokens of prompt in a step of 12
    assert scheduled(executor)[-1] == dict.fromkeys("abcd", 2)


def test_chunks_begin_after_cached_tokens() -> None:
    core, executor = make_cache(max_num_batched_tokens=4, chunked=True)
    prompt = PROMPT + OTHER
    num_found(core, PROMPT)
    before = len(executor.steps)
    request = make_request("a", prompt, max_tokens=2)
    results = serve(core, [request])
    assert [counts["a"] for counts in scheduled(executor)[before:]] == [4, 4, 4, 1]
    assert results["a"].num_cached_tokens == 8


def test_the_computed_chunks_of_a_prompt_are_found() -> None:
    core, executor = make_cache(max_num_batched_tokens=12, chunked=True, max_num_partial_prefills=2)
    requests = [make_request("a", PROMPT + OTHER), make_request("b", PROMPT + OTHER)]
    core.add_request(requests[0])
    core.step()
    core.add_request(requests[1])
    results = run(core)
    # of a's five blocks three were computed before, one is within b's first step, and the last token is b's own
    assert scheduled(executor)[:2] == [{"a": 12}, {"a": 6, "b": 4}]
    assert entries(executor, "b")[0].num_computed_tokens == 16
    assert results["b"].num_cached_tokens == 16
    assert_tokens(results, requests)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_the_next_turn_finds_the_answer_too(steps: int, async_scheduling: bool) -> None:
    core, _ = make_cache(num_scheduler_steps=steps, async_scheduling=async_scheduling)
    history = PROMPT[:6]
    for turn, num_cached in enumerate([0, 12, 24]):
        request = make_request(f"turn{turn}", history, max_tokens=8)
        core.add_request(request)
        result = run(core)[request.request_id]
        # of 6 + 8 tokens 13 are computed, since nothing follows the last; 12 fill blocks. Then of 17 + 8.
        assert result.num_cached_tokens == num_cached
        history = [*history, *result.token_ids, 7, 8, 9]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_blocks_of_an_aborted_request_are_found(num_steps: int, async_scheduling: bool) -> None:
    core, _ = make_cache(async_scheduling=async_scheduling)
    core.add_request(make_request("a", PROMPT))
    step(core, num_steps=num_steps)
    core.abort_requests(["a"])
    assert core.audit()["num_free_blocks"] == core.num_blocks
    request = make_request("b", PROMPT, seed=3)
    core.add_request(request)
    results = run(core)
    assert results["b"].num_cached_tokens == 8
    assert_tokens(results, [request])


def test_a_chunk_that_was_never_made_is_not_found() -> None:
    core, _ = make_cache(max_num_batched_tokens=4, chunked=True)
    core.add_request(make_request("a", PROMPT))
    core.step()
    core.abort_requests(["a"])
    request = make_request("b", PROMPT)
    core.add_request(request)
    results = run(core)
    assert results["b"].num_cached_tokens == 4
    assert_tokens(results, [request])


def test_a_preempted_request_finds_its_own_blocks() -> None:
    core, executor = make_cache(num_blocks=7, max_num_seqs=2)
    requests = [make_request("a", PROMPT, max_tokens=9), make_request("b", OTHER, max_tokens=9)]
    add_all(core, requests)
    results = run(core)
    assert core.stats()["num_preemptions"] == 1
    assert_tokens(results, requests)
    entered, resumed = entries(executor, "b")
    assert (entered.num_computed_tokens, len(entered.block_ids)) == (0, 3)
    # a took one of the seven blocks: b's last, which was uncached
    assert 8 <= resumed.num_computed_tokens < len(resumed.token_ids)
    # blocks found after a preemption count neither as cached tokens of the request nor as a look-up
    assert results["b"].num_cached_tokens == 0
    stats = core.stats()
    assert (stats["num_prefix_queries"], stats["num_prefix_hits"]) == (20, 0)


def test_blocks_of_a_preempted_request_are_found_by_others() -> None:
    core, _ = make_cache(num_blocks=8, max_num_seqs=1, policy="priority")
    core.add_request(make_request("low", PROMPT, message={"priority": 1}))
    core.step()
    core.add_request(make_request("urgent", PROMPT, max_tokens=1))
    outputs = core.step().outputs
    assert core._scheduler.requests["low"].status is RequestStatus.PREEMPTED
    assert [(output.request_id, output.num_cached_tokens) for output in outputs] == [("urgent", 8)]
    run(core)


@pytest.mark.parametrize("touched", ["first", "second", None])
def test_the_least_recently_used_blocks_are_uncached_first(touched: str | None) -> None:
    prompts = {"first": PROMPT, "second": OTHER}
    # two cached blocks of each request, and three others
    core, _ = make_cache(num_blocks=7)
    assert num_found(core, PROMPT) == num_found(core, OTHER) == 0
    if touched is not None:
        assert num_found(core, prompts[touched]) == 8
    # five blocks: the three, and the two least recently used
    assert num_found(core, [39] * 17) == 0
    forgotten = "second" if touched == "first" else "first"
    left = "first" if touched == "first" else "second"
    assert num_found(core, prompts[left]) == 8
    assert num_found(core, prompts[forgotten]) == 0


def test_a_sequences_last_blocks_are_uncached_first() -> None:
    core, _ = make_cache(num_blocks=6)
    prompt = list(range(17))
    assert num_found(core, prompt) == 0
    # three blocks: the two that are not cached, and the last of the four
    assert num_found(core, [39] * 9) == 0
    assert num_found(core, prompt) == 12


def test_salts_separate() -> None:
    core, executor = make_cache()
    found = {}
    for index, salt in enumerate(["", "a", "b", "a", "", "b"]):
        keys = [(0, salt)] if salt else []
        request = make_request(f"{index}{salt}", PROMPT, message={"content_keys": keys}, max_tokens=2)
        results = serve(core, [request])
        found[request.request_id] = results[request.request_id].num_cached_tokens
    assert found == {"0": 0, "1a": 0, "2b": 0, "3a": 8, "4": 8, "5b": 8}
    tables = {name: entries(executor, name)[0].block_ids[:2] for name in found}
    assert tables["1a"] == tables["3a"]
    assert len({*tables["0"], *tables["1a"], *tables["2b"]}) == 6


@pytest.mark.parametrize(("place", "num_cached"), [(3, 0), (5, 4), (8, 8)])
def test_a_key_inside_the_prompt_separates_from_its_block_on(place: int, num_cached: int) -> None:
    core, _ = make_cache()
    num_found(core, PROMPT)
    core.add_request(make_request("image", PROMPT, message={"content_keys": [(place, "image")]}))
    assert run(core)["image"].num_cached_tokens == num_cached


def test_lookups_and_hits_are_counted() -> None:
    core, _ = make_cache()
    seen = []
    for index, prompt in enumerate([PROMPT, PROMPT, [0, *PROMPT], PROMPT[:4] + OTHER]):
        num_found(core, prompt, f"r{index}")
        stats = core.stats()
        seen.append((stats["num_prefix_queries"], stats["num_prefix_hits"]))
    assert seen == [(10, 0), (20, 8), (31, 8), (45, 12)]


def test_lookups_are_counted_at_admission() -> None:
    core, _ = make_cache(max_num_seqs=1)
    core.add_request(make_request("a", PROMPT))
    core.add_request(make_request("b", PROMPT))
    step(core, num_steps=4)
    assert core.stats()["num_prefix_queries"] == 10


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_reset_empties_the_cache_without_affecting_requests(async_scheduling: bool) -> None:
    core, executor = make_cache(async_scheduling=async_scheduling)
    requests = [make_request("runs", PROMPT), make_request("after", PROMPT), make_request("again", PROMPT)]
    core.add_request(requests[0])
    collected = step(core, num_steps=2)
    assert core.call_utility("reset_prefix_cache", []) is True
    core.add_request(requests[1])
    run(core, collected)
    assert collected["after"].num_cached_tokens == 0
    assert entries(executor, "after")[0].num_computed_tokens == 0
    # blocks cached after the reset are found
    core.add_request(requests[2])
    run(core, collected)
    assert collected["again"].num_cached_tokens == 8
    assert_tokens(collected, requests)


def test_cached_blocks_count_as_free() -> None:
    core, _ = make_cache(num_blocks=4)
    num_found(core, PROMPT)
    assert core.stats()["kv_cache_usage"] == 0.0
    assert_all_free(core)
    # and can be allocated
    serve(core, [make_request("a", [39] * 12, max_tokens=4)])
