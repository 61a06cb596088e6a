"""A step while it is being made, and while it is computed."""

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
    """A step that has been handed out.

    Attributes:
        slots: of its rows.
        rows: the requests in them then.
        made_at: seconds of time.monotonic().
        num_piece_tokens: tokens of rows that compute more than one.
        num_prompt_tokens: prompt tokens that it is the first to compute.
    """

    slots: list[int]
    rows: list[Request]
    made_at: float
    num_piece_tokens: int
    num_prompt_tokens: int

    def sampling_rows(self, slots: list[int]) -> list[Request]:
        """The requests that were in some of its slots."""
        if len(slots) == len(self.slots):
            return self.rows
        by_slot = dict(zip(self.slots, self.rows, strict=True))
        return [by_slot[slot] for slot in slots]

    def take_prompt_logprobs(self, parts: Sequence[PromptLogprobs]) -> list[EngineCoreOutput]:
        """Gives requests the log-probabilities of the part of their prompt that the step has computed.

        Those that have been preempted since then take them too: what was computed is good. They are emitted part by
        part, the last one with the first token: all of a long prompt's at once would keep the API server from others'
        outputs.

        Returns:
            Outputs of requests whose prompts go on.
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
    """What a row advances by, of a line of `StepOutput.sampled_token_ids`; KV behind wrong drafts does not count."""
    num_places = len(token_ids) - token_ids.count(PADDING_TOKEN)
    num_rejected = token_ids.count(REJECTED_TOKEN)
    request.num_pending_tokens -= num_places
    request.num_computed_tokens -= num_rejected
    return token_ids[: num_places - num_rejected]


class StepBuilder:
    """Gathers rows and their tokens.

    Args:
        config: limits of prompts.
        kv_cache: is told of the blocks that prompts fill.
        step_id: of the step.
        num_waiting: requests that wait; those that are admitted may take part.

    Attributes:
        step: the step so far.
        rows: the requests in `step.slots`.
        masked: those that sample, and whose next token a mask decides on.
        num_piece_tokens: tokens of rows that compute more than one.
        num_prompt_tokens: prompt tokens that are computed for the first time.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager, step_id: int, num_waiting: int) -> None:
        self.step = SchedulerOutput(step_id, [], [], [], [], [])
        self.rows: list[Request] = []
        self.masked: list[Request] = []
        self.num_piece_tokens = 0
        self.num_prompt_tokens = 0
        self._config = config
        self._kv_cache = kv_cache
        self._num_waiting = num_waiting
        self._limits: PromptLimits | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell the workers."""
        step = self.step
        return not (step.slots or step.new_rows or step.replaced_blocks)

    def limits(self, num_running_prompts: int = 0) -> PromptLimits:
        """The limits of this step's prompts; the first call says how many of them run already."""
        if self._limits is None:
            self._limits = PromptLimits(self._config, num_running_prompts + self._num_waiting)
        return self._limits

    def enter(self, row: Request) -> None:
        """Tells the workers of a row that has just got its slot; its tokens are not computed by that alone."""
        self.step.new_rows.append(_new_row(row))

    def add(self, row: Request, count: int) -> None:
        """Has `count` of a row's missing tokens computed; with 0 nothing happens."""
        if count == 0:
            return
        step = self.step
        step.slots.append(row.slot)
        step.num_scheduled_tokens.append(count)
        # this row has no room for more than one step
        step.num_steps = 1
        self.rows.append(row)
        row.num_computed_tokens += count
        if row.num_missing_tokens == 0:
            row.num_pending_tokens += 1
            if row.kind.is_masked:
                self.masked.append(row)
        if count > 1:
            self.num_piece_tokens += count
            self._kv_cache.cache_full_blocks(row, min(row.num_computed_tokens, row.num_tokens))
        if row.num_counted_prompt_tokens < row.num_prompt_tokens:
            self._count_prompt_tokens(row)

    def add_drafts(self, row: Request, token_ids: list[int]) -> None:
        """Has the row that was added last compute drafts, too."""
        self.step.drafts.append((row.slot, token_ids))
        self.step.num_scheduled_tokens[-1] += len(token_ids)
        row.num_computed_tokens += len(token_ids)
        row.num_pending_tokens += len(token_ids)

    def num_computed_before(self, row: Request) -> int:
        """Tokens of a running row that steps before this one compute."""
        step = self.step
        if row.slot not in step.slots:
            return row.num_computed_tokens
        return row.num_computed_tokens - step.num_scheduled_tokens[step.slots.index(row.slot)]

    def has_entered(self, row: Request) -> bool:
        """Whether a row has got its slot in this step."""
        return any(new_row.slot == row.slot for new_row in self.step.new_rows)

    def finish(self) -> SchedulerOutput:
        """The step; its rows count as computed from now on."""
        if self.step.num_steps > 1:
            for row in self.rows:
                # a row that reaches its last token on the way stops there
                further = min(self.step.num_steps - 1, row.max_num_tokens - 1 - row.num_computed_tokens)
                row.num_computed_tokens += further
                row.num_pending_tokens += further
        if self.masked:
            self.step.constrained_slots = [row.slot for row in self.masked]
            self.step.bitmask = self.masked[0].kind.fill_bitmasks(self.masked)
        self.step.block_moves = self._kv_cache.take_moves()
        return self.step

    def in_flight(self, made_at: float) -> StepInFlight:
        """The step as it is remembered until its outputs come; see there."""
        return StepInFlight(self.step.slots, self.rows, made_at, self.num_piece_tokens, self.num_prompt_tokens)

    def _count_prompt_tokens(self, row: Request) -> None:
        """Each prompt token counts once, however often preemption makes it be computed."""
        end = min(row.num_computed_tokens, row.num_prompt_tokens)
        if end > row.num_counted_prompt_tokens:
            self.num_prompt_tokens += end - row.num_counted_prompt_tokens
            row.num_counted_prompt_tokens = end


def _new_row(row: Request) -> NewRow:
    """The row as its slot gets it; lists are copied, since its own go on growing."""
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
    )
