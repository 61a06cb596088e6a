"""A step while it is being scheduled, and while the workers compute it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.core.kv.manager import KVCacheManager
from ascend_vllm.core.prompt_chunks import PromptLimits
from ascend_vllm.core.request import Request
from ascend_vllm.types.messages import EngineCoreOutput, TokenLogprobs
from ascend_vllm.types.step import (
    PADDING_TOKEN,
    REJECTED_TOKEN,
    NewRow,
    PromptLogprobs,
    SchedulerOutput,
    StepLogprobs,
)


@dataclasses.dataclass(slots=True)
class StepInFlight:
    """What is kept of a step until its outputs arrive.

    Attributes:
        slots: of its rows.
        rows: the requests that were in these slots.
        made_at: seconds of time.monotonic().
        num_chunk_tokens: tokens of rows that compute more than one.
        num_chunk_pairs: the sum, over these, of the tokens that each attends to.
        num_prompt_tokens: prompt tokens that no step had computed before.
        num_drafts: drafts among its tokens.
        num_asked: most drafts of each row that are to come with its outputs.
        was_drafting: rows were to have drafts, see `Drafting.is_drafting`.
    """

    slots: list[int]
    rows: list[Request]
    made_at: float
    num_chunk_tokens: int = 0
    num_chunk_pairs: int = 0
    num_prompt_tokens: int = 0
    num_drafts: int = 0
    num_asked: int = 0
    was_drafting: bool = False

    def sampling_rows(self, slots: list[int]) -> list[Request]:
        """The requests that were in these of its slots."""
        if len(slots) == len(self.slots):
            return self.rows
        by_slot = dict(zip(self.slots, self.rows, strict=True))
        return [by_slot[slot] for slot in slots]

    def take_prompt_logprobs(self, parts: Sequence[PromptLogprobs]) -> list[EngineCoreOutput]:
        """Gives requests the log-probabilities of the prompt chunks that the step has computed.

        Requests that have been preempted since then keep them, too. They are emitted chunk by chunk, the last chunk's
        with the first token: those of a whole long prompt would delay other requests' outputs in the API server.

        Returns:
            Outputs of requests whose prompts have more chunks to come.
        """
        outputs = []
        by_slot = dict(zip(self.slots, self.rows, strict=True))
        for part in parts:
            request = by_slot[part.slot]
            if request.prompt_logprobs is None:
                continue
            width = 1 + (request.sampling_params.prompt_logprobs or 0)
            columns = part.token_ids[:, :width].tolist(), part.logprobs[:, :width].tolist(), part.ranks.tolist()
            entries = [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]
            request.append_prompt_logprobs(part.start, entries)
            if request.prompt_logprobs and request.is_scored and not request.is_finished:
                outputs.append(EngineCoreOutput(request.request_id, [], prompt_logprobs=request.prompt_logprobs))
                request.prompt_logprobs = []
        return outputs


def row_logprobs(logprobs: StepLogprobs, index: int, count: int, num_logprobs: int) -> list[TokenLogprobs]:
    """One row's log-probabilities of `count` tokens: each token's, and those of the `num_logprobs` most likely."""
    width = 1 + num_logprobs
    token_ids = logprobs.token_ids[index, :count, :width].tolist()
    values = logprobs.logprobs[index, :count, :width].tolist()
    ranks = logprobs.ranks[index, :count].tolist()
    return [TokenLogprobs(*entry) for entry in zip(token_ids, values, ranks, strict=True)]


def take_back_rejected(request: Request, token_ids: list[int]) -> list[int]:
    """The tokens of `StepOutput.sampled_token_ids` that a row keeps; its rejected drafts become uncomputed."""
    num_positions = len(token_ids) - token_ids.count(PADDING_TOKEN)
    num_rejected = token_ids.count(REJECTED_TOKEN)
    request.num_pending_tokens -= num_positions
    request.num_computed_tokens -= num_rejected
    return token_ids[: num_positions - num_rejected]


class StepBuilder:
    """Collects a step's rows and their tokens.

    Args:
        config: limits of prompts.
        kv_cache: caches the blocks that prompts fill.
        step_id: of the step.
        num_waiting: waiting requests; those that are admitted may be in the step.
        made_at: seconds of time.monotonic().
        is_mixed: running rows come before prompts, which are computed beside them.

    Attributes:
        is_mixed: as given.
        step: the step so far.
        in_flight: what is kept of it until its outputs arrive.
        masked: rows that sample with bitmasks, and their drafts.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        step_id: int,
        num_waiting: int,
        made_at: float,
        *,
        is_mixed: bool,
    ) -> None:
        self.is_mixed = is_mixed
        self.step = SchedulerOutput(step_id, [], [], [], [], [])
        self.in_flight = StepInFlight(self.step.slots, [], made_at)
        self.masked: list[tuple[Request, Sequence[int]]] = []
        self._config = config
        self._kv_cache = kv_cache
        self._num_waiting = num_waiting
        self._limits: PromptLimits | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing for the workers."""
        step = self.step
        return not (step.slots or step.new_rows or step.replaced_blocks)

    def limits(self, num_running_prompts: int = 0) -> PromptLimits:
        """The limits of this step's prompts; the first call gives the number of running ones."""
        if self._limits is None:
            self._limits = PromptLimits(self._config, num_running_prompts + self._num_waiting)
        return self._limits

    def enter(self, row: Request) -> None:
        """Sends the workers a row that has just got its slot; `add` has its tokens computed."""
        self.step.new_rows.append(_new_row(row))

    def add(self, row: Request, count: int) -> None:
        """Schedules `count` of a row's missing tokens; 0 is allowed."""
        if count == 0:
            return
        step = self.step
        step.slots.append(row.slot)
        step.num_scheduled_tokens.append(count)
        # blocks are allocated for one forward pass only
        step.num_steps = 1
        self.in_flight.rows.append(row)
        row.num_computed_tokens += count
        if row.num_missing_tokens == 0:
            row.num_pending_tokens += 1
            if row.kind.is_masked:
                self.masked.append((row, ()))
        if count > 1:
            self.in_flight.num_chunk_tokens += count
            self.in_flight.num_chunk_pairs += count * (2 * row.num_computed_tokens - count) // 2
            self._kv_cache.cache_full_blocks(row, min(row.num_computed_tokens, row.num_tokens))
        if row.num_counted_prompt_tokens < row.num_prompt_tokens:
            self._count_prompt_tokens(row)

    def add_drafts(self, row: Request, token_ids: list[int]) -> None:
        """Schedules drafts of the row that was added last."""
        row.num_drafts = len(token_ids)
        self.in_flight.num_drafts += len(token_ids)
        self.step.drafts.append((row.slot, token_ids))
        self.step.num_scheduled_tokens[-1] += len(token_ids)
        row.num_computed_tokens += len(token_ids)
        row.num_pending_tokens += len(token_ids)

    def num_computed_before(self, row: Request) -> int:
        """Tokens of a running row that were scheduled before this step."""
        step = self.step
        if row.slot not in step.slots:
            return row.num_computed_tokens
        return row.num_computed_tokens - step.num_scheduled_tokens[step.slots.index(row.slot)]

    def has_entered(self, row: Request) -> bool:
        """Whether a row got its slot in this step."""
        return any(new_row.slot == row.slot for new_row in self.step.new_rows)

    def finish(self) -> SchedulerOutput:
        """The finished step; its tokens count as computed from now on."""
        if self.step.num_steps > 1:
            for row in self.in_flight.rows:
                # a row stops at max_num_tokens
                further = min(self.step.num_steps - 1, row.max_num_tokens - 1 - row.num_computed_tokens)
                row.num_computed_tokens += further
                row.num_pending_tokens += further
        if self.masked:
            self.step.constrained_slots = [row.slot for row, drafts in self.masked for _ in range(1 + len(drafts))]
            self.step.bitmask = self.masked[0][0].kind.fill_bitmasks(self.masked)
        self.step.block_moves = self._kv_cache.take_moves()
        return self.step

    def _count_prompt_tokens(self, row: Request) -> None:
        """Counts each prompt token once, also if it is computed again after a preemption."""
        end = min(row.num_computed_tokens, row.num_prompt_tokens)
        if end > row.num_counted_prompt_tokens:
            self.in_flight.num_prompt_tokens += end - row.num_counted_prompt_tokens
            row.num_counted_prompt_tokens = end


def _new_row(row: Request) -> NewRow:
    """The row as the workers get it; lists are copied, since the request's own grow."""
    return NewRow(
        slot=row.slot,
        request_id=row.request_id,
        token_ids=row.token_ids.copy(),
        num_prompt_tokens=row.num_prompt_tokens,
        num_computed_tokens=row.num_computed_tokens,
        block_ids=row.block_ids.copy(),
        sampling_params=row.kind.params_of(row),
        seed=row.seed,
        stop_token_ids=row.end_token_ids,
        max_num_tokens=row.max_num_tokens,
        num_prompt_logprobs=row.num_prompt_logprobs,
        bad_words=row.bad_words,
        pooling_params=row.pooling_params,
        state=row.row_state,
        may_draft=row.drafts_up_to > 0,
    )
