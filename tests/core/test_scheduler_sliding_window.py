"""Sliding windows: blocks that rows no longer attend to are freed; rows may outgrow the cache."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.core.request import RequestStatus
from ascend_vllm.types.messages import FinishReason
from tests.core.memory_executor import (
    Collected,
    assert_all_free,
    assert_tokens,
    entries,
    generate_alone,
    make_core,
    make_request,
    run,
    serve,
    step,
    step_until,
)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("window", "steps", "most"), [(1, 1, 1), (4, 1, 2), (8, 1, 3), (6, 1, 3), (8, 4, 3), (6, 4, 3)]
)
def test_a_growing_row_has_only_the_blocks_it_attends_to(
    window: int, steps: int, most: int, chunked: bool, async_scheduling: bool
) -> None:
    core, executor = make_core(
        num_blocks=most,
        block_size=4,
        sliding_window=window,
        num_scheduler_steps=steps,
        chunked=chunked,
        async_scheduling=async_scheduling,
    )
    request = make_request("a", 3, max_tokens=60)
    core.add_request(request)
    collected: dict[str, Collected] = {}
    held = []
    while core.has_unfinished():
        step(core, collected)
        audit = core.audit()
        assert audit["violations"] == []
        held.append(audit["num_blocks"] - audit["num_free_blocks"])
    # 62 tokens, though the cache has room for a fraction of them
    assert_tokens(collected, [request])
    assert max(held) == most
    assert {made.num_steps for made in executor.steps[1:]} == {steps}
    assert_all_free(core)


def test_without_a_window_the_same_row_outgrows_the_cache() -> None:
    core, _ = make_core(num_blocks=3, block_size=4)
    core.add_request(make_request("a", 3, max_tokens=60))
    result = run(core)["a"]
    assert (len(result.token_ids), result.finish_reason) == (10, FinishReason.LENGTH)


@pytest.mark.parametrize("chunked", [False, True])
def test_blocks_that_left_a_window_are_allocated_to_others(chunked: bool) -> None:
    core, executor = make_core(num_blocks=8, block_size=4, max_num_seqs=4, sliding_window=5, chunked=chunked)
    requests = [make_request(f"r{i}", 2 + 3 * i, max_tokens=40, seed=i) for i in range(4)]
    # 14 blocks would be needed for each
    serve(core, requests)
    assert core.stats()["num_preemptions"] == 0
    taken = [block_id for made in executor.steps for _, block_ids in made.new_blocks for block_id in block_ids]
    assert len(taken) > 3 * 8


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_windowed_row_resumes_after_a_preemption(async_scheduling: bool, mode: str) -> None:
    core, executor = make_core(
        num_blocks=12,
        num_cpu_blocks=8,
        block_size=4,
        max_num_seqs=1,
        sliding_window=5,
        policy="priority",
        preemption_mode=mode,
        async_scheduling=async_scheduling,
    )
    low = make_request("low", 3, max_tokens=30, message={"priority": 1})
    urgent = make_request("urgent", 4, max_tokens=12)
    core.add_request(low)
    collected: dict[str, Collected] = {}
    step_until(core, lambda: "low" in collected and len(collected["low"].token_ids) >= 20, collected)
    core.add_request(urgent)
    assert_tokens(run(core, collected), [low, urgent])
    resumed = entries(executor, "low")[1]
    held = [block_id for block_id in resumed.block_ids if block_id >= 0]
    if mode == "swap":
        # only the blocks it attends to were swapped, and have their old positions in the table
        assert len(held) <= 2 < len(resumed.block_ids)
        assert resumed.block_ids[-len(held) :] == held
    else:
        assert len(held) == len(resumed.block_ids) >= 6


def preempted_beyond_the_cache(**settings: Any) -> Collected:
    """The result of a row that has outgrown the cache and is preempted."""
    core, _ = make_core(num_blocks=3, block_size=4, max_num_seqs=2, sliding_window=4, policy="priority", **settings)
    low = make_request("low", 3, max_tokens=40, message={"priority": 1})
    urgent = make_request("urgent", 9, max_tokens=3)
    after = make_request("after", 2, max_tokens=3, message={"priority": 2})
    core.add_request(low)
    collected: dict[str, Collected] = {}
    step_until(core, lambda: "low" in collected and len(collected["low"].token_ids) >= 20, collected)
    request = core._scheduler.requests["low"]
    core.add_request(urgent)
    core.add_request(after)
    step_until(core, lambda: request.status is not RequestStatus.RUNNING, collected)
    assert request.status in (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
    assert_tokens(run(core, collected, max_steps=200), [urgent, after])
    alone = generate_alone(low, 1, 64)[0]
    assert collected["low"].token_ids == alone[: len(collected["low"].token_ids)]
    return collected["low"]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_sequence_that_cannot_be_recomputed_ends_with_length(
    chunked: bool, async_scheduling: bool, package_log: pytest.LogCaptureFixture
) -> None:
    result = preempted_beyond_the_cache(chunked=chunked, async_scheduling=async_scheduling)
    assert result.finish_reason is FinishReason.LENGTH
    assert 20 <= len(result.token_ids) < 40
    num_tokens = 3 + len(result.token_ids)
    expected = f"its {num_tokens} tokens exceed the capacity of the KV cache, 12 tokens"
    assert expected in package_log.text


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_swapped_sequence_resumes(async_scheduling: bool) -> None:
    result = preempted_beyond_the_cache(preemption_mode="swap", num_cpu_blocks=3, async_scheduling=async_scheduling)
    assert (len(result.token_ids), result.finish_reason) == (40, FinishReason.LENGTH)
