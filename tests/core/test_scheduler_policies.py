"""Priorities, delayed prompts, prompts that share a step, and the time limit of waiting."""

from __future__ import annotations

import random
import statistics
import types
from typing import Any

import pytest

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.prompt_chunks import ChunkSizeController
from ascend_vllm.core.request import RequestStatus
from ascend_vllm.types.messages import EngineCoreRequest, FinishReason
from ascend_vllm.types.step import SchedulerOutput, StepOutput
from tests.core.memory_executor import (
    Collected,
    MemoryExecutor,
    add_all,
    assert_all_free,
    assert_tokens,
    entries,
    make_config,
    make_core,
    make_request,
    run,
    scheduled,
    serve,
    step,
    step_until,
)


def make_ranked(
    request_id: str, priority: int, arrival_time: float = 0.0, prompt: int = 4, **given: Any
) -> EngineCoreRequest:
    request = make_request(request_id, prompt, message={"priority": priority}, **given)
    request.arrival_time = arrival_time
    return request


def order_of_entry(executor: MemoryExecutor) -> str:
    """Ids of the requests in the order in which they got slots."""
    return "".join(order_of_entry_of(executor))


# ---- priorities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "order"), [("priority", "bdaec"), ("fcfs", "abcde")])
def test_order_of_admission(policy: str, order: str) -> None:
    core, executor = make_core(max_num_seqs=1, policy=policy)
    ranks = {"a": (1, 2.0), "b": (-3, 9.0), "c": (2, 0.0), "d": (0, 9.0), "e": (1, 5.0)}
    requests = [make_ranked(name, *rank, max_tokens=2) for name, rank in ranks.items()]
    serve(core, requests)
    assert order_of_entry(executor) == order
    assert core.stats()["num_preemptions"] == 0


def test_requests_of_equal_priority_keep_their_order() -> None:
    core, executor = make_core(max_num_seqs=1, policy="priority")
    for name, arrival_time in {"c": 3.0, "a": 1.0, "b": 2.0, "d": 3.0}.items():
        core.add_request(make_ranked(name, 5, arrival_time, max_tokens=1))
    run(core)
    assert order_of_entry(executor) == "abcd"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_an_urgent_request_takes_the_slot_of_a_running_one(mode: str, async_scheduling: bool, chunked: bool) -> None:
    core, executor = make_core(
        num_cpu_blocks=8,
        max_num_seqs=2,
        policy="priority",
        preemption_mode=mode,
        async_scheduling=async_scheduling,
        chunked=chunked,
    )
    requests = [
        make_ranked("a", 1, 1.0, max_tokens=9),
        make_ranked("b", 2, 2.0, max_tokens=9, seed=2),
        make_ranked("u", 0, 3.0, max_tokens=9, seed=3),
    ]
    add_all(core, requests[:2])
    collected = step(core, num_steps=2)
    core.add_request(requests[2])
    # after the steps under way the least urgent request is preempted
    step(core, collected, 3)
    assert "u" in collected
    scheduler = core._scheduler
    left = RequestStatus.PREEMPTED if mode == "recompute" else RequestStatus.SWAPPED
    assert {name: request.status for name, request in scheduler.requests.items()} == {
        "a": RequestStatus.RUNNING,
        "b": left,
        "u": RequestStatus.RUNNING,
    }
    assert_tokens(run(core, collected), requests)
    assert order_of_entry(executor) == "abub"
    assert core.stats()["num_preemptions"] == 1
    # the other row decoded in the meantime
    assert all("a" in counts for counts in scheduled(executor)[3 if async_scheduling else 2 : 5] if "u" not in counts)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_urgent_request_preempts_as_many_as_it_needs(async_scheduling: bool) -> None:
    core, executor = make_core(num_blocks=6, max_num_seqs=5, policy="priority", async_scheduling=async_scheduling)
    # two blocks each from the second step on
    requests = [make_ranked(name, 1, index, max_tokens=5) for index, name in enumerate("abc")]
    add_all(core, requests)
    collected = step(core, num_steps=2)
    # four blocks
    urgent = make_ranked("u", 0, 9.0, prompt=13, max_tokens=2)
    core.add_request(urgent)
    step_until(core, lambda: "u" in collected, collected)
    assert_tokens(run(core, collected), [*requests, urgent])
    # the latest are preempted first, and resume in the order of arrival
    assert order_of_entry(executor) == "abcubc"
    assert core.stats()["num_preemptions"] == 2


