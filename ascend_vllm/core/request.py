"""A request inside the engine core: one sequence, its tokens and blocks, and its states.

The states and the changes between them::

    WAITING ──▶ RUNNING ──▶ FINISHED_STOPPED | FINISHED_LENGTH
                 │   ▲
                 ▼   │
         PREEMPTED | SWAPPED      every state ──▶ FINISHED_ABORTED | FINISHED_ERROR

and WAITING or PREEMPTED ──▶ FINISHED_LENGTH for a sequence that cannot be held. PREEMPTED has lost its blocks and
computes them again, SWAPPED has them in CPU memory.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest, FinishReason, TokenLogprobs
from ascend_vllm.types.step import NO_TOKEN

if TYPE_CHECKING:
    from ascend_vllm.core.beam.group import BeamGroup
    from ascend_vllm.core.structured.output_constraint import OutputConstraint

NO_SLOT = -1
_SEED_MASK = (1 << 63) - 1


class RequestStatus(enum.IntEnum):
    """Where a request is; everything after SWAPPED is an end."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7


_S = RequestStatus

LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}),
    _S.RUNNING: frozenset(
        {_S.PREEMPTED, _S.SWAPPED, _S.FINISHED_STOPPED, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}
    ),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}),
    _S.SWAPPED: frozenset({_S.RUNNING, _S.PREEMPTED, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}),
    _S.FINISHED_STOPPED: frozenset(),
    _S.FINISHED_LENGTH: frozenset(),
    _S.FINISHED_ABORTED: frozenset(),
    _S.FINISHED_ERROR: frozenset(),
}

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    _S.FINISHED_STOPPED: FinishReason.STOP,
    _S.FINISHED_LENGTH: FinishReason.LENGTH,
    _S.FINISHED_ABORTED: FinishReason.ABORT,
    _S.FINISHED_ERROR: FinishReason.ERROR,
}


class IllegalTransitionError(RuntimeError):
    """A request was to change to a state that its present one does not lead to: a bug of the engine core."""


