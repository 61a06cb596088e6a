"""A request inside the engine core: one sequence, its tokens and blocks, and its states.

The states and the changes between them::

    WAITING ──▶ RUNNING ──▶ FINISHED_STOPPED | FINISHED_LENGTH
     │   ▲       │   ▲
     ▼   │       ▼   │
     (a) ┘    PREEMPTED | SWAPPED      every state ──▶ FINISHED_ABORTED | FINISHED_ERROR

(a) is WAITING_FOR_CONNECTOR: it waits for something that steps do not give, such as its grammar. And WAITING,
WAITING_FOR_CONNECTOR or PREEMPTED ──▶ FINISHED_LENGTH for a sequence that cannot be held. PREEMPTED has lost its
blocks and computes them again, SWAPPED has them in CPU memory.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import (
    BeamSequence,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
)
from ascend_vllm.types.step import NO_TOKEN, RowResult, StepLogprobs

NO_SLOT = -1
_NO_TOKEN_LEFT = (
    "No token is left to sample: structured_outputs, allowed_token_ids, bad_words and min_tokens together forbid "
    "all of them."
)
_NO_STATE: dict[str, Any] = {}
_SEED_MASK = (1 << 63) - 1


class RequestStatus(enum.IntEnum):
    """Where a request is; everything after SWAPPED is an end."""

    WAITING_FOR_CONNECTOR = 0
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    SWAPPED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH = 6
    FINISHED_ABORTED = 7
    FINISHED_ERROR = 8


_S = RequestStatus

LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING_FOR_CONNECTOR: frozenset({_S.WAITING, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}),
    _S.WAITING: frozenset(
        {_S.WAITING_FOR_CONNECTOR, _S.RUNNING, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR}
    ),
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
        row_state: what layers are to know of its rows, by name (`NewRow.state`); set by connectors, never changed in
            place.
        kind: what is special about it; its rows have the same.
        may_run_ahead: its kind's, for the loops that look at every row of a step.
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
        "_kind",
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
        "may_run_ahead",
        "min_num_tokens",
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
        "row_state",
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
        self.kind = PLAIN
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
        self.row_state = _NO_STATE
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
    def kind(self) -> RowKind:
        """See the class."""
        return self._kind

    @kind.setter
    def kind(self, kind: RowKind) -> None:
        self._kind = kind
        self.may_run_ahead = kind.may_run_ahead

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
        """Whether its prompt must be computed even if it is cached."""
        return self.is_scored or not self._kind.reads_prefix_cache

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
        return self.append_until(token_ids, self.end_of)

    def append_until(self, token_ids: list[int], end_of: Callable[[int], RequestStatus | None]) -> int:
        """`append_output` for a kind of row that may end otherwise.

        Args:
            token_ids: that a step sampled.
            end_of: how the sequence ends with its newest token, which is given; None: it goes on.
        """
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

    def end_of(self, token_id: int) -> RequestStatus | None:
        """How the sequence ends with its newest token, if it does; a stop wins over reaching a limit."""
        if token_id in self.end_ids and self.num_tokens >= self.min_num_tokens:
            return self.stop(token_id)
        return RequestStatus.FINISHED_LENGTH if self.num_tokens >= self.max_num_tokens else None

    def stop(self, token_id: int) -> RequestStatus:
        """How the sequence ends with a token that stops it; `stop_reason` is set for a stop_token_id."""
        if token_id != self.eos_token_id and token_id in self.end_ids:
            self.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStep:
    """What a request of several rows does once all of them have sampled.

    Attributes:
        rows: its rows from now on. Their new tokens need not be the ones that the workers sampled.
        dead: rows that end.
        forks: (new row, its parent): rows that begin as a copy of another, which goes on too.
        beams: the best sequences so far, if there is something new to emit.
        end: how the request ends, if it does.
    """

    rows: list[Request]
    dead: list[Request]
    forks: list[tuple[Request, Request]]
    beams: list[BeamSequence] | None = None
    end: RequestStatus | None = None


class RowKind:
    """What is special about a request and its rows: nothing, of this kind.

    A request is one row or, as a beam search is, several: then the request itself (the root) waits, ends and gets the
    outputs, and has neither slot nor blocks. Subclasses change what they must; the scheduler asks, and names none of
    them. A kind without state can be shared by all requests.

    Attributes:
        may_run_ahead: whether its next step may be made before the tokens of the last one are known.
        is_masked: whether `fill_bitmasks` says which tokens it may sample.
        title: how a message for operators begins that tells of such a request.
        reads_prefix_cache: whether what is cached of its prompt need not be computed.
        prefers_swapping: whether its blocks go to CPU memory if it makes room, unless --preemption-mode says more.
        width: rows that it may come to have.
        num_reserved_slots: free slots that are kept for further rows; `Rows` sets it.
    """

    may_run_ahead = True
    is_masked = False
    title = "A request"
    reads_prefix_cache = True
    prefers_swapping = False
    width = 1
    num_reserved_slots = 0

    def unsupported_reason(self, max_num_seqs: int) -> str | None:  # noqa: ARG002 - for kinds that are wide
        """Why a request can never run with --max-num-seqs rows; None: it can."""
        return None

    def root_of(self, row: Request) -> Request:
        """The request that a row belongs to."""
        return row

    def rows_of(self, request: Request) -> list[Request]:
        """A request's rows."""
        return [request]

    def first_row(self, request: Request) -> Request:
        """The row that computes the prompt of a request that begins, or begins anew."""
        return request

    def drop_rows(self, request: Request) -> list[Request]:
        """A request's rows, which are given up."""
        return self.rows_of(request)

    def tokens_wanted(self, row: Request, most: int) -> int:  # noqa: ARG002 - for kinds that want more
        """Tokens that a row which misses one should compute next: that one, and drafts behind it.

        Asked of rows only that may not run ahead; the others get one token.

        Args:
            row: about to decode.
            most: tokens that the step and the sequence have room for, 1 or more.

        Returns:
            1 … most. The row gets fewer if blocks are short.
        """
        return 1

    def drafts(self, row: Request, count: int) -> list[int]:
        """The first so many drafts of a row that gets more than one token: ids of the vocabulary.

        The row advances by what is sampled in their places, up to the first that differs; `take` gets that.
        """
        raise NotImplementedError(f"{type(self).__name__} wants {count} more tokens for {row} and has no drafts")

    def blocks_to_write(self, row: Request, count: int, block_size: int) -> range:  # noqa: ARG002
        """Blocks that a row writes in its next tokens and that others may hold, too, so that it must get copies.

        Args:
            row: about to compute.
            count: its tokens.
            block_size: tokens of a block.

        Returns:
            Their places in `Request.block_ids`; none where only full blocks are shared.
        """
        return range(0)

    def params_of(self, row: Request) -> SamplingParams:
        """What the workers are told of how a row samples."""
        return row.sampling_params

    def take(
        self,
        row: Request,
        token_ids: list[int],
        logprobs: StepLogprobs | None,  # noqa: ARG002 - for kinds that look at more than the sampled token
        index: int,  # noqa: ARG002
    ) -> int | None:
        """Appends what a step sampled.

        Args:
            row: which sampled.
            token_ids: that it sampled.
            logprobs: of all rows of the step.
            index: of the row in them.

        Returns:
            How many of the tokens were taken (see `Request.append_output`); None: `advance` tells, when all rows of
            the request have sampled.
        """
        return row.append_output(token_ids)

    def fill_bitmasks(self, rows: Sequence[Request]) -> npt.NDArray[np.int32]:
        """Which tokens the masked rows of a step, [G], may get next: [G, ceil(V / 32)], as in `SchedulerOutput`.

        Asked of the first row's kind.
        """
        raise NotImplementedError(f"{type(self).__name__} has no masks for {len(rows)} rows")

    def output_of(self, row: Request, result: RowResult) -> EngineCoreOutput:  # noqa: ARG002 - for kinds that emit it
        """The one output of a request that has ended with what a step made of it in place of tokens."""
        return EngineCoreOutput(
            row.request_id,
            [],
            finish_reason=row.finish_reason,
            first_scheduled_time=row.first_scheduled_time,
            num_cached_tokens=row.num_cached_tokens,
        )

    def failure(self, token_ids: list[int]) -> str:  # noqa: ARG002 - for kinds that fail otherwise, too
        """What a client is told of a request that ended with an error when these tokens were sampled."""
        return _NO_TOKEN_LEFT

    def advance(self) -> GroupStep | None:
        """What follows when all rows of the request have sampled; None: some are to come."""
        return None

    def finish(self, status: RequestStatus) -> list[BeamSequence] | None:  # noqa: ARG002 - for kinds that have some
        """The best sequences of a request that ends outside of a step, if it has some to emit."""
        return None


PLAIN = RowKind()
