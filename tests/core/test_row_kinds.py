"""The scheduler's interfaces, tested with row kinds and a connector that exist only here."""
# ruff: noqa: ARG002 - methods have the parameters of `RowKind`'s

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ascend_vllm.core import prompt_chunks
from ascend_vllm.core.connectors import Connector
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import GroupStep, Request, RequestStatus, RowKind
from ascend_vllm.errors import RequestError
from ascend_vllm.types.messages import FinishReason
from ascend_vllm.types.step import StepLogprobs
from tests.core.memory_executor import (
    VOCAB_SIZE,
    Collected,
    MemoryExecutor,
    assert_all_free,
    assert_tokens,
    make_config,
    make_core,
    make_request,
    next_token,
    run,
    scheduled,
    step,
)

MODES: dict[str, dict[str, Any]] = {
    "chunked, overlapped": {"chunked": True, "max_num_batched_tokens": 16, "async_scheduling": True},
    "several steps": {"num_scheduler_steps": 4},
    "recomputed": {"num_blocks": 12, "max_num_seqs": 8},
    "swapped": {"num_blocks": 12, "num_cpu_blocks": 40, "preemption_mode": "swap", "max_num_seqs": 8},
    "cached": {"prefix_caching": True, "async_scheduling": True},
    "windowed": {"sliding_window": 6, "chunked": True},
    "in stages": {"num_stages": 2},
    "short of budget": {"max_num_batched_tokens": 21, "max_num_seqs": 8, "chunked": True},
}
DIVISOR = 4
MOST_DRAFTS = 4


class EndsAtMultiple(RowKind):
    """Ends a sequence at the first token that DIVISOR divides."""

    may_run_ahead = False

    def __init__(self, root: Request) -> None:
        pass

    def take(self, row: Request, token_ids: list[int], logprobs: StepLogprobs | None, index: int) -> int:
        def end_of(token_id: int) -> RequestStatus | None:
            return RequestStatus.FINISHED_STOPPED if token_id % DIVISOR == 0 else row.end_of(token_id)

        return row.append_until(token_ids, end_of)


