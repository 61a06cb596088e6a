"""Speculative decoding in the core: which rows have drafts, how many, and how many of them were right.

Drafts are proposed by a worker after each step (worker/speculation) and arrive with the step's output. A row with
drafts computes them after its last token in its next step (`RowKind.tokens_wanted`); how far it has advanced is known
only with the step's output, so that no step is made while another one with drafts is under way.

Where measurements decide (core/draft_costs.py) rows have drafts only while these pay. Otherwise steps are made ahead
as without drafts, and only some ask for drafts, which are compared with the tokens that follow. No token depends on
any of this: verification accepts what would have been sampled anyway.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ascend_vllm.config.speculation import SpeculativeConfig, SpeculativeMethod
from ascend_vllm.core.draft_costs import DecodingStep, DraftCosts
from ascend_vllm.core.draft_record import DraftRecord
from ascend_vllm.core.prompt_chunks import ChunkSizeController
from ascend_vllm.core.request import Request
from ascend_vllm.core.step_builder import StepInFlight
from ascend_vllm.core.step_costs import FloatArray
from ascend_vllm.types.messages import DraftStats
from ascend_vllm.types.step import NO_DRAFT, SchedulerOutput, StepOutput

# what is left of all rows' counts after another step of one of them
_KEPT_OF_ALL = 0.98
# how many drafts the mean of all rows counts for beside a row's own
_WEIGHT_OF_ALL = 2.0
# before anything is known: right and wrong drafts
_FIRST_RIGHT, _FIRST_WRONG = 2.0, 3.0
# a draft is never quite impossible
_LEAST_CHANCE = 1e-3
# most steps without drafts that are noted together
_MOST_WAITING = 16


class Drafting:
    """The drafts of all rows.

    Args:
        config: None: nothing is drafted.

    Attributes:
        max_drafts: most drafts that a step asks for per row; 0: nothing is drafted.
        num_lookahead_tokens: see `SpeculativeConfig`.
        looks: whether steps are looked at: some request that runs may have drafts, or something is to be decided.
        stats: totals since the start; None: nothing is drafted.
    """

    def __init__(self, config: SpeculativeConfig | None) -> None:
        self._config = config
        self.max_drafts = 0 if config is None else config.num_speculative_tokens
        self.num_lookahead_tokens = 0 if config is None else config.num_lookahead_tokens
        self.looks = config is not None
        self.stats: DraftStats | None = None
        # None: nothing is drafted, or all rows have drafts whatever they cost
        self._costs: DraftCosts | None = None
        self._reads = config is not None and config.method is not SpeculativeMethod.NGRAM
        if config is not None:
            self.stats = DraftStats(num_accepted_at=[0] * config.num_speculative_tokens)
            if config.is_adaptive:
                self._costs = DraftCosts(config.num_speculative_tokens)
        # of all rows
        self._record = DraftRecord(_FIRST_RIGHT, _FIRST_WRONG)
        # requests that have begun, are not finished, and may have drafts
        self._request_ids: set[str] = set()
        # in the step whose output is being taken
        self._num_accepted = 0
        # steps without drafts that are not noted yet: rows, seconds since the outputs of the step before and of the
        # step itself, what reading took of both, and seconds of a token in steps with prompts
        self._waiting: list[tuple[int, float, float, float, float]] = []

    @property
    def is_drafting(self) -> bool:
        """Whether rows are to have drafts: then no step is made before the outputs of the last one."""
        return self.max_drafts > 0 if self._costs is None else self._costs.is_drafting

    def enrol(self, request: Request, num_running: int) -> None:
        """Decides whether a new request may have drafts.

        Args:
            request: with its kind.
            num_running: rows that run now.
        """
        config = self._config
        if config is None or not request.kind.may_draft:
            return
        if config.disable_by_batch_size is None or num_running < config.disable_by_batch_size:
            request.drafts_up_to = config.max_model_len - config.num_speculative_tokens
            request.draft_record = DraftRecord(share=self._record.share)
            self._set_drafts(request, [])

    def begin(self, request: Request, num_rows: int) -> None:
        """Decides whether a request that gets its first slot may have drafts indeed: reading for them costs time.

        Args:
            request: which is about to run.
            num_rows: rows that will run beside it, and it.
        """
        if self._costs is None or request.draft_record is None:
            return
        self._note_waiting(self._costs)
        if self._reads and not self._costs.takes_request(num_rows, request.num_tokens):
            request.drafts_up_to, request.draft_record = 0, None
            self._set_drafts(request, [])
            return
        self._costs.note_request()
        self._request_ids.add(request.request_id)
        self.looks = True

    def end(self, request: Request) -> None:
        """Forgets a request that is finished."""
        self._request_ids.discard(request.request_id)

    def ask(self, step: SchedulerOutput, made: StepInFlight) -> None:
        """Asks for drafts with a new step's output, if any are wanted."""
        costs = self._costs
        made.num_asked = step.max_drafts = self.max_drafts if costs is None else costs.num_wanted
        made.was_drafting = costs is None or costs.is_drafting

    def count(self, row: Request, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of a row in a step, the first `num_accepted` of which were right."""
        stats = self.stats
        if stats is None:
            return
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            stats.num_accepted_at[position] += 1
        self._num_accepted += num_accepted
        if row.draft_record is not None:
            self._note(row.draft_record, num_accepted, is_wrong=num_accepted < num_drafts)

    def take(
        self, made: StepInFlight, rows: Sequence[Request], output: StepOutput, times: ChunkSizeController
    ) -> None:
        """Takes the drafts that arrive with a step's output.

        Args:
            made: the step.
            rows: [S] that sampled in it, with the tokens that they got.
            output: of the step.
            times: knows what this step took.
        """
        if self._config is None:
            return
        costs = self._costs
        if costs is not None and not (made.num_asked or made.num_drafts or (self.looks and costs.is_drafting)):
            if not (self._request_ids or output.draft_s):
                # all requests have begun while reading was not paid for: there is nothing else to find out. One that
                # ended with this step may have cost something in it
                self.looks = bool(costs.num_wanted or costs.decides)
                costs.note_idle(len(made.rows), times.last_step_s)
                return
            if self._may_wait(costs, made, rows):
                self._waiting.append(
                    (len(made.rows), times.since_last_s, times.last_step_s, output.draft_s, times.token_s)
                )
                return
        begin = time.perf_counter()
        if costs is not None:
            self._note_waiting(costs)
        drafts: Sequence[list[int]] = [[]] * len(rows)
        if output.drafts is not None:
            counts = (output.drafts != NO_DRAFT).sum(axis=1).tolist()
            drafts = [one[:count] for one, count in zip(output.drafts.tolist(), counts, strict=True)]
        if costs is not None:
            self._note_step(costs, made, output, times)
            if made.num_asked or costs.decides:
                drafts = self._choose(costs, rows, drafts, was_asked=made.num_asked > 0)
        is_drafting = self.is_drafting
        # one iteration per row: each has a list of its own
        for row, one in zip(rows, drafts, strict=True):
            if is_drafting or row.drafts or not row.may_run_ahead:
                self._set_drafts(row, one)
        if costs is not None and not is_drafting:
            # what this takes while rows have drafts is part of the next step
            costs.note_taking(time.perf_counter() - begin)

    def _may_wait(self, costs: DraftCosts, made: StepInFlight, rows: Sequence[Request]) -> bool:
        """Whether a step without drafts can be noted later, with others: alone it takes four times as long.

        Nothing is to be decided before, and nothing of its rows changes.
        """
        if len(self._waiting) >= min(costs.num_steps_unwatched, _MOST_WAITING):
            return False
        if made.num_chunk_tokens or made.num_prompt_tokens or made.was_drafting:
            return False
        return all(row.may_run_ahead and not row.drafts for row in rows)

    def _note_waiting(self, costs: DraftCosts) -> None:
        """Notes the steps that have waited for it, in their order."""
        waiting, self._waiting = self._waiting, []
        for num_rows, since_last_s, last_step_s, read_s, token_s in waiting:
            costs.advance(num_rows, 0)
            costs.note(DecodingStep(num_rows, 0, 0, 0, False, max(0.0, since_last_s - read_s), 0.0), token_s)
            costs.note_reading(num_rows, last_step_s, read_s)

    def _note_step(
        self, costs: DraftCosts, made: StepInFlight, output: StepOutput, times: ChunkSizeController
    ) -> None:
        """Adds what the step and reading in it took, and how many of its drafts were right."""
        num_accepted, self._num_accepted = self._num_accepted, 0
        num_rows = len(made.rows)
        costs.advance(num_rows, made.num_asked)
        was_drafting = made.was_drafting or made.num_drafts > 0
        read_s = output.read_s if was_drafting or made.num_asked else output.draft_s
        has_prompts = bool(made.num_chunk_tokens or made.num_prompt_tokens)
        # nothing may have run before prompts
        seconds = times.last_step_s if has_prompts else times.since_last_s
        if made.rows:
            step = DecodingStep(
                num_rows=num_rows,
                num_drafts=made.num_drafts,
                num_accepted=num_accepted,
                num_asked=made.num_asked,
                was_drafting=was_drafting,
                seconds=max(0.0, seconds - read_s),
                draft_s=output.draft_s - read_s,
            )
            if has_prompts:
                costs.note_beside_prompts(step)
            else:
                costs.note(step, times.token_s)
        costs.note_reading(num_rows, times.last_step_s, read_s)

    def _choose(
        self, costs: DraftCosts, rows: Sequence[Request], drafts: Sequence[list[int]], *, was_asked: bool
    ) -> list[list[int]]:
        """Decides whether drafts pay, and chooses from those of each row the first that do.

        Those of rows that get none of theirs are watched.
        """
        found = [(index, row, row.draft_record) for index, row in enumerate(rows) if not row.is_finished]
        if was_asked:
            for index, row, record in found:
                if record is None:
                    continue
                self._look_at_watched(row, record)
                record.note_share(has_drafts=bool(drafts[index]))
                self._record.note_share(has_drafts=bool(drafts[index]), kept=_KEPT_OF_ALL)
        chances, shares = self._estimates([record for _, _, record in found])
        if costs.decides and found:
            costs.decide(chances, shares)
        # if the next step has been made already, it computes the token that the first draft is of
        usable = [0 if row.num_pending_tokens else len(drafts[index]) for index, row, _ in found]
        chosen = [0] * len(found)
        if costs.is_drafting and any(usable):
            chosen = costs.choose(chances, np.array(usable, np.int64)).tolist()
        kept: list[list[int]] = [[]] * len(rows)
        for (index, row, record), count in zip(found, chosen, strict=True):
            kept[index] = drafts[index][:count]
            if count == 0 and record is not None:
                record.watched, record.watched_at = drafts[index], row.num_tokens
        return kept

    def _look_at_watched(self, row: Request, record: DraftRecord) -> None:
        """Compares the drafts that were not verified with the tokens that followed, as far as they are known."""
        watched, record.watched = record.watched, []
        # one token per watched draft: there are a few in a step that asks for drafts, and none in others
        known = row.token_ids[record.watched_at : record.watched_at + len(watched)]
        num_right = 0
        while num_right < len(known) and known[num_right] == watched[num_right]:
            num_right += 1
        if known:
            self._note(record, num_right, is_wrong=num_right < len(known))

    def _note(self, record: DraftRecord, num_right: int, *, is_wrong: bool) -> None:
        record.note(num_right, is_wrong=is_wrong)
        self._record.note(num_right, is_wrong=is_wrong, kept=_KEPT_OF_ALL)

    def _estimates(self, records: Sequence[DraftRecord | None]) -> tuple[FloatArray, FloatArray]:
        """[R] how likely a row's draft is right if those before it are, and the share of its steps with drafts.

        The share is 0 for rows that may have none.
        """
        known = [(0.0, 0.0, 0.0) if one is None else (one.right, one.wrong, one.share) for one in records]
        right, wrong, shares = np.array(known).reshape(-1, 3).T
        of_all = self._record.right / (self._record.right + self._record.wrong)
        chances = (right + _WEIGHT_OF_ALL * of_all) / (right + wrong + _WEIGHT_OF_ALL)
        return np.maximum(chances, _LEAST_CHANCE), shares

    def _set_drafts(self, row: Request, drafts: list[int]) -> None:
        has_drafts = self.is_drafting and row.num_tokens <= row.drafts_up_to
        row.drafts = drafts if has_drafts else []
        row.may_run_ahead = row.kind.may_run_ahead and not has_drafts
