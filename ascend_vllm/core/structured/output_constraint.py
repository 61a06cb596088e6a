"""What constraints do in the steps: which tokens their requests may get next, and how a constrained text ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import numpy as np

from ascend_vllm.core.request import Request, RequestStatus, RowKind
from ascend_vllm.core.structured.grammar import Bitmask, CompiledGrammar, GrammarBackend, last_word
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NO_TOKEN, StepLogprobs

_GRAMMAR_FAILED = "structured_outputs: the grammar became too complex for its library."
# CPU seconds that the grammar of a request may take in steps, which others wait for: at first, and with each token
_BURST_S = 0.5
_TOKEN_S = 0.005
# one that has less left is watched
_WATCHED_S = 0.4
# rows of a step's masks that took less are not looked into
_LOOK_S = 0.0005


class OutputConstraint(RowKind):
    """The kind of a constrained request: its grammar, and how it may end.

    A text that is complete may end, by an end-of-sequence token or a stop token; one that can only end must. That
    comes before `ignore_eos` and `min_tokens`: a token there must be.

    Args:
        compiled: the grammar, which other requests may have as well.
        backend: of the grammar.
        request: whose text it is.
        vocabulary: of the model.

    Attributes:
        grammar: where the text stands.
        backend: as given.
        is_waiting: whether the text after which the constraint begins has not come yet.
    """

    __slots__ = (
        "_allowance_s",
        "_begin_after",
        "_compiled",
        "_end_ids",
        "_forced_ids",
        "_min_num_tokens",
        "_num_words",
        "_tail",
        "_vocabulary",
        "backend",
        "grammar",
        "is_waiting",
    )

    may_run_ahead = False
    is_masked = True
    title = "A structured output"

    def __init__(
        self, compiled: CompiledGrammar, backend: GrammarBackend, request: Request, vocabulary: Vocabulary
    ) -> None:
        self.grammar = compiled.start()
        self.backend = backend
        self._compiled = compiled
        self._allowance_s = _BURST_S
        self._num_words = vocabulary.num_words
        self._vocabulary = vocabulary
        self._end_ids = [id_ for id_ in request.end_token_ids if 0 <= id_ < vocabulary.size]
        # what a text ends with that can do nothing else, although its request does not want that to be its end
        self._forced_ids = self._end_ids or vocabulary.eos_token_ids[:1]
        self._min_num_tokens = request.min_num_tokens
        params = request.sampling_params.structured_outputs
        self._begin_after = (params.begin_after if params is not None else None) or ""
        self.is_waiting = bool(self._begin_after)
        # the end of the text while it waits
        self._tail = b""

    @property
    def num_words(self) -> int:
        """32-bit words of a bitmask."""
        return self._num_words

    def finish_bitmask(self, row: Bitmask, num_tokens: int) -> None:
        """Adds the tokens that may end the text to those that continue it.

        Args:
            row: [W] as the grammar filled it.
            num_tokens: of the sequence so far.
        """
        bits = row.view(np.uint32)
        if self.is_waiting:
            row[:] = -1
            row[-1] = last_word(len(self._vocabulary.tokens))
        accepting = not self.is_waiting and self.grammar.is_accepting
        if num_tokens + 1 < self._min_num_tokens:
            before = bits.copy()
            _set_bits(bits, self._end_ids, False)
            if not bits.any():
                bits[:] = before
        elif accepting:
            _set_bits(bits, self._end_ids, True)
        if accepting and not bits.any():
            _set_bits(bits, self._forced_ids, True)

    def params_of(self, row: Request) -> SamplingParams:
        """Without min_tokens, which the masks mind: the text may have to end before."""
        return row.sampling_params.clone(min_tokens=0)

    def take(self, row: Request, token_ids: list[int], logprobs: StepLogprobs | None, index: int) -> int:  # noqa: ARG002
        """See `RowKind`: the grammar moves on with the tokens, and may want an end that the request does not."""

        def end_of(token_id: int) -> RequestStatus | None:
            end = row.end_of(token_id)
            if end is RequestStatus.FINISHED_STOPPED:
                return end
            if not self.accept(token_id):
                return row.stop(token_id) if self.may_end_with(token_id) else RequestStatus.FINISHED_ERROR
            return RequestStatus.FINISHED_STOPPED if self.must_end else end

        return row.append_until(token_ids, end_of)

    def fill_bitmasks(self, rows: Sequence[Request]) -> Bitmask:
        """See `RowKind`: all masks of a step at once, which libraries share among threads."""
        return fill_bitmasks(rows)

    def failure(self, token_ids: list[int]) -> str:
        """See `RowKind`."""
        return super().failure(token_ids) if NO_TOKEN in token_ids else _GRAMMAR_FAILED

    def accept(self, token_id: int) -> bool:
        """Moves on by a sampled token; False: it is not what the text goes on with."""
        if self.is_waiting:
            self._look_for_beginning(token_id)
            return True
        if self.is_too_slow or not self._vocabulary.tokens[token_id]:
            return False
        started = time.thread_time()
        is_accepted = self.grammar.accept_tokens([token_id])
        self._allowance_s = min(self._allowance_s + _TOKEN_S, _BURST_S)
        self.charge(time.thread_time() - started)
        return is_accepted and not self.is_too_slow

    def charge(self, seconds: float) -> None:
        """Counts what the grammar took in a step."""
        self._allowance_s -= seconds
        self._compiled.note_work(seconds)

    def suspect(self, seconds: float) -> None:
        """Counts what the grammar may have taken in a step; that alone does not end its request."""
        self.charge(min(seconds, max(self._allowance_s, 0.0)))

    @property
    def is_watched(self) -> bool:
        """Whether it has taken much lately, so that it is to be known what it takes."""
        return self._allowance_s < _WATCHED_S

    @property
    def is_too_slow(self) -> bool:
        """Whether it has taken more than it may: the request is to end."""
        return self._allowance_s < 0

    def may_end_with(self, token_id: int) -> bool:
        """Whether a token may end the text here."""
        return token_id in self._forced_ids and self.grammar.is_accepting

    @property
    def must_end(self) -> bool:
        """Whether the text is complete, and there is no token to end it with."""
        return not (self._forced_ids or self.is_waiting) and self.grammar.is_terminated

    def _look_for_beginning(self, token_id: int) -> None:
        """The constraint begins with the next token: what this one holds behind the awaited text is let pass."""
        marker = self._begin_after.encode()
        self._tail += self._vocabulary.bytes_of(token_id)
        if marker in self._tail:
            self.is_waiting, self._tail = False, b""
        else:
            self._tail = self._tail[-len(marker) :]


def _set_bits(bits: np.ndarray, token_ids: Iterable[int], value: bool) -> None:
    # a handful of ids
    for id_ in token_ids:
        bit = np.uint32(1 << id_ % 32)
        if value:
            bits[id_ // 32] |= bit
        else:
            bits[id_ // 32] &= ~bit


def fill_bitmasks(requests: Sequence[Request]) -> Bitmask:
    """Which tokens some constrained requests may get next: [G, W], bit t % 32 of word t // 32 is token t's."""
    constraints = [request.kind for request in requests if isinstance(request.kind, OutputConstraint)]
    bitmask = np.zeros((len(constraints), constraints[0].num_words), np.int32)
    by_backend: dict[GrammarBackend, list[int]] = {}
    for index, constraint in enumerate(constraints):
        if not constraint.is_waiting:
            by_backend.setdefault(constraint.backend, []).append(index)
    for backend, rows in by_backend.items():
        _fill_rows(backend, [constraints[row] for row in rows], bitmask, rows)
    # a turn per constrained row: each ends in its own way
    for index, (constraint, request) in enumerate(zip(constraints, requests, strict=True)):
        constraint.finish_bitmask(bitmask[index], request.num_tokens)
    return bitmask


def _fill_rows(
    backend: GrammarBackend, constraints: Sequence[OutputConstraint], bitmask: Bitmask, rows: Sequence[int]
) -> None:
    """Fills the rows of a backend's grammars, and charges them with it.

    Rows that are filled together share threads, so that nobody knows which one took the time. Where it was long, all
    of them are filled alone for a while, until it is known.
    """
    together = []
    for constraint, row in zip(constraints, rows, strict=True):
        if len(rows) == 1 or constraint.is_watched:
            started = time.thread_time()
            constraint.grammar.fill_bitmask(bitmask[row])
            constraint.charge(time.thread_time() - started)
        else:
            together.append((constraint, row))
    if not together:
        return
    started = time.perf_counter()
    backend.fill_bitmasks([constraint.grammar for constraint, _ in together], bitmask, [row for _, row in together])
    share_s = (time.perf_counter() - started) / len(together)
    if share_s > _LOOK_S:
        for constraint, _ in together:
            constraint.suspect(share_s)