class Duel(RowKind):
    """Two rows with different seeds; both continue with the greater one of their tokens."""

    may_run_ahead = False
    title = "A duel"
    width = 2

    def __init__(self, root: Request) -> None:
        self.root = root
        self.rows: list[Request] = []
        self.text: list[int] = []
        self._drawn: dict[str, int] = {}

    def root_of(self, row: Request) -> Request:
        return self.root

    def rows_of(self, request: Request) -> list[Request]:
        return self.rows

    def first_row(self, request: Request) -> Request:
        self._drawn.clear()
        self.text.clear()
        self.rows = [self.root.make_row(f"{self.root.request_id}#0")]
        return self.rows[0]

    def blocks_to_write(self, row: Request, count: int, block_size: int) -> range:
        assert count == 1
        return range(row.num_computed_tokens // block_size, row.num_computed_tokens // block_size + 1)

    def drop_rows(self, request: Request) -> list[Request]:
        rows, self.rows = self.rows, []
        return rows

    def take(self, row: Request, token_ids: list[int], logprobs: StepLogprobs | None, index: int) -> None:
        self._drawn[row.request_id] = token_ids[0]

    def advance(self) -> GroupStep | None:
        if len(self._drawn) < len(self.rows):
            return None
        token_id = max(self._drawn.values())
        self._drawn.clear()
        self.text.append(token_id)
        forks: list[tuple[Request, Request]] = []
        if len(self.rows) == 1:
            second = self.rows[0].make_row(f"{self.root.request_id}#1")
            forks = [(second, self.rows[0])]
            self.rows = [*self.rows, second]
        for row in self.rows:
            row.token_ids.append(token_id)
            row.num_tokens += 1
        end = RequestStatus.FINISHED_LENGTH if len(self.text) == 12 else None
        return GroupStep(self.rows, [], forks, [] if end else None, end)


class Drafting(RowKind):
    """Drafts up to MOST_DRAFTS tokens with the hash model itself, and makes some of them wrong."""

    may_run_ahead = False
    title = "A draft"

    def __init__(self, root: Request) -> None:
        self.num_wanted = 0
        self.num_taken: list[int] = []

    def tokens_wanted(self, row: Request, most: int) -> int:
        self.num_wanted += 1
        return min(1 + row.num_tokens % (MOST_DRAFTS + 1), most)

    def drafts(self, row: Request, count: int) -> list[int]:
        token_ids = list(row.token_ids)
        for _ in range(count):
            right = next_token(row.seed, token_ids)
            token_ids.append(right if len(token_ids) % 5 else (right + 1) % VOCAB_SIZE)
        return token_ids[-count:]

    def take(self, row: Request, token_ids: list[int], logprobs: StepLogprobs | None, index: int) -> int:
        assert row.num_computed_tokens == row.num_tokens + len(token_ids) - 1
        self.num_taken.append(len(token_ids))
        return row.append_output(token_ids)


class Gate(Connector):
    """Holds requests with content keys until it is opened."""

    field = "content_keys"

    def __init__(self) -> None:
        self._held: dict[str, Request] = {}
        self._is_open = False
        self._wake = threading.Event()
        self.is_closed = False

    def attach(self, wake: threading.Event) -> None:
        self._wake = wake

    def open(self) -> None:
        self._is_open = True
        self._wake.set()

    def begin(self, request: Request) -> bool:
        if request.request_id == "no gate":
            raise RequestError("There is no such gate.", "gate")
        assert request.content_keys
        if self._is_open:
            return True
        self._held[request.request_id] = request
        return False

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        if not self._is_open:
            return []
        held, self._held = self._held, {}
        return [(request, RequestError("late") if name == "g-late" else None) for name, request in held.items()]

    def remove(self, request: Request) -> None:
        del self._held[request.request_id]

    def close(self) -> None:
        self.is_closed = True


def add(core: EngineCore, name: str, kind: Callable[[Request], RowKind] | None, prompt: int, seed: int) -> Request:
    core.add_request(make_request(name, prompt, seed=seed, max_tokens=14))
    request = core._scheduler.requests[name]
    if kind is not None:
        request.kind = kind(request)
    return request


def texts(**mode: Any) -> dict[str, tuple[list[int], FinishReason | None]]:
    """Outputs of ordinary requests and of all kinds here, which run together: id → (tokens, finish reason)."""
    core, _ = make_core(**mode)
    duels = {}
    for number in range(4):
        add(core, f"plain{number}", None, 5 + number, number)
        add(core, f"ends{number}", EndsAtMultiple, 7 + number, number)
        add(core, f"draft{number}", Drafting, 4 + number, number)
        kind = add(core, f"duel{number}", Duel, 6 + number, number).kind
        assert isinstance(kind, Duel)
        duels[f"duel{number}"] = kind
    results = run(core)
    assert core.audit()["num_free_slots"] == core.audit()["num_slots"]
    found = {name: (result.token_ids, result.finish_reason) for name, result in results.items()}
    return found | {name: (kind.text, found[name][1]) for name, kind in duels.items()}


def test_kinds_decide_what_sampled_tokens_are_appended() -> None:
    found = texts()
    reasons = {found[f"ends{number}"][1] for number in range(4)}
    assert FinishReason.STOP in reasons
    for number in range(4):
        token_ids, reason = found[f"ends{number}"]
        stops = [index for index, token_id in enumerate(token_ids) if token_id % DIVISOR == 0]
        assert stops == ([len(token_ids) - 1] if reason is FinishReason.STOP else [])
        assert len(found[f"plain{number}"][0]) == len(found[f"draft{number}"][0]) == 14
        token_ids, reason = found[f"duel{number}"]
        assert (len(token_ids), reason) == (12, FinishReason.LENGTH)


@pytest.mark.parametrize("mode", MODES)
def test_outputs_of_kinds_do_not_depend_on_the_mode(mode: str) -> None:
    assert texts(**MODES[mode]) == texts()


@pytest.mark.parametrize("mode", MODES)
def test_rows_advance_by_as_many_drafts_as_are_right(mode: str) -> None:
    """The tokens and ends are those of ordinary decoding, in fewer steps."""
    core, executor = make_core(**MODES[mode])
    requests, kinds = [], []
    for number in range(4):
        message = make_request(
            f"draft{number}",
            3 + 5 * number,
            seed=number,
            max_tokens=11 + 9 * number,
            ignore_eos=number % 2 == 0,
            stop_token_ids=[7],
            logprobs=1 if number == 3 else None,
        )
        core.add_request(message)
        request = core._scheduler.requests[message.request_id]
        request.kind = Drafting(request)
        requests.append(message)
        kinds.append(request.kind)
    results = run(core)
    assert_tokens(results, requests)
    assert_all_free(core)
    taken = {count for kind in kinds for count in kind.num_taken}
    assert {1, 2, 3} <= taken
    assert max(taken) <= 1 + MOST_DRAFTS
    if "num_blocks" not in MODES[mode]:
        num_steps = sum("draft0" in rows for rows in scheduled(executor))
        assert num_steps < len(results["draft0"].token_ids)


def test_drafts_are_limited_by_blocks_and_lengths() -> None:
    """If blocks are short a row decodes without drafts, and nothing is computed after the last token."""
    core, executor = make_core(num_blocks=6, max_num_seqs=2, max_model_len=16)
    for number in range(2):
        add(core, f"draft{number}", Drafting, 5, number)
    results = run(core)
    assert [len(result.token_ids) for result in results.values()] == [12, 12]
    assert any(step.drafts for step in executor.steps)
    assert_all_free(core)


@pytest.mark.parametrize("are_long", [False, True])
def test_the_next_step_does_not_wait_until_outputs_are_sent(are_long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that may not run ahead. After a long step it does, so that requests that have arrived are in it."""
    if are_long:
        monkeypatch.setattr(prompt_chunks, "_LONG_STEP_S", 0.0)
    core, executor = make_core(async_scheduling=True)
    kind = add(core, "draft", Drafting, 5, 0).kind
    assert isinstance(kind, Drafting)
    while not (outputs := core.step().outputs[0]).finish_reason:
        assert not executor.late
        core.make_next_step()
        assert (len(executor.steps), len(executor.late)) == (len(kind.num_taken), 0 if are_long else 1)
        assert outputs.new_token_ids
    assert not executor.late
    assert_all_free(core)


def test_requests_wait_for_a_connector_while_others_run() -> None:
    config, gate = make_config(), Gate()
    core = EngineCore(config, MemoryExecutor(config, 64), connectors=[gate])
    for name in ("no gate", "g1", "free", "g-late", "g2", "g-left"):
        message = {} if name == "free" else {"content_keys": [(0, "a gate")]}
        core.add_request(make_request(name, [1, 2, 3, 4, 5], seed=3, message=message))
    assert core._scheduler.requests["g1"].status is RequestStatus.WAITING_FOR_CONNECTOR
    assert core.stats()["num_waiting"] == 5
    collected: dict[str, Collected] = {}
    while "free" not in collected or collected["free"].finish_reason is None:
        step(core, collected)
        assert core.audit()["violations"] == []
    assert set(collected) == {"no gate", "free"}
    assert (collected["no gate"].error, collected["no gate"].error_class) == (
        "There is no such gate.",
        "RequestError",
    )
    core.abort_requests(["g-left"])
    assert core.has_unfinished()
    gate.open()
    results = run(core)
    assert set(results) == {"g1", "g2", "g-late"}
    assert results["g-late"].error == "late"
    assert results["g1"].token_ids == results["g2"].token_ids == collected["free"].token_ids
    core.shutdown()
    assert gate.is_closed