@pytest.mark.parametrize(
    ("policy", "max_num_seqs", "priority"),
    [
        # of equal and of lower urgency, though it arrived earlier
        ("priority", 1, 1),
        ("priority", 1, 2),
        ("fcfs", 1, -9),
        # there is room for both
        ("priority", 2, 0),
    ],
)
def test_nothing_is_preempted(policy: str, max_num_seqs: int, priority: int) -> None:
    core, executor = make_core(max_num_seqs=max_num_seqs, policy=policy)
    core.add_request(make_ranked("a", 1, 5.0))
    core.step()
    core.add_request(make_ranked("b", priority, 1.0))
    run(core)
    assert order_of_entry(executor) == "ab"
    assert core.stats()["num_preemptions"] == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_preempted_request_does_not_starve(async_scheduling: bool) -> None:
    core, executor = make_core(max_num_seqs=1, policy="priority", async_scheduling=async_scheduling)
    low = make_ranked("a", 1, 1.0, max_tokens=30)
    core.add_request(low)
    collected: dict[str, Collected] = {}
    urgent = [make_ranked(name, 0, 2.0 + index, max_tokens=3) for index, name in enumerate("uvw")]
    others = [make_ranked(name, 1, 9.0 + index, max_tokens=3) for index, name in enumerate("xyz")]
    for one, other in zip(urgent, others, strict=True):
        step(core, collected, 3)
        core.add_request(other)
        core.add_request(one)
    assert_tokens(run(core, collected), [low, *urgent, *others])
    entered = order_of_entry(executor)
    # it resumes as soon as no urgent one waits, before later ones, no matter how often it was preempted
    assert entered.replace("a", "") == "uvwxyz"
    assert entered.rindex("a") < entered.index("x")
    assert entered.count("a") == core.stats()["num_preemptions"] + 1 > 1


def test_without_free_blocks_the_least_urgent_request_is_preempted() -> None:
    core, executor = make_core(num_blocks=6, block_size=4, max_num_seqs=3, policy="priority")
    # the first one is the least urgent
    requests = [make_ranked(name, 2 - index, index, max_tokens=12, seed=index) for index, name in enumerate("abc")]
    serve(core, requests)
    assert core.stats()["num_preemptions"] > 0
    assert len(entries(executor, "a")) > 1
    assert len(entries(executor, "c")) == 1


# ---- time -------------------------------------------------------------------------------------------------


class Clock:
    """A time.monotonic() that changes only when the test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The scheduler's clock."""
    clock = Clock()
    monkeypatch.setattr("ascend_vllm.core.scheduler.time", types.SimpleNamespace(monotonic=clock.monotonic))
    return clock


class TimedExecutor(MemoryExecutor):
    """Each step takes a second."""

    clock: Clock

    def _run(self, step: SchedulerOutput) -> StepOutput:
        self.clock.now += 1.0
        return super()._run(step)


def make_timed(clock: Clock, **settings: Any) -> tuple[EngineCore, MemoryExecutor]:
    config = make_config(**settings)
    executor = TimedExecutor(config, 64, 0)
    executor.clock = clock
    return EngineCore(config, executor), executor


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("factor", "num_decodes"), [(0.0, 0), (0.5, 1), (2.0, 3), (4.0, 5)])
def test_prompts_wait_for_a_multiple_of_the_last_prompts_time(
    clock: Clock, factor: float, num_decodes: int, chunked: bool
) -> None:
    core, executor = make_timed(clock, delay_factor=factor, chunked=chunked)
    requests = [make_ranked("a", 0, clock.now, max_tokens=20)]
    core.add_request(requests[0])
    collected = step(core)
    # the prompt took a second; b is admitted to the first step made more than `factor` seconds after its arrival
    requests.append(make_ranked("b", 0, clock.now, max_tokens=3))
    core.add_request(requests[1])
    assert_tokens(run(core, collected), requests)
    counts = scheduled(executor)
    assert counts[1 : 1 + num_decodes] == [{"a": 1}] * num_decodes
    assert counts[1 + num_decodes]["b"] == 4


