"""A request inside the engine core: one sequence, its tokens and blocks, and its states.

The states and the changes between them::

    WAITING ──▶ RUNNING ──▶ FINISHED_STOPPED | FINISHED_LENGTH
     │   ▲       │   ▲
     ▼   │       ▼   │
     (a) ┘    PREEMPTED | SWAPPED      every state ──▶ FINISHED_ABORTED | FINISHED_ERROR

(a) is WAITING_FOR_CONNECTOR: waiting for something outside of the steps, such as a grammar. And WAITING,
WAITING_FOR_CONNECTOR or PREEMPTED ──▶ FINISHED_LENGTH for a sequence that does not fit the KV cache. A PREEMPTED
request's blocks are freed and will be recomputed; a SWAPPED one's are in CPU memory.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_vllm.core.draft_record import DraftRecord
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
    """States of a request; those after SWAPPED are final."""

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

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    _S.FINISHED_STOPPED: FinishReason.STOP,
    _S.FINISHED_LENGTH: FinishReason.LENGTH,
    _S.FINISHED_ABORTED: FinishReason.ABORT,
    _S.FINISHED_ERROR: FinishReason.ERROR,
}

_FAILURES = frozenset({_S.FINISHED_ABORTED, _S.FINISHED_ERROR})
LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING_FOR_CONNECTOR: _FAILURES | {_S.WAITING, _S.FINISHED_LENGTH},
    _S.WAITING: _FAILURES | {_S.WAITING_FOR_CONNECTOR, _S.RUNNING, _S.FINISHED_LENGTH},
    _S.RUNNING: _FAILURES | {_S.PREEMPTED, _S.SWAPPED, _S.FINISHED_STOPPED, _S.FINISHED_LENGTH},
    _S.PREEMPTED: _FAILURES | {_S.RUNNING, _S.FINISHED_LENGTH},
    _S.SWAPPED: _FAILURES | {_S.RUNNING, _S.PREEMPTED},
    **dict.fromkeys(FINISH_REASONS, frozenset()),
}


class IllegalTransitionError(RuntimeError):
    """A change of state that `LEGAL_TRANSITIONS` does not have: a bug of the engine core."""


class Request:
    """One sequence as the scheduler knows it.

    Steps compute the tokens from `num_computed_tokens`, whose KV is in the cache (or will be after the steps handed
    out), to `num_tokens`, the known ones, plus the `num_pending_tokens` that those steps will sample.

    Args:
        message: the request as the API server sent it.
        max_model_len: most tokens of a sequence with KV; after the last of them one more is sampled.
        drawn_seed: for a request without a seed.

    Attributes:
        token_ids: prompt, then output.
        is_finished: whether it has ended, in any way.
        slot: index of its row in the workers' arrays; NO_SLOT unless it runs.
        block_ids: its KV blocks on the device, in the order of its tokens.
        cpu_block_ids: its KV blocks in CPU memory, while SWAPPED.
        block_hashes: of its first full blocks (core/kv/block_hash.py).
        num_cached_blocks: how many of its first blocks have been entered into the prefix cache.
        num_cached_tokens: prompt tokens that its first admission found in the prefix cache.
        content_keys: what besides the token ids determines its KV, as in EngineCoreRequest.
        parent_id: the request whose prompt's blocks it may share.
        is_further: it is not the first sequence of its client's request.
        bad_words: sequences of token ids that its output must not contain.
        pooling_params: of a pooling request, which generates nothing.
        lora: the LoRA adapter that it asks for.
        row_state: values for the model's layers, by name (`NewRow.state`); set by connectors, never changed in place.
        kind: what is special about its rows.
        may_run_ahead: whether its next step may be made before the tokens of the last one are known: `kind` and
            `Drafting` decide.
        drafts: of its next tokens, for its next step.
        num_drafts: drafts in the step under way.
        drafts_up_to: most tokens of prompt and output with which it has drafts; 0: it never has.
        draft_record: how its drafts have fared; None: it never has any.
        max_num_tokens: tokens of prompt and output at which it ends with LENGTH.
        seed: key of its random numbers, 0 … 2**63-1. A draw depends only on this and the token's position, so that a
            preempted request continues with the same random numbers.
        stop_reason: the id among its stop_token_ids that ended it.
        first_scheduled_time: seconds of time.monotonic().
        num_pending_tokens: tokens that the steps handed out will sample.
        num_counted_prompt_tokens: prompt tokens that statistics have counted.
        prompt_logprobs: those computed and not emitted yet, in order; None if not asked for, or all emitted.
        num_prompt_logprobs: number of first prompt tokens whose log-probabilities are known or not needed.
        end_ids: ids that end it once it has min_num_tokens, and NO_TOKEN, which always does.
        min_num_tokens: tokens of prompt and output before which it cannot end.
    """

    __slots__ = (
        "_kind",
        "arrival_time",
        "bad_words",
        "block_hashes",
        "block_ids",
        "content_keys",
        "cpu_block_ids",
        "draft_record",
        "drafts",
        "drafts_up_to",
        "end_ids",
        "eos_token_id",
        "first_scheduled_time",
        "is_finished",
        "is_further",
        "lora",
        "max_num_tokens",
        "may_run_ahead",
        "min_num_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_counted_prompt_tokens",
        "num_drafts",
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
        # the message's list until it runs: sequences of a client's request share it
        self.token_ids = message.prompt_token_ids
        self.num_prompt_tokens = self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0
        self.slot = NO_SLOT
        self.drafts: list[int] = []
        self.num_drafts = 0
        self.drafts_up_to = 0
        self.draft_record: DraftRecord | None = None
        self.block_ids: list[int] = []
        self.cpu_block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        self.num_cached_tokens = 0
        self.content_keys = message.content_keys
        self.bad_words = message.bad_words
        self.pooling_params = message.pooling_params
        self.lora = message.lora
        self.row_state = _NO_STATE
        self.num_preemptions = 0
        self.num_counted_prompt_tokens = 0
        # the first token has none: nothing comes before it
        self.num_prompt_logprobs = self.num_prompt_tokens if params.prompt_logprobs is None else 1
        self.prompt_logprobs: list[TokenLogprobs] | None = None if params.prompt_logprobs is None else []
        self.first_scheduled_time: float | None = None
        self.stop_reason: int | None = None
        self.eos_token_id = None if params.ignore_eos else message.eos_token_id
        # NO_TOKEN is among them so that `append_output` needs to check one set only
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
    def end_token_ids(self) -> list[int]:
        """Ids that end the sequence, sorted: end-of-sequence unless ignored, and its stop_token_ids."""
        return sorted(self.end_ids - {NO_TOKEN})

    @property
    def num_missing_tokens(self) -> int:
        """Known and pending tokens that are not scheduled yet."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None if it has not."""
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
            IllegalTransitionError: see there.
        """
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise IllegalTransitionError(f"request {self.request_id}: {self.status.name} to {status.name}")
        if self.status is RequestStatus.WAITING and status is RequestStatus.RUNNING:
            self.token_ids = self.token_ids.copy()
        self.status = status
        self.is_finished = status in FINISH_REASONS

    def make_row(self, request_id: str) -> Request:
        """A row of a beam search with the same tokens, but without slot and blocks."""
        row = copy.copy(self)
        row.request_id = request_id
        row.token_ids = self.token_ids.copy()
        row.block_hashes = self.block_hashes.copy()
        row.slot = NO_SLOT
        row.block_ids, row.cpu_block_ids = [], []
        row.num_pending_tokens = 0
        return row

    def append_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Adds log-probabilities of consecutive prompt tokens, skipping those that are known.

        A prompt that is recomputed after a preemption gives some of them again.

        Args:
            start: index of the first token in the prompt.
            entries: one per token.
        """
        new = entries[max(0, self.num_prompt_logprobs - start) :]
        if self.prompt_logprobs is not None and start <= self.num_prompt_logprobs:
            self.prompt_logprobs += new
            self.num_prompt_logprobs += len(new)

    def append_output(self, token_ids: list[int]) -> int:
        """Appends sampled tokens up to the one that ends the sequence, and drops those after it.

        Returns:
            How many were appended. `status` has changed if the sequence has ended: to FINISHED_ERROR if no token
            could be sampled.
        """
        if self.num_tokens + len(token_ids) < self.max_num_tokens and self.end_ids.isdisjoint(token_ids):
            self.token_ids += token_ids
            self.num_tokens += len(token_ids)
            return len(token_ids)
        return self.append_until(token_ids, self.end_of)

    def append_until(self, token_ids: list[int], end_of: Callable[[int], RequestStatus | None]) -> int:
        """`append_output` with another condition for the end.

        Args:
            token_ids: sampled by a step.
            end_of: newest token, already appended → final state, or None if the sequence continues.
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
        """The final state after the newest token, or None; stopping takes precedence over reaching a limit."""
        if token_id in self.end_ids and self.num_tokens >= self.min_num_tokens:
            return self.stop(token_id)
        return RequestStatus.FINISHED_LENGTH if self.num_tokens >= self.max_num_tokens else None

    def stop(self, token_id: int) -> RequestStatus:
        """The final state after a token that stops the sequence; sets `stop_reason` for a stop_token_id."""
        if token_id != self.eos_token_id and token_id in self.end_ids:
            self.stop_reason = token_id
        return RequestStatus.FINISHED_STOPPED


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStep:
    """A step of a request of several rows, made once all of them have sampled.

    Attributes:
        rows: its rows from now on. Their new tokens may differ from those that the workers sampled.
        dead: rows that end.
        forks: (new row, its parent): the new row is a copy of the parent, which continues, too.
        beams: the best sequences so far, if they are to be emitted.
        end: the request's final state, if it ends.
    """

    rows: list[Request]
    dead: list[Request]
    forks: list[tuple[Request, Request]]
    beams: list[BeamSequence] | None = None
    end: RequestStatus | None = None


class RowKind:
    """What is special about a request and its rows; this base class is for ordinary ones.

    A request is one row or, for a beam search, several: then the request itself (the root) waits, ends and gets the
    outputs, and has neither slot nor blocks. The scheduler uses this interface only and knows no subclass. A kind
    without state can be shared by all requests.

    Attributes:
        may_run_ahead: whether its next step may be made before the tokens of the last one are known.
        may_draft: whether its rows may have drafts.
        is_masked: whether its rows sample with bitmasks (`fill_bitmasks`).
        title: subject of a log message about such a request.
        reads_prefix_cache: whether cached tokens of its prompt need not be computed.
        prefers_swapping: whether it is swapped rather than recomputed when preempted, without --preemption-mode.
        width: most rows that it can have.
        num_reserved_slots: free slots reserved for further rows; `Rows` sets it.
    """

    may_run_ahead = True
    may_draft = True
    is_masked = False
    title = "A request"
    reads_prefix_cache = True
    prefers_swapping = False
    width = 1
    num_reserved_slots = 0

    def unsupported_reason(self, max_num_seqs: int) -> str | None:  # noqa: ARG002 - for kinds that are wide
        """Why a request can never run with this --max-num-seqs; None: it can."""
        return None

    def root_of(self, row: Request) -> Request:
        """The request that a row belongs to."""
        return row

    def rows_of(self, request: Request) -> list[Request]:
        """A request's rows."""
        return [request]

    def first_row(self, request: Request) -> Request:
        """The row that computes the prompt of a request that starts, or restarts after a preemption."""
        return request

    def drop_rows(self, request: Request) -> list[Request]:
        """A request's rows, which it does not have any more afterwards."""
        return self.rows_of(request)

    def tokens_wanted(self, row: Request, most: int) -> int:
        """Tokens that a decoding row should compute next: the one that it misses, and drafts after it.

        Called only for rows that may not run ahead; others compute one token.

        Args:
            row: about to decode.
            most: limit given by the step's budget and the sequence's max_num_tokens, at least 1.

        Returns:
            1 … most. The row gets one if blocks are short.
        """
        return min(1 + len(row.drafts), most)

    def drafts(self, row: Request, count: int) -> list[int]:
        """The first `count` drafts of a row that computes more than one token: token ids.

        `take` gets what is sampled at their positions, up to and including the first that differs from its draft.
        """
        return row.drafts[:count]

    def blocks_to_write(self, row: Request, count: int, block_size: int) -> range:  # noqa: ARG002
        """Blocks that a row's next tokens are written to and that may be shared, so that they must be copied first.

        Args:
            row: about to compute.
            count: its tokens.
            block_size: tokens of a block.

        Returns:
            Indices in `Request.block_ids`; empty if only full blocks are shared.
        """
        return range(0)

    def params_of(self, row: Request) -> SamplingParams:
        """The sampling parameters that the workers get."""
        return row.sampling_params

    def take(
        self,
        row: Request,
        token_ids: list[int],
        logprobs: StepLogprobs | None,  # noqa: ARG002 - for kinds that look at more than the sampled token
        index: int,  # noqa: ARG002
    ) -> int | None:
        """Appends sampled tokens to a row.

        Args:
            row: which sampled.
            token_ids: its tokens.
            logprobs: of all rows of the step.
            index: of the row in them.

        Returns:
            How many of the tokens were appended (see `Request.append_output`); None: `advance` will append them, once
            all rows of the request have sampled.
        """
        return row.append_output(token_ids)

    def fill_bitmasks(self, rows: Sequence[tuple[Request, Sequence[int]]]) -> npt.NDArray[np.int32]:
        """Bitmasks of the tokens that a step's masked rows may sample, [G, ceil(V / 32)]: see `SchedulerOutput`.

        Called on the first row's kind.

        Args:
            rows: each with its drafts in the step. It has a mask for its next token, and one behind each draft.
        """
        raise NotImplementedError(f"{type(self).__name__} has no masks for {len(rows)} rows")

    def output_of(self, row: Request, result: RowResult) -> EngineCoreOutput:  # noqa: ARG002 - for kinds that emit it
        """The only output of a request that has a result in place of tokens, such as an embedding."""
        return EngineCoreOutput(
            row.request_id,
            [],
            finish_reason=row.finish_reason,
            first_scheduled_time=row.first_scheduled_time,
            num_cached_tokens=row.num_cached_tokens,
        )

    def failure(self, token_ids: list[int]) -> str:  # noqa: ARG002 - for kinds that fail otherwise, too
        """The error message of a request that ended with an error when these tokens were sampled."""
        return _NO_TOKEN_LEFT

    def advance(self) -> GroupStep | None:
        """The step of a request of several rows; None: some of them have not sampled yet."""
        return None

    def finish(self, status: RequestStatus) -> list[BeamSequence] | None:  # noqa: ARG002 - for kinds that have some
        """The sequences to emit of a beam search that ends outside of a step, if any."""
        return None


PLAIN = RowKind()
