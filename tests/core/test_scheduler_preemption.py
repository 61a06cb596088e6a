"""Preemption: which requests, by recomputation or swapping, and how they resume."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import RequestStatus
from ascend_vllm.types.messages import EngineCoreRequest
from ascend_vllm.types.step import MoveKind
from tests.core.memory_executor import (
    Collected,
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    entries,
    make_core,
    make_request,
    run,
    serve,
    step,
    step_until,
)


def make_tight(names: str = "abc", **given: Any) -> tuple[EngineCore, MemoryExecutor, list[EngineCoreRequest]]:
    """Six blocks for requests that finally need four each; the last is preempted first."""
    settings = {"num_blocks": 6, "block_size": 4, "max_num_seqs": 3, "preemption_mode": "swap", **given}
    core, executor = make_core(**settings)
    requests = [make_request(name, 4, max_tokens=12, seed=i) for i, name in enumerate(names)]
    add_all(core, requests)
    return core, executor, requests


def step_to(
    core: EngineCore, request_id: str, status: RequestStatus, into: dict[str, Collected] | None = None
) -> dict[str, Collected]:
    """Steps until a request is in a state."""
    request = core._scheduler.requests[request_id]
    return step_until(core, lambda: request.status is status, into)


# ---- swapping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_swapped_blocks_are_swapped_in_and_nothing_is_recomputed(chunked: bool, async_scheduling: bool) -> None:
    core, executor, requests = make_tight(num_cpu_blocks=8, chunked=chunked, async_scheduling=async_scheduling)
    collected = step_to(core, "c", RequestStatus.SWAPPED)
    request = core._scheduler.requests["c"]
    num_swapped_blocks = len(request.cpu_block_ids)
    assert num_swapped_blocks > 0
    assert request.block_ids == []
    stats = core.stats()
    assert (stats["num_swapped"], stats["num_preemptions"]) == (1, 1)
    assert stats["cpu_cache_usage"] == num_swapped_blocks / 8
    assert_tokens(run(core, collected), requests)
    resumed = entries(executor, "c")[1:]
    assert resumed
    for row in resumed:
        assert row.num_computed_tokens == len(row.token_ids) - 1 > 4
        assert len(row.block_ids) == -(-row.num_computed_tokens // 4)
    assert executor.moves[MoveKind.SWAP_OUT] == executor.moves[MoveKind.SWAP_IN] >= num_swapped_blocks
    assert core.stats()["num_swapped"] == 0
    assert core.stats()["cpu_cache_usage"] == 0.0


@pytest.mark.parametrize("num_cpu_blocks", [0, 1])
def test_without_room_in_cpu_memory_it_is_recomputed(num_cpu_blocks: int) -> None:
    core, executor, requests = make_tight("ab", num_blocks=5, num_cpu_blocks=num_cpu_blocks)
    collected = step_to(core, "b", RequestStatus.PREEMPTED)
    assert core.stats()["num_swapped"] == 0
    assert core.stats()["num_preemptions"] == 1
    assert_tokens(run(core, collected), requests)
    assert not executor.moves
    assert [row.num_computed_tokens for row in entries(executor, "b")] == [0, 0]


def test_a_full_cpu_pool_is_used_as_far_as_it_goes() -> None:
    core, _, requests = make_tight(num_cpu_blocks=2)
    collected = step_to(core, "c", RequestStatus.SWAPPED)
    # c has both CPU blocks; b is preempted, too, before a has all blocks that it needs
    step_to(core, "b", RequestStatus.PREEMPTED, collected)
    assert core.stats()["num_swapped"] == 1
    assert_tokens(run(core, collected), requests)


@pytest.mark.parametrize(
    ("mode", "several", "expected"),
    [
        (None, "", RequestStatus.PREEMPTED),
        (None, "child", RequestStatus.SWAPPED),
        (None, "parent", RequestStatus.SWAPPED),
        (None, "former parent", RequestStatus.PREEMPTED),
        ("recompute", "child", RequestStatus.PREEMPTED),
        ("swap", "", RequestStatus.SWAPPED),
    ],
)
def test_which_requests_are_swapped(mode: str | None, several: str, expected: RequestStatus) -> None:
    core, executor = make_core(num_blocks=5, block_size=4, max_num_seqs=2, num_cpu_blocks=8, preemption_mode=mode)
    prompt = [1, 2, 3, 4]
    requests = [
        make_request("old", prompt, max_tokens=12),
        make_request("last", prompt, max_tokens=12, message={"parent_id": "old"} if several == "child" else None),
    ]
    if several in ("parent", "former parent"):
        requests.append(make_request("child", prompt, message={"parent_id": "last"}))
    add_all(core, requests)
    if several == "former parent":
        core.abort_requests(["child"])
        requests.pop()
    collected = step_until(core, lambda: core.stats()["num_preemptions"])
    assert core._scheduler.requests["last"].status is expected
    assert_tokens(run(core, collected), requests)
    resumed = entries(executor, "last")[1]
    assert (resumed.num_computed_tokens > 0) is (expected is RequestStatus.SWAPPED)


def test_swapped_requests_resume_before_new_prompts() -> None:
    core, executor, requests = make_tight(num_cpu_blocks=8)
    collected = step_to(core, "c", RequestStatus.SWAPPED)
    # it needs one block and a slot, and both are free
    late = make_request("late", 1, max_tokens=2)
    core.add_request(late)
    while len(entries(executor, "c")) == 1:
        assert core.has_unfinished()
        assert not entries(executor, "late")
        step(core, collected)
    assert_tokens(run(core, collected), [*requests, late])
    order = [row.request_id for made in executor.steps for row in made.new_rows]
    assert order.index("late") > order.index("c", 3)


def test_a_swapped_row_decodes_in_the_step_that_swaps_it_in() -> None:
    core, executor, _ = make_tight("ab", num_blocks=5, num_cpu_blocks=8)
    run(core)
    back = next(made for made in executor.steps if made.new_rows and made.new_rows[0].num_computed_tokens)
    assert [kind for kind, _, _ in back.block_moves] == [MoveKind.SWAP_IN] * len(back.block_moves)
    assert [target for _, _, target in back.block_moves] == back.new_rows[0].block_ids
    assert back.new_rows[0].slot in back.slots


def test_moves_precede_the_use_of_the_blocks_they_free() -> None:
    # no block is free when a needs its third
    core, executor, _ = make_tight("ab", num_blocks=4, num_cpu_blocks=8)
    run(core)
    out = next(made for made in executor.steps if made.block_moves)
    swapped = {source for kind, source, _ in out.block_moves if kind == MoveKind.SWAP_OUT}
    taken = {block_id for _, block_ids in out.new_blocks for block_id in block_ids}
    # a step may use the blocks that it swaps out: the workers copy first
    assert swapped & taken
    assert out.freed_slots == [1]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_abort_while_swapped_frees_the_cpu_blocks(async_scheduling: bool) -> None:
    core, executor, requests = make_tight(num_cpu_blocks=8, async_scheduling=async_scheduling)
    collected = step_to(core, "c", RequestStatus.SWAPPED)
    assert core.stats()["cpu_cache_usage"] > 0
    core.abort_requests(["c"])
    assert core.stats()["cpu_cache_usage"] == 0.0
    assert core.stats()["num_swapped"] == 0
    assert core.audit()["violations"] == []
    assert_tokens(run(core, collected), requests[:2])
    assert executor.moves[MoveKind.SWAP_IN] == 0 or len(entries(executor, "b")) > 1
    assert len(entries(executor, "c")) == 1


def test_failing_all_while_one_is_swapped_frees_everything() -> None:
    core, _, _ = make_tight(num_cpu_blocks=8)
    step_to(core, "c", RequestStatus.SWAPPED)
    outputs = core.fail_requests("The engine has died.").outputs
    assert sorted(output.request_id for output in outputs) == ["a", "b", "c"]
    assert core.stats()["cpu_cache_usage"] == 0.0
    assert core.stats()["num_swapped"] == 0
    assert_all_free(core)


def test_swapped_in_blocks_are_found_again() -> None:
    core, executor, requests = make_tight("ab", num_blocks=6, num_cpu_blocks=8, prefix_caching=True)
    collected = step_to(core, "b", RequestStatus.SWAPPED)
    assert_tokens(run(core, collected), requests)
    # its blocks were cached again after it was swapped in
    history = [*requests[1].prompt_token_ids, *collected["b"].token_ids]
    core.add_request(make_request("next", [*history, 5], max_tokens=1))
    assert run(core)["next"].num_cached_tokens == 12
    assert executor.moves[MoveKind.SWAP_IN] > 0


# ---- recomputation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["recompute", None])
def test_recomputation_frees_all_blocks_and_moves_nothing(mode: str | None) -> None:
    core, executor, requests = make_tight(num_cpu_blocks=8, preemption_mode=mode)
    collected = step_to(core, "c", RequestStatus.PREEMPTED)
    request = core._scheduler.requests["c"]
    assert (request.block_ids, request.cpu_block_ids, request.num_computed_tokens) == ([], [], 0)
    assert_tokens(run(core, collected), requests)
    assert not executor.moves
    assert entries(executor, "c")[-1].num_computed_tokens == 0
    # prompt and generated tokens are recomputed in one step
    assert len(entries(executor, "c")[-1].token_ids) > 4


def test_a_half_computed_prompt_is_preempted_and_recomputed() -> None:
    core, executor = make_core(
        num_blocks=7, block_size=4, max_num_seqs=2, chunked=True, max_num_batched_tokens=4, max_model_len=32
    )
    requests = [make_request("a", 4, max_tokens=15), make_request("b", 18, max_tokens=3)]
    core.add_request(requests[0])
    collected = step(core)
    core.add_request(requests[1])
    step(core, collected)
    # b has five blocks and has computed three tokens; a takes the last free block now, and b's at its ninth token
    step_to(core, "b", RequestStatus.PREEMPTED, collected)
    assert "b" not in collected
    assert_tokens(run(core, collected), requests)
    assert [row.num_computed_tokens for row in entries(executor, "b")] == [0, 0]


def test_the_request_that_needs_a_block_may_be_preempted_itself() -> None:
    core, executor = make_core(num_blocks=4, block_size=4, max_num_seqs=2, max_model_len=16)
    # the younger one is the first to need a third block
    requests = [make_request("old", 2, max_tokens=8), make_request("young", 7, max_tokens=4)]
    serve(core, requests)
    assert len(entries(executor, "old")) == 1
    assert len(entries(executor, "young")) == 2 == core.stats()["num_preemptions"] + 1


def test_a_row_that_was_preempted_counts_every_time() -> None:
    core, executor, requests = make_tight("abc", preemption_mode="recompute", num_blocks=5)
    results = run(core)
    assert_tokens(results, requests)
    num_entries = sum(len(entries(executor, name)) for name in "abc")
    assert core.stats()["num_preemptions"] == num_entries - 3 > 1