def test_the_delay_counts_from_the_earliest_arrival(clock: Clock) -> None:
    core, executor = make_timed(clock, delay_factor=2.0, max_num_seqs=8)
    core.add_request(make_ranked("a", 0, clock.now, max_tokens=20))
    core.step()
    core.add_request(make_ranked("b", 0, clock.now, max_tokens=3))
    core.step()
    core.add_request(make_ranked("c", 0, clock.now, max_tokens=3))
    step(core, num_steps=3)
    # they are computed together
    assert scheduled(executor) == [{"a": 4}, {"a": 1}, {"a": 1}, {"a": 1}, {"b": 4, "c": 4}]


def test_nothing_is_delayed_when_nothing_runs(clock: Clock) -> None:
    core, executor = make_timed(clock, delay_factor=100.0)
    for name in "ab":
        core.add_request(make_ranked(name, 0, clock.now, max_tokens=3))
        run(core)
    assert scheduled(executor) == [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 4}, {"b": 1}, {"b": 1}]


class PacedExecutor(MemoryExecutor):
    """Each token takes a hundredth of a second, unless set otherwise."""

    clock: Clock
    token_s = 0.01

    def _run(self, step: SchedulerOutput) -> StepOutput:
        self.clock.now += self.token_s * sum(step.num_scheduled_tokens)
        return super()._run(step)


def chunks_beside_a_decoding_row(clock: Clock, **settings: Any) -> list[int]:
    """Chunks of a long prompt while another request decodes; 64 tokens fit a step."""
    config = make_config(chunked=True, max_model_len=256, **settings)
    executor = PacedExecutor(config, 128, 0)
    executor.clock = clock
    core = EngineCore(config, executor)
    requests = [make_ranked("a", 0, clock.now, prompt=20, max_tokens=60)]
    core.add_request(requests[0])
    collected = step(core)
    requests.append(make_ranked("b", 0, clock.now, prompt=100, max_tokens=2))
    core.add_request(requests[1])
    assert_tokens(run(core, collected), requests, max_num_computed=256)
    return [made["b"] for made in scheduled(executor) if "a" in made and made.get("b", 1) > 1]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_chunks_are_as_small_as_the_pause_needs(clock: Clock, async_scheduling: bool) -> None:
    block_size = make_config().cache.block_size
    chunks = chunks_beside_a_decoding_row(clock, max_decode_pause_s=0.201, async_scheduling=async_scheduling)
    # one of the 20 tokens is the decoding row's; a step that is made ahead does not know it yet
    assert chunks[0] == 20 and set(chunks[2:-1]) == {20 - block_size} and sum(chunks) == 100
    # chunks have at least a block, also if the pause is too short for that
    assert set(chunks_beside_a_decoding_row(clock, max_decode_pause_s=0.001)) == {block_size}


def chunk_durations_s(controller: ChunkSizeController, num_tokens: int) -> list[float]:
    """Durations of the chunks of a prompt, on a device whose tokens cost more the more they attend to.

    As with --async-scheduling a chunk's size is chosen before the one before it is done.
    """
    durations: list[float] = []
    made: list[tuple[float, int, int]] = []
    start, now, made_at = 0, controller._last_end, controller._last_end
    while start < num_tokens or made:
        if start < num_tokens:
            count = min(controller.most_tokens(512, start), num_tokens - start)
            made.append((made_at, start, count))
            start += count
        if len(made) == 2 or start == num_tokens:
            begin, before, count = made.pop(0)
            pairs = count * before + count * count // 2
            durations.append(0.05 + count * 0.35e-3 + pairs * 7e-8)
            now = max(now, begin) + durations[-1]
            controller.note(begin, now, count, pairs)
        made_at = now
    return durations


def test_chunks_shrink_as_the_context_grows() -> None:
    """Before a token has become more expensive, not after."""
    controller = ChunkSizeController(0.25, 16)
    assert max(chunk_durations_s(controller, 8192)) < 0.28
    durations = chunk_durations_s(controller, 8192)
    # those of 512 tokens, at most, or of a few at the end may take less
    assert max(durations) < 0.255
    assert statistics.median(durations) > 0.22
    # a first chunk may be large again, even if the last one was not
    assert controller.most_tokens(512, 0) > 1.5 * controller.most_tokens(512, 8000)


def test_prompts_of_one_length_have_no_trend() -> None:
    controller = ChunkSizeController(0.25, 16)
    now = 0.0
    for duration in (0.1, 0.11, 0.09, 0.1):
        now += duration
        controller.note(now - duration, now, 100, 5000)
    assert controller.most_tokens(512, 0) == controller.most_tokens(512, 4000) == 240


