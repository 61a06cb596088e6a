"""Pausing and sleep mode: which requests run or wait, and that their tokens are the same afterwards."""

from __future__ import annotations

from typing import Any

import pytest

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import RequestStatus
from ascend_vllm.errors import RequestError
from ascend_vllm.types.messages import BeamSearchSpec, EngineCoreRequest, FinishReason
from tests.core.memory_executor import (
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    make_core,
    make_request,
    run,
    step,
    step_until,
)


def make_sleeper(num_blocks: int = 24, **settings: Any) -> tuple[EngineCore, MemoryExecutor]:
    return make_core(num_blocks, enable_sleep_mode=True, **settings)


def add(core: EngineCore, names: str, length: int = 4, **options: Any) -> list[EngineCoreRequest]:
    requests = [make_request(name, length, seed=ord(name), **{"max_tokens": 10, **options}) for name in names]
    add_all(core, requests)
    return requests


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_kept_requests_stay_and_new_ones_are_held(async_scheduling: bool) -> None:
    core, executor = make_sleeper(async_scheduling=async_scheduling)
    requests = add(core, "ab")
    collected = step(core, num_steps=3)
    core.call_utility("pause", ["keep", True])
    requests += add(core, "cd")
    run(core, collected)
    num_steps, before = len(executor.steps), dict(collected)
    assert core.state() == {"is_paused": True, "is_sleeping": False}
    assert core.step().outputs == []
    assert len(executor.steps) == num_steps
    assert core.audit()["num_running"] == 2
    assert "c" not in before
    core.call_utility("resume", [])
    assert_tokens(run(core, collected), requests)


def test_draining_runs_earlier_requests_to_their_end_and_holds_new_ones() -> None:
    core, _ = make_sleeper()
    first = add(core, "abcdef")
    collected = step(core)
    core.call_utility("pause", ["wait", False])
    second = add(core, "xyz")
    run(core, collected)
    assert set(collected) == set("abcdef")
    # a held request can be aborted
    core.abort_requests(["y"])
    core.call_utility("resume", [])
    assert_tokens(run(core, collected), [*first, second[0], second[2]])
    assert "y" not in collected


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_sleeping_loses_the_cache_and_no_token(chunked: bool, async_scheduling: bool) -> None:
    core, executor = make_sleeper(chunked=chunked, async_scheduling=async_scheduling, prefix_caching=True)
    requests = add(core, "abc", length=9)
    collected = step(core, num_steps=4)
    core.call_utility("sleep", [1])
    assert core.state() == {"is_paused": True, "is_sleeping": True}
    assert core.audit()["num_free_blocks"] == core.num_blocks
    requests += add(core, "d", length=9)
    run(core, collected)
    core.call_utility("wake_up", [["weights"]])
    assert core.state() == {"is_paused": True, "is_sleeping": True}
    assert not core.has_unfinished()
    core.call_utility("wake_up", [None])
    assert core.state() == {"is_paused": False, "is_sleeping": False}
    run(core, collected)
    assert executor.calls == [("sleep", 1), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert_tokens(collected, requests)


def test_swapped_requests_are_computed_again_after_sleeping() -> None:
    core, _ = make_sleeper(num_blocks=6, num_cpu_blocks=8, max_num_seqs=3, preemption_mode="swap")
    requests = add(core, "abc", max_tokens=12)
    swapped = core._scheduler.requests["c"]
    collected = step_until(core, lambda: swapped.status is RequestStatus.SWAPPED)
    core.call_utility("sleep", [2])
    audit = core.audit()
    assert audit["violations"] == []
    assert core.stats()["num_swapped"] == 0
    assert core.stats()["cpu_cache_usage"] == 0
    core.call_utility("wake_up", [None])
    assert_tokens(run(core, collected), requests)


def test_beam_searches_restart_after_sleeping() -> None:
    found = []
    for sleeps in (False, True):
        core, _ = make_sleeper()
        beams = BeamSearchSpec(width=3, num_returned=3)
        core.add_request(make_request("a", 5, temperature=0.0, message={"beam_search": beams}))
        collected = step(core, num_steps=4)
        if sleeps:
            core.call_utility("sleep", [1])
            core.call_utility("wake_up", [None])
        run(core, collected)
        found.append(collected["a"].beams)
    assert found[0] is not None
    assert found[0] == found[1]


def test_aborting_while_asleep() -> None:
    core, _ = make_sleeper()
    add(core, "ab")
    step(core, {})
    core.call_utility("sleep", [1])
    add(core, "c")
    core.abort_requests(["a", "b", "c"])
    assert core.audit()["num_waiting"] == 0
    core.call_utility("wake_up", [None])
    assert not core.has_unfinished()
    assert_all_free(core)


def test_a_failing_step_fails_those_that_are_held() -> None:
    core, _ = make_sleeper()
    add(core, "a")
    core.call_utility("pause", ["keep", True])
    add(core, "b")
    failed = core.fail_requests("broken").outputs
    assert [(output.request_id, output.finish_reason) for output in failed] == [
        ("a", FinishReason.ERROR),
        ("b", FinishReason.ERROR),
    ]


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("pause", ["bogus", True], "mode must be 'wait' or 'keep', got 'bogus'"),
        ("sleep", [3], "level must be 0, 1 or 2, got 3"),
        ("sleep", [True], "level must be 0, 1 or 2, got True"),
        ("wake_up", [["bogus"]], r"tags must be among .*, got \['bogus'\]"),
    ],
)
def test_wrong_calls(method: str, arguments: list[Any], words: str) -> None:
    core, executor = make_sleeper()
    with pytest.raises(RequestError, match=words):
        core.call_utility(method, arguments)
    assert core.state() == {"is_paused": False, "is_sleeping": False}
    assert executor.calls == []


def test_order_of_waking_up() -> None:
    core, _ = make_sleeper()
    core.call_utility("sleep", [1])
    with pytest.raises(RequestError, match="the weights must wake up before the kv_cache"):
        core.call_utility("wake_up", [["kv_cache"]])
    with pytest.raises(RequestError, match="The engine sleeps: it goes on when it is woken up"):
        core.call_utility("resume", [])
    core.call_utility("wake_up", [["weights", "kv_cache"]])
    assert core.state() == {"is_paused": False, "is_sleeping": False}


def test_level_0_only_pauses() -> None:
    core, executor = make_sleeper()
    core.call_utility("sleep", [0])
    assert core.state() == {"is_paused": True, "is_sleeping": False}
    core.call_utility("wake_up", [None])
    assert core.state() == {"is_paused": False, "is_sleeping": False}
    assert executor.calls == []


def test_sleep_needs_sleep_mode() -> None:
    core, _ = make_core()
    with pytest.raises(RequestError, match="Please use --enable-sleep-mode to enable it"):
        core.call_utility("sleep", [1])
