"""With async_scheduling the next step is made while one is computed."""

from __future__ import annotations

import types
from concurrent.futures import Future
from typing import Any

import pytest

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.types.messages import EngineCoreOutput
from ascend_vllm.types.step import SchedulerOutput, StepOutput
from tests.core.memory_executor import (
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    entries,
    generate_alone,
    make_config,
    make_core,
    make_request,
    run,
    scheduled,
    serve,
    step,
)


class WatchedFuture(Future[StepOutput]):
    """Records when its result is awaited."""

    def __init__(self, inner: Future[StepOutput], step_id: int, events: list[str]) -> None:
        super().__init__()
        self.inner, self.step_id, self.events = inner, step_id, events

    def result(self, timeout: float | None = None) -> StepOutput:
        self.events.append(f"wait {self.step_id}")
        return self.inner.result(timeout)


class WatchedExecutor(MemoryExecutor):
    """Records the order in which steps are handed out and awaited."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.events: list[str] = []

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        self.events.append(f"make {step.step_id}")
        return WatchedFuture(super().execute_model(step), step.step_id, self.events)


def make_watched(**settings: Any) -> tuple[EngineCore, WatchedExecutor]:
    config = make_config(**settings)
    executor = WatchedExecutor(config, 64, 0)
    return EngineCore(config, executor), executor


def test_a_step_is_handed_out_before_the_last_ones_outputs_arrive() -> None:
    core, executor = make_watched(async_scheduling=True)
    serve(core, [make_request("a", 3, max_tokens=4)])
    assert executor.events == ["make 0", "make 1", "wait 0", "make 2", "wait 1", "make 3", "wait 2", "wait 3"]


def make_midway(
    monkeypatch: pytest.MonkeyPatch, step_s: float, **settings: Any
) -> tuple[EngineCore, WatchedExecutor]:
    """A core whose second step took `step_s`, before the outputs of the third are awaited."""
    core, executor = make_watched(**settings)
    now = 0.0
    monkeypatch.setattr("ascend_vllm.core.scheduler.time", types.SimpleNamespace(monotonic=lambda: now))
    core.add_request(make_request("a", 3, max_tokens=9))
    core.step()
    now += step_s
    core.step()
    del executor.events[:]
    return core, executor


@pytest.mark.parametrize(
    ("async_scheduling", "step_s", "events"),
    [
        (True, 0.05, ["wait 2", "make 3", "wait 2"]),
        (True, 0.001, ["make 3", "wait 2"]),
        (False, 0.05, ["make 2", "wait 2"]),
    ],
)
def test_a_long_step_ends_before_the_next_is_scheduled(
    monkeypatch: pytest.MonkeyPatch, async_scheduling: bool, step_s: float, events: list[str]
) -> None:
    core, executor = make_midway(monkeypatch, step_s, async_scheduling=async_scheduling)
    core.await_long_step()
    core.step()
    assert executor.events == events


def test_what_a_long_step_raises_comes_from_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    core, executor = make_midway(monkeypatch, 0.05, async_scheduling=True)
    executor.fail_next = RuntimeError("the device is gone")
    core.await_long_step()
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()


def test_without_it_steps_alternate() -> None:
    core, executor = make_watched(async_scheduling=False)
    core.add_request(make_request("a", 3, max_tokens=4))
    run(core)
    assert executor.events == [f"{what} {index}" for index in range(4) for what in ("make", "wait")]


@pytest.mark.parametrize("chunked", [False, True])
def test_both_orders_take_the_same_steps(chunked: bool) -> None:
    # they end by length, which is known before a step's outputs are
    requests = [make_request(name, 4 + index, max_tokens=5 + index) for index, name in enumerate("abc")]
    schedules = []
    for async_scheduling in (False, True):
        core, executor = make_core(async_scheduling=async_scheduling, chunked=chunked, max_num_batched_tokens=64)
        serve(core, requests)
        schedules.append(scheduled(executor))
    assert schedules[0] == schedules[1]


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_a_row_that_ends_by_length_is_not_computed_again(max_tokens: int) -> None:
    core, executor = make_core(async_scheduling=True)
    core.add_request(make_request("a", 3, max_tokens=max_tokens))
    core.add_request(make_request("long", 3, max_tokens=9))
    run(core)
    assert sum("a" in counts for counts in scheduled(executor)) == max_tokens
    assert len(executor.steps) == 9


def test_a_row_at_the_models_length_is_not_computed_again() -> None:
    core, executor = make_core(async_scheduling=True, max_model_len=8)
    core.add_request(make_request("a", 5, max_tokens=50))
    assert len(run(core)["a"].token_ids) == 4
    assert [counts["a"] for counts in scheduled(executor)] == [5, 1, 1, 1]


@pytest.mark.parametrize(("async_scheduling", "num_wasted"), [(False, 0), (True, 1)])
def test_a_stop_wastes_one_token_at_most(async_scheduling: bool, num_wasted: int) -> None:
    prompt = [1, 2, 3]
    third = generate_alone(make_request("x", prompt), 1, 64)[0][2]
    core, executor = make_core(async_scheduling=async_scheduling)
    requests = [make_request("a", prompt, stop_token_ids=[third]), make_request("b", 4, max_tokens=9)]
    serve(core, requests)
    assert sum("a" in counts for counts in scheduled(executor)) == 3 + num_wasted


def test_a_wasted_token_is_not_counted() -> None:
    prompt = [1, 2, 3]
    third = generate_alone(make_request("x", prompt), 1, 64)[0][2]
    core, _ = make_core(async_scheduling=True)
    core.add_request(make_request("a", prompt, stop_token_ids=[third]))
    stats = []
    while core.has_unfinished():
        stats.append(core.step().stats)
    assert [stat.num_generation_tokens for stat in stats if stat is not None] == [1, 1, 1, 0]


def test_a_freed_slot_is_reused_while_its_last_step_is_under_way() -> None:
    prompt = [1, 2, 3]
    third = generate_alone(make_request("x", prompt), 1, 64)[0][2]
    core, executor = make_core(async_scheduling=True, max_num_seqs=1)
    requests = [
        make_request("a", prompt, stop_token_ids=[third]),
        make_request("b", 5),
        make_request("c", 2, max_tokens=2),
    ]
    # tokens that a step sampled for an ended row must not be appended to the row that has its slot now
    serve(core, requests)
    assert [entries(executor, name)[0].slot for name in "abc"] == [0, 0, 0]


@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_an_abort_frees_blocks_at_once(num_steps: int) -> None:
    core, executor = make_core(num_blocks=4, async_scheduling=True, max_num_seqs=1, max_model_len=16)
    core.add_request(make_request("a", 8, max_tokens=8))
    collected = step(core, num_steps=num_steps)
    assert executor.late, "a step is to be under way"
    core.abort_requests(["a"])
    assert_all_free(core)
    assert core.has_unfinished()
    # all blocks and the slot are reused, while the workers have not computed the old row yet
    request = make_request("b", 12, max_tokens=4, seed=4)
    core.add_request(request)
    run(core, collected)
    assert len(collected["a"].token_ids) == num_steps
    assert collected["a"].finish_reason is None
    assert_tokens(collected, [request])


def test_nothing_is_emitted_after_an_abort_and_the_core_becomes_idle() -> None:
    core, executor = make_watched(async_scheduling=True)
    core.add_request(make_request("a", 3))
    core.step()
    core.abort_requests(["a"])
    assert core.has_unfinished()
    assert core.step().outputs == []
    assert not core.has_unfinished()
    assert not executor.late
    assert executor.events == ["make 0", "make 1", "wait 0", "wait 1"]
    assert_all_free(core)
    # and it takes new requests
    serve(core, [make_request("a", 4)])


def test_every_token_is_emitted_once() -> None:
    core, _ = make_core(async_scheduling=True, max_num_seqs=2)
    requests = [make_request(f"r{i}", i + 1, max_tokens=3 + i, seed=i) for i in range(5)]
    add_all(core, requests)
    outputs: list[EngineCoreOutput] = []
    while core.has_unfinished():
        made = core.step()
        ids = [output.request_id for output in made.outputs]
        assert len(set(ids)) == len(ids)
        outputs += made.outputs
    for request in requests:
        own = [output for output in outputs if output.request_id == request.request_id]
        expected = generate_alone(request, request.sampling_params.seed or 0, 64)[0]
        assert [output.new_token_ids for output in own] == [[token] for token in expected]
        assert [output.finish_reason for output in own[:-1]] == [None] * (len(own) - 1)
        assert [output.first_scheduled_time is not None for output in own] == [True] + [False] * (len(own) - 1)


def test_a_row_with_pending_tokens_is_not_preempted() -> None:
    core, executor = make_core(num_blocks=6, async_scheduling=True, max_num_seqs=3)
    requests = [make_request(name, 4, max_tokens=12, seed=i) for i, name in enumerate("abc")]
    serve(core, requests)
    assert core.stats()["num_preemptions"] > 0
    for made in executor.steps:
        for row in made.new_rows:
            # a resumed row has all of its tokens: those of steps under way were awaited before
            assert len(row.token_ids) - row.num_prompt_tokens in range(12)
    resumed = entries(executor, "c")[-1]
    assert resumed.token_ids[4:] == generate_alone(requests[2], 2, 64)[0][: len(resumed.token_ids) - 4]


def test_a_failed_step_fails_all_requests_and_frees_everything() -> None:
    core, executor = make_core(async_scheduling=True)
    for name in "ab":
        core.add_request(make_request(name, 3))
    core.step()
    executor.fail_next = RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.step()
    outputs = core.fail_requests("The engine has died.").outputs
    assert sorted((output.request_id, output.error) for output in outputs) == [
        ("a", "The engine has died."),
        ("b", "The engine has died."),
    ]
    assert_all_free(core)