def test_chunks_fill_the_step_without_a_limit(clock: Clock) -> None:
    assert chunks_beside_a_decoding_row(clock) == [63, 37]


def test_a_prompt_without_decoding_rows_gets_the_whole_step(clock: Clock) -> None:
    config = make_config(chunked=True, max_model_len=256, max_decode_pause_s=0.05)
    executor = PacedExecutor(config, 128, 0)
    executor.clock = clock
    core = EngineCore(config, executor)
    core.add_request(make_ranked("a", 0, clock.now, prompt=100, max_tokens=2))
    run(core)
    assert scheduled(executor) == [{"a": 64}, {"a": 36}, {"a": 1}]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_that_wait_too_long_are_refused(clock: Clock, async_scheduling: bool) -> None:
    core, executor = make_core(max_num_seqs=1, queue_timeout_s=5.0, async_scheduling=async_scheduling)
    requests = [make_ranked("runs", 0, 100.0, max_tokens=20), make_ranked("waits", 0, 101.0)]
    late = make_ranked("late", 0, 105.0, max_tokens=2)
    add_all(core, (*requests, late))
    collected = step(core)
    clock.now = 106.0
    step(core, collected)
    # five seconds are not too long yet
    assert "waits" not in collected
    clock.now = 106.1
    step(core, collected)
    refused = collected["waits"]
    assert (refused.token_ids, refused.finish_reason) == ([], FinishReason.ERROR)
    assert refused.error_class == "EngineBusyError"
    assert "5 s (--queue-timeout-s)" in (refused.error or "")
    assert core.stats()["num_waiting"] == 1
    # running requests have no limit
    clock.now = 109.0
    assert_tokens(run(core, collected), [requests[0], late])
    assert not entries(executor, "waits")


def test_no_request_is_refused_without_a_limit(clock: Clock) -> None:
    core, _ = make_core(max_num_seqs=1)
    requests = [make_ranked("a", 0, 100.0), make_ranked("b", 0, 100.0)]
    add_all(core, requests)
    clock.now = 1e9
    assert_tokens(run(core), requests)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preempted_request_is_not_refused(clock: Clock, mode: str) -> None:
    core, executor = make_core(
        num_cpu_blocks=8, max_num_seqs=1, queue_timeout_s=5.0, policy="priority", preemption_mode=mode
    )
    low, urgent = make_ranked("low", 1, 100.0, max_tokens=6), make_ranked("urgent", 0, 100.0, max_tokens=4)
    collected: dict[str, Collected] = {}
    core.add_request(low)
    step(core, collected)
    core.add_request(urgent)
    step(core, collected)
    assert core.stats()["num_preemptions"] == 1
    clock.now = 1000.0
    assert_tokens(run(core, collected), [low, urgent])
    assert len(entries(executor, "low")) == 2


# ---- prompts share a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_num_partial_prefills", "first_step"),
    [(1, {"a": 12}), (2, {"a": 6, "b": 6}), (3, {"a": 4, "b": 4, "c": 4}), (4, {"a": 4, "b": 4, "c": 4})],
)
def test_partial_prompts_share_the_step(max_num_partial_prefills: int, first_step: dict[str, int]) -> None:
    core, executor = make_core(
        chunked=True, max_num_batched_tokens=12, max_num_partial_prefills=max_num_partial_prefills
    )
    requests = [make_request(name, 20, max_tokens=3) for name in "abc"]
    serve(core, requests)
    assert scheduled(executor)[0] == first_step


def test_a_single_prompt_gets_the_whole_step() -> None:
    core, executor = make_core(chunked=True, max_num_batched_tokens=12, max_num_partial_prefills=4)
    core.add_request(make_request("a", 20))
    core.step()
    core.step()
    assert scheduled(executor) == [{"a": 12}, {"a": 8}]


def test_a_long_prompt_takes_no_more_than_the_threshold() -> None:
    core, executor = make_core(chunked=True, max_num_batched_tokens=16, long_prefill_token_threshold=6)
    serve(core, [make_request("a", 20, max_tokens=1)])
    assert [counts["a"] for counts in scheduled(executor)] == [6, 6, 6, 2]