class Request:
    """One sequence on its way through the scheduler.

    Scheduling knows one pair of numbers: `num_computed_tokens`, whose KV is in the cache (or will be when the
    steps handed out are done), chases `num_tokens`, the tokens known, with the `num_pending_tokens` that those steps
    will have sampled.

    Args:
        message: the request as the API server sent it.
        max_model_len: most tokens whose KV a sequence may hold. A full sequence still samples one more.
        drawn_seed: key of the random stream for a request that brings no seed.

    Attributes:
        token_ids: prompt, then output.
        is_finished: whether it has ended, in any way.
        slot: its row in the workers; NO_SLOT unless it runs.
        block_ids: KV blocks it holds on the device, in the order of its tokens.
        cpu_block_ids: KV blocks it holds in CPU memory, while SWAPPED.
        block_hashes: of the blocks that its tokens fill (core/kv/block_hash.py).
        num_cached_blocks: how many of its first blocks the prefix cache has been told of.
        num_cached_tokens: prompt tokens that its first admission found in the prefix cache.
        content_keys: what besides the token ids decides its KV, as in EngineCoreRequest.
        parent_id: the request whose prompt's blocks it may share.
        is_further: its caller's request has other sequences that came before it.
        bad_words: sequences of ids that its output must not contain.
        pooling_params: what is made of its prompt, if nothing is to be generated.
        beam_group: the beam search that it is, or that it is a row of.
        constraint: what its text must look like; None: anything, or its grammar is being compiled.
        needs_host: whether its next token can only be computed when the host knows the one before: it has a
            beam group or a constraint.
        max_num_tokens: tokens at which it ends whatever they are.
        seed: key of its random stream, 0 … 2**63-1. A draw depends on this and the token's position alone,
            so that a resumed request goes on with the same stream.
        stop_reason: the id among its stop_token_ids that ended it.
        first_scheduled_time: seconds of time.monotonic().
        num_pending_tokens: tokens that steps handed out will have sampled.
        num_counted_prompt_tokens: prompt tokens that statistics have counted.
        prompt_logprobs: of prompt tokens, in order, that are known and not emitted; None unless asked for, and once
            all of them have been emitted.
        num_prompt_logprobs: prompt tokens, counted from the first, that need no log-probabilities any more.
        end_ids: ids that end it, once it has min_num_tokens, and NO_TOKEN, which always does.
        min_num_tokens: tokens before which it cannot end.
    """

    __slots__ = (
        "_beam_group",
        "_constraint",
        "arrival_time",
        "bad_words",
        "block_hashes",
        "block_ids",
        "content_keys",
        "cpu_block_ids",
        "end_ids",
        "eos_token_id",
        "first_scheduled_time",
        "is_finished",
        "is_further",
        "max_num_tokens",
        "min_num_tokens",
        "needs_host",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_prompt_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "parent_id",
        "pooling_params",
        "priority",
        "prompt_logprobs",
        "request_id",
        "sampling_params",
        "seed",
        "slot",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, message: EngineCoreRequest, max_model_len: int, drawn_seed: int) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.sampling_params: SamplingParams = params
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.parent_id = message.parent_id
        self.is_further = message.is_further
        self._beam_group: BeamGroup | None = None
        self._constraint: OutputConstraint | None = None
        self.needs_host = False
        self.seed = (drawn_seed if params.seed is None else params.seed) & _SEED_MASK
        self.status = RequestStatus.WAITING
        self.is_finished = False
        # the message's until it runs: the sequences of a request share their prompt
        self.token_ids = message.prompt_token_ids
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.slot = NO_SLOT
        self.block_ids: list[int] = []
        self.cpu_block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.num_cached_tokens = 0
        self.content_keys = message.content_keys
        self.bad_words = message.bad_words
        self.pooling_params = message.pooling_params
        self.num_preemptions = 0
        self.num_counted_prompt_tokens = 0
        # nothing comes before the first token
        self.num_prompt_logprobs = self.num_prompt_tokens if params.prompt_logprobs is None else 1
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.first_scheduled_time: float | None = None
        self.stop_reason: int | None = None
        self.eos_token_id = None if params.ignore_eos else message.eos_token_id
        # with NO_TOKEN among them output that ends nothing is told by one look at this set
        self.end_ids = frozenset(params.stop_token_ids or ()) | {NO_TOKEN}
        if self.eos_token_id is not None:
            self.end_ids |= {self.eos_token_id}
        self.min_num_tokens = self.num_prompt_tokens + params.min_tokens
        self.max_num_tokens = max_model_len + 1
        if params.max_tokens is not None:
            self.max_num_tokens = min(self.max_num_tokens, self.num_prompt_tokens + params.max_tokens)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, slot={self.slot}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens}, blocks={len(self.block_ids)})"
        )

    @property
    def beam_group(self) -> BeamGroup | None:
        """See the class."""
        return self._beam_group

    @beam_group.setter
    def beam_group(self, group: BeamGroup) -> None:
        self._beam_group = group
        self.needs_host = True

    @property
    def constraint(self) -> OutputConstraint | None:
        """See the class."""
        return self._constraint

    @constraint.setter
    def constraint(self, constraint: OutputConstraint) -> None:
        self._constraint = constraint
        self.needs_host = True

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def end_token_ids(self) -> list[int]:
        """Ids that end the sequence: end-of-sequence unless ignored, and its stop_token_ids."""
        return sorted(self.end_ids - {NO_TOKEN})

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that no step has been given yet."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """How it ended; None while it lives."""
        return FINISH_REASONS.get(self.status)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether its prompt must be computed, even if it is cached: for its log-probabilities, or to pool it."""
        pooling = self.pooling_params
        if pooling is not None and pooling.skip_reading_prefix_cache:
            return True
        return self.is_scored

    @property
    def is_scored(self) -> bool:
        """Whether log-probabilities of its prompt are still to be computed."""
        return self.num_prompt_logprobs < self.num_prompt_tokens

    def transition(self, status: RequestStatus) -> None:
        """Changes its state.

        Raises:
            IllegalTransitionError: the table has no such change.
        """
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransitionError(f"request {self.request_id}: {self.status.name} to {status.name}")
        if self.status is RequestStatus.WAITING and status is RequestStatus.RUNNING:
            self.token_ids = self.token_ids.copy()
        self.status = status
        self.is_finished = status in FINISH_REASONS

    def make_row(self, request_id: str) -> Request:
        """A further row of a beam search: the same tokens, but neither slot nor blocks."""
        row = copy.copy(self)
        row.request_id = request_id
        row.token_ids = self.token_ids.copy()
        row.block_hashes = self.block_hashes.copy()
        row.slot = NO_SLOT
        row.block_ids, row.cpu_block_ids = [], []
        row.num_pending_tokens = 0
        return row

    def append_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Takes log-probabilities of consecutive prompt tokens, but none twice.

        A prompt that is computed again after a preemption may tell of tokens that are known by now.

        Args:
            start: index of the first token in the prompt.
            entries: one per token.
        """
        new = entries[max(0, self.num_prompt_logprobs - start) :]
        if self.prompt_logprobs is not None and start <= self.num_prompt_logprobs:
            self.prompt_logprobs += new
            self.num_prompt_logprobs += len(new)

    def append_output(self, token_ids: list[int]) -> int:
        """Takes the tokens a step sampled, up to the one that ends the sequence.

        Returns:
            How many were taken; what follows an end is void. `status` tells whether it has ended: with an error if
            nothing could be sampled.
        """
        if self.num_tokens + len(token_ids) < self.max_num_tokens and self.end_ids.isdisjoint(token_ids):
            self.token_ids += token_ids
            self.num_tokens += len(token_ids)
            return len(token_ids)
        return self._append_one_by_one(token_ids, self._end)

    def append_constrained_output(self, token_ids: list[int]) -> int:
        """`append_output` for a request with a constraint, which moves on with them."""
        return self._append_one_by_one(token_ids, self._constrained_end)

    def _append_one_by_one(self, token_ids: list[int], end_of: Callable[[int], RequestStatus | None]) -> int:
        for count, token_id in enumerate(token_ids):
            if token_id == NO_TOKEN:
                self.transition(RequestStatus.FINISHED_ERROR)
                return count
            self.token_ids.append(token_id)
            self.num_tokens += 1
            end = end_of(token_id)
            if end is not None:
                self.transition(end)
                return count + 1
        return len(token_ids)

    def _end(self, token_id: int) -> RequestStatus | None:
        """How the sequence ends with its newest token, if it does; a stop wins over reaching a limit."""
        if token_id in self.end_ids and self.num_tokens >= self.min_num_tokens:
            return self._stop(token_id)
        return RequestStatus.FINISHED_LENGTH if self.num_tokens >= self.max_num_tokens else None

    def _constrained_end(self, token_id: int) -> RequestStatus | None:
        """`_end` when a constraint has its say: it may want an end that the request does not."""
        end = self._end(token_id)
        if end is RequestStatus.FINISHED_STOPPED or self._constraint is None:
            return end
        if not self._constraint.accept(token_id):
            may_end = self._constraint.may_end_with(token_id)
            return self._stop(token_id) if may_end else RequestStatus.FINISHED_ERROR
        return RequestStatus.FINISHED_STOPPED if self._constraint.must_end else end

    def _stop(self, token_id: int) -> RequestStatus:
        if token_id != self.eos_token_id and token_id in self.end_ids:
            self.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED
