"""What becomes of drafts that arrive with a step's output."""

from __future__ import annotations

import itertools
import types
from typing import Any

import numpy as np
import pytest

from ascend_vllm.config.speculation import AcceptanceMethod, SpeculativeConfig, SpeculativeMethod
from ascend_vllm.core.draft_record import DraftRecord
from ascend_vllm.core.drafting import Drafting
from ascend_vllm.core.prompt_chunks import ChunkSizeController
from ascend_vllm.core.request import Request
from ascend_vllm.core.step_builder import StepInFlight
from ascend_vllm.types.step import NO_DRAFT, SchedulerOutput, StepOutput
from tests.core.memory_executor import make_request
from tests.moody_drafts import Moody

MOST = 3


def make(method: SpeculativeMethod = SpeculativeMethod.NGRAM, **changes: Any) -> Drafting:
    return Drafting(SpeculativeConfig(method, MOST, max_model_len=60, **changes))


def enrolled(drafting: Drafting, num_running: int = 0) -> Request:
    request = Request(make_request("a", [1, 2, 3]), 60, 1)
    drafting.enrol(request, num_running)
    return request


def record_of(request: Request) -> DraftRecord:
    assert request.draft_record is not None
    return request.draft_record


def step(drafting: Drafting, rows: list[Request], drafts: list[list[int]], num_asked: int | None = None) -> int:
    """A step in which each row got a token, whose output has these drafts; returns how many were asked for."""
    made, asked = StepInFlight([], rows, 0.0), SchedulerOutput(0, [], [], [], [], [])
    drafting.ask(asked, made)
    made.num_asked = made.num_asked if num_asked is None else num_asked
    table = np.full((len(rows), MOST), NO_DRAFT, np.int32)
    for line, one in zip(table, drafts, strict=True):
        line[: len(one)] = one
    ids = np.zeros((len(rows), 1), np.int64)
    drafting.take(
        made, rows, StepOutput(0, ids[:, 0].astype(np.int32), ids, drafts=table), ChunkSizeController(None, 1)
    )
    return asked.max_drafts


def extend(request: Request, token_ids: list[int]) -> None:
    request.token_ids = [*request.token_ids, *token_ids]
    request.num_tokens += len(token_ids)


def test_drafts_that_are_not_verified_are_compared_with_what_follows() -> None:
    drafting = make()
    request = enrolled(drafting)
    assert step(drafting, [request], [[5, 6, 7]]) > 0
    # nothing is known yet of what steps take
    assert not drafting.is_drafting
    assert request.drafts == []
    assert request.may_run_ahead
    extend(request, [5, 6, 9, 4])
    step(drafting, [request], [[4, 4, 4]], num_asked=MOST)
    assert (record_of(request).right, record_of(request).wrong) == (2, 1)
    # only one of these is known when the next ones arrive
    extend(request, [4])
    step(drafting, [request], [[]], num_asked=MOST)
    assert record_of(request).right == pytest.approx(0.85 * 2 + 1)
    assert record_of(request).wrong == pytest.approx(0.85)
    assert record_of(request).share < 1
    extend(request, [8])
    step(drafting, [request], [[]], num_asked=MOST)
    assert record_of(request).right == pytest.approx(0.85 * 2 + 1)


def test_a_new_request_begins_with_what_is_known_of_all() -> None:
    drafting = make()
    first = enrolled(drafting)
    for _ in range(100):
        drafting.count(first, MOST, 0)
    chances, _ = drafting._estimates([record_of(enrolled(drafting))])
    assert chances[0] < 0.1
    for _ in range(200):
        drafting.count(first, MOST, MOST)
    chances, _ = drafting._estimates([record_of(enrolled(drafting)), record_of(first)])
    assert chances.min() > 0.9


def test_verified_drafts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascend_vllm.core.drafting.DraftCosts", Moody)
    drafting = make()
    assert drafting.stats is not None
    request = enrolled(drafting)
    drafting.count(request, 3, 2)
    drafting.count(request, 1, 1)
    assert drafting.stats.num_accepted_at == [2, 1, 0]
    assert (drafting.stats.num_drafts, drafting.stats.num_draft_tokens, drafting.stats.num_accepted_tokens) == (
        2,
        4,
        3,
    )
    assert (record_of(request).right, record_of(request).wrong) == pytest.approx((0.85 * 2 + 1, 0.85))


def test_drafts_for_a_token_that_is_being_computed_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Eager(Moody):
        @property
        def is_drafting(self) -> bool:
            return True

        def choose(self, chances: Any, counts: Any) -> Any:
            assert len(chances) == len(counts)
            return counts

    monkeypatch.setattr("ascend_vllm.core.drafting.DraftCosts", Eager)
    drafting = make()
    free, busy, gone = (enrolled(drafting) for _ in range(3))
    busy.num_pending_tokens = 1
    gone.is_finished = True
    step(drafting, [free, busy, gone], [[5], [6], [7]], num_asked=MOST)
    assert (free.drafts, busy.drafts, gone.drafts) == ([5], [], [])
    assert record_of(busy).watched == [6]
    assert not free.may_run_ahead


@pytest.mark.parametrize("changes", [{"disable_by_batch_size": 4}, {"acceptance": AcceptanceMethod.TYPICAL}], ids=str)
def test_where_nothing_is_measured_all_rows_have_drafts(changes: dict[str, Any]) -> None:
    drafting = make(**changes)
    request = enrolled(drafting, num_running=3)
    assert drafting.is_drafting
    assert step(drafting, [request], [[5, 6]]) == MOST
    assert request.drafts == [5, 6]
    late = enrolled(drafting, num_running=4)
    step(drafting, [late], [[5, 6]])
    assert late.drafts == ([] if "disable_by_batch_size" in changes else [5, 6])


def enrolled_and_begun(drafting: Drafting, num_rows: int = 1) -> Request:
    request = enrolled(drafting)
    drafting.begin(request, num_rows)
    return request


def read(drafting: Drafting, row: Request, seconds: float, read_s: float) -> None:
    """A step of one second in which so much of a prompt was read for drafts."""
    times = ChunkSizeController(None, 1)
    times.note(1.0, 1.0 + seconds, 0, 0)
    made = StepInFlight([0], [row], 1.0, num_chunk_tokens=5)
    none = np.zeros((0, 1), np.int64)
    drafting.take(made, [], StepOutput(0, none[:, 0].astype(np.int32), none, draft_s=read_s, read_s=read_s), times)


@pytest.mark.parametrize("method", [SpeculativeMethod.DRAFT_MODEL, SpeculativeMethod.EAGLE])
def test_requests_have_no_drafts_while_reading_is_not_paid_for(method: SpeculativeMethod) -> None:
    drafting = make(method)
    first = enrolled_and_begun(drafting)
    assert first.drafts_up_to > 0
    read(drafting, first, 1.0, 0.1)
    second = enrolled_and_begun(drafting)
    assert (second.drafts_up_to, second.draft_record) == (0, None)
    assert second.may_run_ahead
    # by steps of the second alone, too
    read(drafting, second, 10.0, 0.0)
    assert enrolled_and_begun(drafting).drafts_up_to > 0


def test_requests_that_end_with_their_first_token_pay_for_what_was_read() -> None:
    drafting = make(SpeculativeMethod.EAGLE)
    only = enrolled_and_begun(drafting)
    drafting.end(only)
    read(drafting, only, 1.0, 0.1)
    assert enrolled_and_begun(drafting).drafts_up_to == 0


def test_looking_at_steps_is_paid_for_like_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr("ascend_vllm.core.drafting.time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    drafting = make(SpeculativeMethod.EAGLE)
    first = enrolled_and_begun(drafting)
    read(drafting, first, 1.0, 0.0)
    assert enrolled_and_begun(drafting).drafts_up_to > 0
    # books what the step before took to look at: two tenths, of which a hundredth was earned
    read(drafting, first, 1.0, 0.0)
    assert enrolled_and_begun(drafting).drafts_up_to == 0
    # each look counts twice, since the worker waits as long
    other = enrolled(drafting)
    other.draft_record = None
    read(drafting, other, 20.0, 0.0)
    assert enrolled_and_begun(drafting).drafts_up_to == 0
    read(drafting, other, 60.0, 0.0)
    assert enrolled_and_begun(drafting).drafts_up_to > 0


def test_what_full_batches_lose_by_reading_does_not_stop_the_drafts_of_single_requests() -> None:
    drafting = make(SpeculativeMethod.EAGLE)
    first = enrolled_and_begun(drafting)
    times = ChunkSizeController(None, 1)
    times.note(1.0, 1.1, 0, 0)
    none = np.zeros((0, 1), np.int64)
    made = StepInFlight(list(range(32)), [first] * 32, 1.0, num_chunk_tokens=5)
    drafting.take(made, [], StepOutput(0, none[:, 0].astype(np.int32), none, draft_s=0.1, read_s=0.1), times)
    assert enrolled_and_begun(drafting, num_rows=33).drafts_up_to == 0
    assert enrolled_and_begun(drafting).drafts_up_to > 0


def test_n_grams_cost_no_reading() -> None:
    drafting = make()
    assert all(enrolled_and_begun(drafting).drafts_up_to for _ in range(40))


def test_rows_that_never_draft_end_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = make(SpeculativeMethod.EAGLE)
    costs = drafting._costs
    assert costs is not None
    costs._enter(costs._mode.DRAFTING, 1, MOST)
    plain = enrolled(drafting)
    plain.draft_record = None
    step(drafting, [plain], [[]])
    assert not drafting.is_drafting


def test_rows_that_never_draft_count_in_what_a_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = make(SpeculativeMethod.EAGLE)
    costs = drafting._costs
    assert costs is not None
    seen: list[tuple[int, list[float]]] = []
    monkeypatch.setattr(costs, "decide", lambda chances, shares: seen.append((len(chances), shares.tolist())))
    costs._enter(costs._mode.MEASURING, 1, 0)
    drafted, plain = enrolled_and_begun(drafting), [enrolled(drafting) for _ in range(2)]
    for row in plain:
        row.draft_record = None
    step(drafting, [plain[0], drafted, plain[1]], [[], [], []])
    assert seen == [(3, [0.0, 1.0, 0.0])]


@pytest.mark.parametrize("num_steps", [0, 1, 5, 16, 17, 90])
def test_steps_that_are_noted_together_count_as_those_noted_one_by_one(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of costs when the next request begins, and which steps asked for drafts until then."""

    def known(drafting: Drafting) -> tuple[Any, ...]:
        costs = drafting._costs
        assert costs is not None
        row, times, end, asked = enrolled_and_begun(drafting), ChunkSizeController(None, 1), 1.0, []
        row.num_tokens = 10
        ids = np.zeros((1, 1), np.int64)
        for number in range(num_steps):
            made, step = StepInFlight([0], [row], end), SchedulerOutput(0, [], [], [], [], [])
            drafting.ask(step, made)
            asked.append(step.max_drafts)
            table = np.full((1, step.max_drafts), 9, np.int32) if step.max_drafts else None
            seconds = 1.0 + 0.25 * (number % 3)
            times.note(end, end + seconds, 0, 0)
            end += seconds
            output = StepOutput(0, ids[:, 0].astype(np.int32), ids, drafts=table, draft_s=0.125, read_s=0.125)
            drafting.take(made, [row], output, times)
        enrolled_and_begun(drafting)
        account = costs._account
        return asked, costs._num_steps, costs._plain.at(1), account.earned_s, account.reading._left_s

    clock = types.SimpleNamespace(perf_counter=lambda: 0.0)
    monkeypatch.setattr("ascend_vllm.core.drafting.time", clock)
    together = known(make(SpeculativeMethod.EAGLE))
    monkeypatch.setattr("ascend_vllm.core.drafting._MOST_WAITING", 0)
    assert known(make(SpeculativeMethod.EAGLE)) == together
    assert together[1] == num_steps


def test_steps_are_looked_at_while_a_request_may_have_drafts() -> None:
    drafting = make(SpeculativeMethod.EAGLE)
    first = enrolled_and_begun(drafting)
    plain = enrolled(drafting)
    plain.draft_record = None
    step(drafting, [first, plain], [[], []])
    assert drafting.looks
    drafting.end(first)
    for _ in range(3):
        step(drafting, [plain], [[]], num_asked=0)
    assert not drafting.looks
    # as if it had been preempted
    second = enrolled_and_begun(drafting)
    step(drafting, [plain], [[]], num_asked=0)
    assert drafting.looks
    drafting.end(second)
    drafting.end(second)
    step(drafting, [plain], [[]], num_asked=0)
    assert not drafting.looks
    # how many rows have drafts by --speculative-disable-by-batch-size does not depend on what they cost
    always = make(SpeculativeMethod.EAGLE, disable_by_batch_size=2)
    step(always, [plain], [[]])
    assert always.looks


def test_without_speculation_nothing_is_asked_for() -> None:
    drafting = Drafting(None)
    request = Request(make_request("a", [1, 2, 3]), 60, 1)
    drafting.enrol(request, 0)
    assert step(drafting, [request], [[5]]) == 0
    assert (request.drafts, request.draft_record, drafting.stats) == ([], None, None)