@pytest.mark.parametrize(
    ("max_long_partial_prefills", "steps"),
    [
        # b waits for a; c, which came last, does not
        (1, [{"a": 6, "c": 4}, {"a": 6, "c": 1}, {"a": 2, "b": 6, "c": 1}]),
        (2, [{"a": 6, "b": 6, "c": 4}, {"a": 6, "b": 6, "c": 1}, {"a": 2, "b": 2, "c": 1}]),
    ],
)
def test_short_prompts_overtake_long_ones(max_long_partial_prefills: int, steps: list[dict[str, int]]) -> None:
    core, executor = make_core(
        chunked=True,
        max_num_batched_tokens=24,
        max_num_partial_prefills=3,
        max_long_partial_prefills=max_long_partial_prefills,
        long_prefill_token_threshold=6,
    )
    serve(core, [make_request("a", 14), make_request("b", 14), make_request("c", 4)])
    assert scheduled(executor)[:3] == steps


def test_overtaken_prompts_keep_their_order() -> None:
    core, executor = make_core(
        chunked=True,
        max_num_batched_tokens=24,
        max_num_seqs=8,
        max_num_partial_prefills=3,
        long_prefill_token_threshold=6,
    )
    requests = [make_request(name, 14, max_tokens=3) for name in "abcd"] + [make_request("s", 2, max_tokens=3)]
    add_all(core, requests)
    collected: dict[str, Collected] = {}
    while core.has_unfinished():
        step(core, collected)
        waiting = [request.request_id for request in core._scheduler.waiting]
        assert waiting == sorted(waiting)
    assert_tokens(collected, requests)
    assert order_of_entry(executor) == "asbcd"


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked": True},
        {"chunked": True, "max_num_partial_prefills": 3},
        {"chunked": True, "max_num_partial_prefills": 3, "long_prefill_token_threshold": 5},
        {"chunked": True, "num_scheduler_steps": 3, "prefix_caching": True},
    ],
)
def test_the_budget_is_used_and_never_exceeded(settings: dict[str, Any], async_scheduling: bool) -> None:
    source = random.Random(11)
    core, executor = make_core(
        num_blocks=30,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        max_model_len=40,
        async_scheduling=async_scheduling,
        **settings,
    )
    requests = [
        make_request(f"r{i}", [source.randrange(40) for _ in range(source.randint(1, 16))], seed=i) for i in range(30)
    ]
    serve(core, requests, 40 if settings else 16)
    totals = [sum(made.num_scheduled_tokens) for made in executor.steps]
    assert max(totals) == 16
    assert min(totals) > 0


def test_rows_decode_though_whole_prompts_keep_coming(clock: Clock) -> None:
    core, executor = make_timed(clock, max_num_seqs=16)
    core.add_request(make_ranked("a", 0, clock.now, max_tokens=20))
    core.step()
    for index in range(6):
        # one waits whenever a step is made
        core.add_request(make_ranked(f"b{index}", 0, clock.now, max_tokens=20))
        core.step()
    steps = scheduled(executor)
    # the first prompts are computed until rows have waited long enough; then rows and prompts alternate
    assert [step.get("a", 0) for step in steps[1:7]] == [0, 1, 0, 1, 0, 1]
    assert [set(step.values()) for step in steps[1:7]] == [{4}, {1}] * 3
    assert steps[5].keys() == {"b3", "b4"}


# ---- whole prompts beside decoding rows -------------------------------------------------------------------


def whole_prompts_beside_a_decoding_row(clock: Clock, token_s: float, **settings: Any) -> list[dict[str, int]]:
    """Steps of "a", which decodes, and of four prompts of 20, 16, 12 and 77 tokens; 80 tokens fit a step."""
    config = make_config(mixed_steps=True, max_num_seqs=8, max_num_batched_tokens=80, max_model_len=80, **settings)
    executor = PacedExecutor(config, 128, 0)
    executor.clock, executor.token_s = clock, token_s
    core = EngineCore(config, executor)
    requests = [make_ranked("a", 0, clock.now, prompt=10, max_tokens=8)]
    core.add_request(requests[0])
    collected = step(core)
    for name, length in {"b": 20, "c": 16, "d": 12, "e": 77}.items():
        requests.append(make_ranked(name, 0, clock.now, prompt=length, max_tokens=2))
        core.add_request(requests[-1])
    assert_tokens(run(core, collected), requests, max_num_computed=80)
    return scheduled(executor)


