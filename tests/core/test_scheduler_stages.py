"""Pipeline stages: one step each, of different rows; the first stage gets the tokens that the last samples."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.types.messages import BeamSearchSpec
from tests.core.memory_executor import (
    MemoryExecutor,
    add_all,
    assert_tokens,
    entries,
    make_core,
    make_request,
    run,
    serve,
    step,
)


def _slots_under_way(core: EngineCore) -> list[list[int]]:
    return [made.slots for made in core._scheduler._in_flight]


@pytest.mark.parametrize(("num_stages", "num_rows"), [(2, 4), (2, 5), (3, 7), (4, 2)])
def test_decoding_rows_are_shared_among_the_stages(num_stages: int, num_rows: int) -> None:
    core, executor = make_core(num_stages=num_stages, max_num_seqs=8)
    requests = [make_request(f"r{i}", 5 + i, max_tokens=20, seed=i) for i in range(num_rows)]
    add_all(core, requests)
    collected = step(core)
    most = -(-num_rows // num_stages)
    for _ in range(12):
        step(core, collected)
        under_way = _slots_under_way(core)
        slots = [slot for made in under_way for slot in made]
        assert len(set(slots)) == len(slots)
        assert max(map(len, under_way)) <= most
        # the step whose outputs have just arrived is the next one made
        assert len(under_way) == min(num_stages, num_rows) - 1
    assert_tokens(run(core, collected), requests)
    # without first tokens, sampled from the prompts, and last tokens, which no stage needs
    assert sum(len(made.sampled) for made in executor.steps) == num_rows * 19


def test_chunks_of_a_prompt_do_not_wait_for_each_other() -> None:
    core, executor = make_core(num_stages=3, chunked=True, max_num_batched_tokens=8)
    requests = [make_request("long", 40, max_tokens=4)]
    core.add_request(requests[0])
    collected = step(core)
    assert [made.num_scheduled_tokens for made in executor.steps] == [[8]]
    # two chunks are under way, though the first has no outputs yet
    assert len(core._in_flight) == 2
    assert_tokens(run(core, collected), requests)


def test_multi_steps_become_single() -> None:
    core, executor = make_core(num_stages=2, num_scheduler_steps=4)
    serve(core, [make_request(f"r{i}", 6, max_tokens=9, seed=i) for i in range(3)])
    assert {made.num_steps for made in executor.steps} == {1}


@pytest.mark.parametrize("settings", [{}, {"chunked": True}, {"preemption_mode": "swap", "async_scheduling": True}])
def test_preempted_rows_keep_their_tokens(settings: dict[str, Any]) -> None:
    core, executor = make_core(num_blocks=9, num_cpu_blocks=8, num_stages=2, **settings)
    requests = [make_request(f"r{i}", 6, max_tokens=16, seed=i) for i in range(3)]
    serve(core, requests)
    assert max(len(entries(executor, request.request_id)) for request in requests) > 1


def test_a_reused_slot_gets_no_token_of_the_row_before() -> None:
    core, executor = make_core(num_stages=2, max_num_seqs=2)
    requests = [make_request(f"r{i}", 6, max_tokens=12, seed=i) for i in range(4)]
    add_all(core, requests)
    collected = step(core, num_steps=4)
    core.abort_requests(["r0", "r1"])
    results = run(core, collected)
    assert_tokens(results, requests[2:])
    assert {row.slot for row in entries(executor, "r2") + entries(executor, "r3")} == {0, 1}


def test_a_beam_search_waits_for_all_its_rows() -> None:
    def search(num_stages: int) -> Any:
        core, _ = make_core(num_stages=num_stages, max_num_seqs=6)
        spec = BeamSearchSpec(4, 2, 1.0, True)
        core.add_request(make_request("b", 5, message={"beam_search": spec}, temperature=0.0, max_tokens=10))
        core.add_request(make_request("r", 7, max_tokens=10))
        results = run(core)
        return results["b"].beams, results["r"].token_ids

    assert search(3) == search(1)


def test_sleep_waits_for_the_steps_of_all_stages() -> None:
    core, executor = make_core(num_stages=2, enable_sleep_mode=True)
    requests = [make_request(f"r{i}", 6, max_tokens=12, seed=i) for i in range(3)]
    add_all(core, requests)
    collected = step(core, num_steps=3)
    core.sleep(1)
    assert executor.calls == [("sleep", 1)]
    core.call_utility("wake_up", [None])
    assert_tokens(run(core, collected), requests)


def test_a_stage_that_gets_no_tokens_fails() -> None:
    """The tests above can fail."""
    core, executor = make_core(num_stages=2)
    core.add_request(make_request("r", 6))
    add_updates = core._scheduler.rows.add_updates

    def omit_sampled(made: Any) -> None:
        add_updates(made)
        made.sampled = []

    core._scheduler.rows.add_updates = omit_sampled  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="the first stage does not know the token"):
        run(core)
    assert isinstance(executor, MemoryExecutor)
