"""Constraints in the steps: token bitmasks, and how a constrained text ends."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ascend_vllm.core.request import PLAIN, Request, RequestStatus, RowKind
from ascend_vllm.core.structured.grammar import Bitmask, CompiledGrammar, GrammarBackend, last_word
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams
from ascend_vllm.types.step import NO_TOKEN, StepLogprobs

_GRAMMAR_FAILED = "structured_outputs: the grammar became too complex for its library."
# Masks are computed within steps, so each request has a budget of CPU seconds for them: at most this, refilled by so
# much with each token.
_BURST_S = 0.5
_TOKEN_S = 0.005
# below this budget a row's masks are timed individually
_TIMED_BELOW_S = 0.4
# masks of a batch that took less per row are not charged
_MIN_CHARGED_S = 0.0005


class OutputConstraint(RowKind):
    """The row kind of a constrained request: its grammar, and how its text ends.

    A complete text may end with an end-of-sequence or stop token; a text that nothing can follow must. This takes
    precedence over `ignore_eos` and `min_tokens`, since the mask would be empty otherwise.

    A request with `begin_within` only has no grammar. It is an ordinary one once its output contains `begin_after`,
    or turns out not to begin with `begin_opener`.

    Args:
        compiled: the grammar, possibly shared with other requests; None: there is none.
        backend: of the grammar.
        request: that is constrained.
        vocabulary: of the model.

    Attributes:
        grammar: matcher state of the request's text; not set without a grammar.
        backend: as given; likewise.
        is_waiting: whether the output does not contain `begin_after` yet, so that nothing is constrained but the
            tokens of `begin_after` after `begin_within` others.
        budget_s: CPU seconds that its masks may still take; below 0 its request must end.
    """

    __slots__ = (
        "_begin_after",
        "_compiled",
        "_end_ids",
        "_forced_ids",
        "_has_grammar",
        "_head",
        "_mark_ids",
        "_min_num_tokens",
        "_num_left",
        "_opener",
        "_tail",
        "_vocabulary",
        "backend",
        "budget_s",
        "grammar",
        "is_waiting",
    )

    may_run_ahead = False
    is_masked = True
    title = "A structured output"

    def __init__(
        self,
        compiled: CompiledGrammar | None,
        backend: GrammarBackend | None,
        request: Request,
        vocabulary: Vocabulary,
    ) -> None:
        self._has_grammar = False
        if compiled is not None and backend is not None:
            self.grammar = compiled.start()
            self.backend = backend
            self._compiled = compiled
            self._has_grammar = True
        self.budget_s = _BURST_S
        self._vocabulary = vocabulary
        self._end_ids = [id_ for id_ in request.end_token_ids if 0 <= id_ < vocabulary.size]
        # tokens that end a text which nothing can follow, even if the request ignores end-of-sequence tokens
        self._forced_ids = self._end_ids or vocabulary.eos_token_ids[:1]
        self._min_num_tokens = request.min_num_tokens
        params = request.sampling_params.structured_outputs or StructuredOutputsParams()
        self._begin_after = params.begin_after or ""
        self.is_waiting = bool(self._begin_after)
        # while waiting, the last bytes of the output
        self._tail = b""
        # tokens until those of `begin_after` are forced, the next of which is the last in the list; None: never
        self._num_left: int | None = None
        self._mark_ids: list[int] = []
        if params.begin_within is not None and vocabulary.encode is not None:
            ids = vocabulary.encode(self._begin_after)[::-1]
            if ids and max(ids) < vocabulary.size:
                self._num_left, self._mark_ids = params.begin_within, ids
        # until it is known whether the output begins with `begin_opener`, that and the first bytes of the output
        self._opener = params.begin_opener.encode()
        self._head = b""

    def finish_bitmask(self, row: Bitmask, num_tokens: int) -> None:
        """Adds the tokens that may end the text to the grammar's bitmask.

        Args:
            row: [W] as filled by the grammar.
            num_tokens: length of the sequence.
        """
        bits = row.view(np.uint32)
        if self._is_closing:
            row[:] = 0
            _set_bits(bits, self._mark_ids[-1:], True)
            return
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
        """Without min_tokens, which `finish_bitmask` applies: the text may have to end earlier."""
        return row.sampling_params.clone(min_tokens=0)

    def take(self, row: Request, token_ids: list[int], logprobs: StepLogprobs | None, index: int) -> int:  # noqa: ARG002
        """See `RowKind`. Advances the grammar, which may end the text where the request itself would not."""

        def end_of(token_id: int) -> RequestStatus | None:
            end = row.end_of(token_id)
            if end is RequestStatus.FINISHED_STOPPED:
                return end
            if not self.accept(token_id):
                may_end = token_id in self._forced_ids and self.grammar.is_accepting
                return row.stop(token_id) if may_end else RequestStatus.FINISHED_ERROR
            # nothing can follow the text, and the model has no token to end it
            must_end = not (self._forced_ids or self.is_waiting) and self.grammar.is_terminated
            return RequestStatus.FINISHED_STOPPED if must_end else end

        count = row.append_until(token_ids, end_of)
        if not self._has_grammar and self._num_left is None and not row.sampling_params.min_tokens:
            row.kind = PLAIN  # nothing is masked any more
        return count

    def tokens_wanted(self, row: Request, most: int) -> int:
        """See `RowKind`: drafts up to the first that cannot be sampled, or ends the text."""
        drafts = row.drafts[: most - 1]
        return 1 + sum(1 for _ in self._preview(drafts)) if drafts else 1

    def fill_bitmasks(self, rows: Sequence[tuple[Request, Sequence[int]]]) -> Bitmask:
        """See `RowKind`: the first masks of all rows at once, which libraries share among threads."""
        constrained = [
            (row.kind, row.num_tokens, drafts) for row, drafts in rows if isinstance(row.kind, OutputConstraint)
        ]
        ends = list(itertools.accumulate(1 + len(drafts) for _, _, drafts in constrained))
        bitmask = np.zeros((ends[-1], self._vocabulary.num_words), np.int32)
        by_backend: dict[GrammarBackend, list[tuple[OutputConstraint, int]]] = {}
        firsts = [end - len(drafts) - 1 for (_, _, drafts), end in zip(constrained, ends, strict=True)]
        for (constraint, _, _), first in zip(constrained, firsts, strict=True):
            if not constraint.is_waiting:
                by_backend.setdefault(constraint.backend, []).append((constraint, first))
        for backend, group in by_backend.items():
            _fill_rows(backend, group, bitmask)
        for (constraint, num_tokens, drafts), first in zip(constrained, firsts, strict=True):
            constraint.finish_bitmask(bitmask[first], num_tokens)
            for count in constraint._preview(drafts):
                place = first + count
                if not constraint.is_waiting:
                    _fill_rows(constraint.backend, [(constraint, place)], bitmask)
                constraint.finish_bitmask(bitmask[place], num_tokens + count)
        return bitmask

    def _preview(self, drafts: Sequence[int]) -> Iterator[int]:
        """Advances by drafts as long as they can be sampled and do not end the text, and goes back at the end.

        Yields:
            1, 2, … after each of them.
        """
        waiting = self.is_waiting, self._tail, self._num_left, self._mark_ids.copy(), self._opener, self._head
        num_accepted = self.grammar.num_accepted if self._has_grammar else 0
        try:
            for count, token_id in enumerate(drafts, 1):
                if token_id in self._end_ids or not 0 <= token_id < self._vocabulary.size:
                    return
                if not self.accept(token_id, is_draft=True):
                    return
                yield count
        finally:
            self.is_waiting, self._tail, self._num_left, self._mark_ids, self._opener, self._head = waiting
            if self._has_grammar:
                self.grammar.rollback(self.grammar.num_accepted - num_accepted)

    def failure(self, token_ids: list[int]) -> str:
        return super().failure(token_ids) if NO_TOKEN in token_ids else _GRAMMAR_FAILED

    def accept(self, token_id: int, *, is_draft: bool = False) -> bool:
        """Advances by a sampled token, or by a draft; False if the grammar does not allow it as a continuation."""
        if self.is_waiting:
            self._wait(token_id)
            return True
        if self.budget_s < 0 or not self._vocabulary.tokens[token_id]:
            return False
        started = time.thread_time()
        is_accepted = self.grammar.accept_tokens([token_id])
        if not is_draft:
            self.budget_s = min(self.budget_s + _TOKEN_S, _BURST_S)
        self.charge(time.thread_time() - started)
        return is_accepted and self.budget_s >= 0

    def _wait(self, token_id: int) -> None:
        """Looks for `begin_after` in the output; the constraint starts at the token behind it."""
        marker = self._begin_after.encode()
        text = self._vocabulary.bytes_of(token_id)
        self._tail += text
        is_closing = self._is_closing
        if is_closing:
            self._mark_ids.pop()
        if marker in self._tail or (is_closing and not self._mark_ids):
            self.is_waiting = not self._has_grammar
            self._num_left = None
        elif self._opener:
            self._check_opener(text)
        if self._num_left:
            self._num_left -= 1
        self._tail = self._tail[-len(marker) :] if self.is_waiting else b""

    @property
    def _is_closing(self) -> bool:
        """Whether the next token is one of `begin_after`, since `begin_within` is reached."""
        return self._num_left == 0 and not self._opener

    def _check_opener(self, text: bytes) -> None:
        """Drops the limit once the output turns out not to begin with `begin_opener`."""
        self._head = (self._head + text).lstrip()
        if self._head.startswith(self._opener):
            self._opener = b""
        elif not self._opener.startswith(self._head):
            self._num_left = None

    def charge(self, seconds: float) -> None:
        """Deducts time that the grammar took in a step from its budget."""
        self.budget_s -= seconds
        self._compiled.add_mask_time(seconds)


def _set_bits(bits: np.ndarray, token_ids: Iterable[int], value: bool) -> None:
    for id_ in token_ids:
        bit = np.uint32(1 << id_ % 32)
        if value:
            bits[id_ // 32] |= bit
        else:
            bits[id_ // 32] &= ~bit


def _fill_rows(backend: GrammarBackend, group: Sequence[tuple[OutputConstraint, int]], bitmask: Bitmask) -> None:
    """Fills the rows, [G, W], of a backend's grammars, given with the index of each, and charges the time to them.

    Rows are filled as a batch by several threads, which does not show how long each one took. A batch that took long
    is charged to its rows in equal shares, until their budgets are so low that they are timed individually.
    """
    batch = []
    for constraint, row in group:
        if len(group) == 1 or constraint.budget_s < _TIMED_BELOW_S:
            started = time.thread_time()
            constraint.grammar.fill_bitmask(bitmask[row])
            constraint.charge(time.thread_time() - started)
        else:
            batch.append((constraint, row))
    if not batch:
        return
    started = time.perf_counter()
    backend.fill_bitmasks([constraint.grammar for constraint, _ in batch], bitmask, [row for _, row in batch])
    share_s = (time.perf_counter() - started) / len(batch)
    if share_s > _MIN_CHARGED_S:
        for constraint, _ in batch:
            # no more than is left: other rows may have taken it
            constraint.charge(min(share_s, max(constraint.budget_s, 0.0)))