def test_whole_prompts_run_beside_decoding_rows_where_steps_are_long(clock: Clock) -> None:
    steps = whole_prompts_beside_a_decoding_row(clock, 0.01)
    # the last one would leave no room for the rows that decode
    assert steps[1:4] == [
        {"a": 1, "b": 20, "c": 16, "d": 12},
        {"e": 77},
        {"a": 1, "b": 1, "c": 1, "d": 1, "e": 1},
    ]


def test_whole_prompts_have_steps_of_their_own_where_steps_are_short(clock: Clock) -> None:
    steps = whole_prompts_beside_a_decoding_row(clock, 0.0001)
    assert steps[1:3] == [{"b": 20, "c": 16, "d": 12}, {"e": 77}]


@pytest.mark.parametrize(
    ("pause_s", "prompts"), [(0.3, ["b", "cd", "e"]), (0.37, ["bc", "d", "e"]), (0.01, ["b", "c", "d", "e"])]
)
def test_a_pause_limits_the_whole_prompts_of_a_step(clock: Clock, pause_s: float, prompts: list[str]) -> None:
    steps = whole_prompts_beside_a_decoding_row(clock, 0.01, max_decode_pause_s=pause_s)
    beside = ["".join(name for name, count in made.items() if count > 1) for made in steps[1:] if "a" in made]
    assert [names for names in beside if names] == prompts


# ---- scored prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_scored_prompts_are_cut_and_others_overtake_them(chunked: bool) -> None:
    core, executor = make_core(chunked=chunked, max_scored_tokens=6, max_num_seqs=8)
    requests = [
        make_request("a", 4, max_tokens=9),
        make_request("s", 20, max_tokens=2, prompt_logprobs=1),
        make_request("t", 9, max_tokens=2, prompt_logprobs=0),
        make_request("b", 10, max_tokens=2),
    ]
    serve(core, requests)
    steps = scheduled(executor)
    assert steps[0] == {"a": 4, "s": 6, "b": 10}
    # whole prompts and first chunks come before further chunks of running ones, unless all prompts are cut
    scored = [step.get("s", 0) + step.get("t", 0) for step in steps]
    assert scored[:6] == ([6, 6, 6, 6, 6, 1] if chunked else [6, 6, 6, 6, 5, 2])
    beside = [step.get("a", 0) for step in steps[1:5]]
    assert beside == ([1, 1, 1, 1] if chunked else [0, 1, 1, 1])


@pytest.mark.parametrize("chunked", [False, True])
def test_other_requests_overtake_sequences_that_wait_for_their_parent(chunked: bool) -> None:
    core, executor = make_core(chunked=chunked, max_scored_tokens=4, max_num_seqs=8)
    first = make_request("first", 13, prompt_logprobs=1, max_tokens=2)
    more = [
        make_request(f"more{index}", first.prompt_token_ids, max_tokens=2, message=message)
        for index, message in enumerate([{"parent_id": "first", "is_further": True}] * 3)
    ]
    other = make_request("other", 5, max_tokens=2)
    serve(core, [first, *more, other])
    assert order_of_entry_of(executor) == ["first", "other", "more0", "more1", "more2"]
    assert scheduled(executor)[0] == {"first": 4, "other": 5}


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}, {"num_blocks": 6, "chunked": True}])
def test_log_probabilities_of_a_prompt_are_emitted_as_they_are_computed(settings: dict[str, Any]) -> None:
    core, _ = make_core(**{"max_scored_tokens": 6, **settings})
    core.add_request(make_request("s", 20, max_tokens=3, prompt_logprobs=1))
    core.add_request(make_request("other", 30, max_tokens=20))
    parts: list[list[int]] = []
    num_tokens = 0
    while core.has_unfinished():
        for output in core.step().outputs:
            if output.request_id == "s":
                if output.prompt_logprobs is not None:
                    assert num_tokens == 0
                    parts.append([entry.token_ids[0] for entry in output.prompt_logprobs])
                num_tokens += len(output.new_token_ids)
    prompt = make_request("s", 20).prompt_token_ids
    assert [token_id for part in parts for token_id in part] == prompt[1:]
    assert len(parts) > 2 and max(map(len, parts)) <= 6
    assert num_tokens == 3
    assert_all_free(core)


def order_of_entry_of(executor: MemoryExecutor) -> list[str]:
    return [row.request_id for made in executor.steps for row in made.new_rows]
