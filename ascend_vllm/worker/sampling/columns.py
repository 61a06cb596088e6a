"""Sampling parameters of all slots as columns, so that a step reads its rows' parameters by indexing.

`RaggedTable` is a column of lists of different lengths, which steps read without a Python loop over the slots.
Letters: M slots, V vocabulary, R rows of a step.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.sampling_params import SAMPLING_EPS
from ascend_vllm.types.step import NewRow

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

# Features that a row needs beyond the arg-max of its logits, as bits. The union over a step's rows decides which
# parts of the sampler run. Plain integers, since they are combined with numpy columns in every step.
RANDOM = 1
PENALTIES = 2
LOGIT_BIAS = 4
ALLOWED_IDS = 8
MIN_TOKENS = 16
LOGPROBS = 32
BAD_WORDS = 64
# of a step, not of a row: the step has a mask for the row's next token
CONSTRAINED = 128
PROCESSORS = 256
# features that may forbid all tokens of a row
MASKS = ALLOWED_IDS | MIN_TOKENS | BAD_WORDS | CONSTRAINED

NO_LOGPROBS = -1

# fields of SamplingParams that columns keep as they are
_NUMBERS = (
    *("temperature", "top_k", "top_p", "min_p", "min_tokens"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty"),
)

_SMALLEST_ARENA = 1024


def ragged_arange(starts: npt.NDArray[np.integer[Any]], counts: Int64Array) -> Int64Array:
    """Consecutive integers from each start, one run after another.

    Args:
        starts: [R] first integer of each run.
        counts: [R] length of each run, 0 or more.

    Returns:
        [sum(counts)].

    Example::

        ragged_arange(np.array([3, 10]), np.array([2, 3]))      # [3, 4, 10, 11, 12]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)


class RaggedTable:
    """A list of token ids for each slot, with a value for each id.

    Lists are stored one after another in an arena that is compacted when it is full. So its size depends on the
    lists in use, not on the longest list times the number of slots.

    Args:
        num_slots: number of slots, whose lists are empty at first.
    """

    def __init__(self, num_slots: int) -> None:
        # [num_slots] start in the arena, and length, of each slot's list
        self._start = np.zeros(num_slots, np.int64)
        self._count = np.zeros(num_slots, np.int64)
        # [capacity]; [0, _end) is taken by lists, which may no longer be in use
        self._ids = np.zeros(_SMALLEST_ARENA, np.int64)
        self._values = np.zeros(_SMALLEST_ARENA, np.float32)
        self._end = 0

    def set(self, slot: int, ids: npt.ArrayLike, values: npt.ArrayLike | None = None) -> None:
        """Replaces a slot's list; an empty one frees its memory. Without values they are 0."""
        self._count[slot] = 0
        ids = np.asarray(ids, np.int64)
        if len(ids) == 0:
            return
        if self._end + len(ids) > len(self._ids):
            self._compact(room=len(ids))
        span = slice(self._end, self._end + len(ids))
        self._ids[span] = ids
        self._values[span] = 0.0 if values is None else values
        self._start[slot], self._count[slot] = self._end, len(ids)
        self._end = span.stop

    def copy(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copies lists to other slots. The copies share memory, since lists are replaced, never modified."""
        self._start[targets] = self._start[sources]
        self._count[targets] = self._count[sources]

    def gather(self, slots: Int64Array) -> tuple[Int64Array, Int64Array, Float32Array]:
        """All entries of some slots' lists, in order.

        Args:
            slots: [R].

        Returns:
            index into `slots`, token id and value of each entry: three arrays of one length.
        """
        counts = self._count[slots]
        places = ragged_arange(self._start[slots], counts)
        return np.repeat(np.arange(len(slots)), counts), self._ids[places], self._values[places]

    def padded(self, slots: Int64Array, padding: int) -> Int64Array:
        """The ids of some slots' lists as the rows of a matrix.

        Args:
            slots: [R].
            padding: id at the end of shorter rows.

        Returns:
            [R, longest list]; without columns if all are empty.
        """
        counts = self._count[slots]
        rows, ids, _ = self.gather(slots)
        matrix = np.full((len(slots), int(counts.max(initial=0))), padding, np.int64)
        matrix[rows, ragged_arange(np.zeros_like(counts), counts)] = ids
        return matrix

    def _compact(self, room: int) -> None:
        """Moves all lists in use to the front of a new arena with at least `room` free entries."""
        live = np.flatnonzero(self._count)
        _, ids, values = self.gather(live)
        capacity = max(_SMALLEST_ARENA, 2 * (len(ids) + room))
        self._start[live] = np.cumsum(self._count[live]) - self._count[live]
        self._ids, self._values = np.zeros(capacity, np.int64), np.zeros(capacity, np.float32)
        self._ids[: len(ids)], self._values[: len(ids)] = ids, values
        self._end = len(ids)


@dataclasses.dataclass(frozen=True, slots=True)
class BadWordTable:
    """Sequences that a row's output must not contain, concatenated, so that short ones need no padding.

    Letters: E sequences, P tokens of all of them without the last one of each.
    """

    # [P] int64: the tokens before the last ones
    prefixes: Int64Array
    # [P] int64: distance of each of them from the last token of its sequence
    distances: Int64Array
    # [E] int64: number of them in each sequence
    counts: Int64Array
    # [E] int64: the last tokens
    last: Int64Array

    @classmethod
    def of(cls, words: Sequence[Sequence[int]]) -> BadWordTable:
        """From lists of ids, none of them empty."""
        counts = np.array([len(word) - 1 for word in words], np.int64)
        before = itertools.chain.from_iterable(word[:-1] for word in words)
        return cls(
            np.fromiter(before, np.int64, int(counts.sum())),
            np.repeat(counts, counts) - ragged_arange(np.zeros_like(counts), counts),
            counts,
            np.array([word[-1] for word in words], np.int64),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A function of the user that modifies a row's logits."""

    function: Callable[..., torch.Tensor]
    # it takes the prompt's ids, too
    takes_prompt: bool

    @classmethod
    def of(cls, function: Callable[..., torch.Tensor]) -> LogitsProcessor:
        """From the function in a request."""
        return cls(function, len(inspect.signature(function).parameters) == 3)

    def __call__(self, prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Calls the function with a row's logits, [V]; returns the new ones."""
        if self.takes_prompt:
            return self.function(prompt_ids, output_ids, logits)
        return self.function(output_ids, logits)


class SamplingColumns:
    """Sampling parameters by slot, on the host.

    Args:
        num_slots: M.
        vocab_size: ids outside the vocabulary are left out of the tables: they cannot be sampled anyway.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # counts changes, so that what was made of the columns can be kept until the next one
        self.version = 0
        # [M] int32, host: the bits above
        self.features = np.zeros(num_slots, np.int32)
        # [M] float32, host: 0 is greedy
        self.temperature = np.zeros(num_slots, np.float32)
        # [M] int32, host: 0 or less is off
        self.top_k = np.zeros(num_slots, np.int32)
        # [M] float32, host: 1 is off
        self.top_p = np.ones(num_slots, np.float32)
        # [M] float32, host: 0 is off
        self.min_p = np.zeros(num_slots, np.float32)
        # [M] float32, host: 1 is off
        self.repetition_penalty = np.ones(num_slots, np.float32)
        # [M] float32, host: 0 is off
        self.frequency_penalty = np.zeros(num_slots, np.float32)
        # [M] float32, host: 0 is off
        self.presence_penalty = np.zeros(num_slots, np.float32)
        # [M] int64, host: key of the row's random stream
        self.seed = np.zeros(num_slots, np.int64)
        # [M] int32, host: minimum tokens that the row generates
        self.min_tokens = np.zeros(num_slots, np.int32)
        # [M] int32, host: most likely tokens to report beside the sampled one; NO_LOGPROBS: report nothing
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, np.int32)
        # ids that end the row, forbidden below min_tokens; ids and the values to add to their logits
        self.stop_ids = RaggedTable(num_slots)
        self.logit_bias = RaggedTable(num_slots)
        # [M, ceil(V / 32)] int32, host: allowed ids of rows that have a list; bit t % 32 of word t // 32 is that of
        # token t. A slot takes memory when it first has a list.
        self.allowed_ids = np.zeros((num_slots, -(-vocab_size // 32)), np.int32)
        # slot → sequences of ids that the output must not contain
        self.bad_words: dict[int, BadWordTable] = {}
        self._last_words: tuple[list[list[int]], BadWordTable] | None = None
        # slot → logits processors
        self.processors: dict[int, list[LogitsProcessor]] = {}
        self._tables = (self.stop_ids, self.logit_bias)
        # [M]: a number that no other row has had
        self.entered = np.zeros(num_slots, np.int64)
        # all of the above with a number for each slot
        self._columns = [
            column for column in vars(self).values() if isinstance(column, np.ndarray) and column.ndim == 1
        ]

    def set(self, row: NewRow) -> None:
        """Stores the parameters of a new row."""
        slot, params = row.slot, row.sampling_params
        self.version += 1
        self.entered[slot] = self.version
        for name in _NUMBERS:
            getattr(self, name)[slot] = getattr(params, name)
        self.seed[slot] = row.seed
        self.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        stop_ids = self._known(row.stop_token_ids)
        self.stop_ids.set(slot, stop_ids)
        bias = params.logit_bias or {}
        ids, values = np.fromiter(bias, np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))
        known = (ids >= 0) & (ids < self.vocab_size)
        self.logit_bias.set(slot, ids[known], values[known])
        if params.allowed_token_ids is not None:
            self.allowed_ids[slot] = self._mask(params.allowed_token_ids)
        self.processors.pop(slot, None)
        if params.logits_processors:
            self.processors[slot] = [LogitsProcessor.of(function) for function in params.logits_processors]
        self.bad_words.pop(slot, None)
        if row.bad_words:
            self.bad_words[slot] = self._bad_word_table(row.bad_words)
        self.features[slot] = self._features_of(row, has_bias=bool(known.any()), has_stop_ids=len(stop_ids) > 0)

    def clear(self, slot: int) -> None:
        """Removes the row of a slot."""
        self.version += 1
        self.features[slot] = 0
        self.bad_words.pop(slot, None)
        self.processors.pop(slot, None)
        for table in self._tables:
            table.set(slot, ())

    def copy(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copies parameters to other slots; all are read before one is written."""
        self.version += 1
        if (self.features[sources] & ALLOWED_IDS).any():
            self.allowed_ids[targets] = self.allowed_ids[sources]
        for column in self._columns:
            column[targets] = column[sources]
        self.entered[targets] = self.version
        for table in self._tables:
            table.copy(sources, targets)
        if self.bad_words:
            # rare: only rows of beam searches are copied, and those have none
            pairs = zip(targets.tolist(), sources.tolist(), strict=True)
            found = {target: self.bad_words.get(source) for target, source in pairs}
            for target, words in found.items():
                self.bad_words.pop(target, None)
                if words is not None:
                    self.bad_words[target] = words

    def _bad_word_table(self, words: list[list[int]]) -> BadWordTable:
        """The table of bad words; rows of the same request, which are added one after another, share it."""
        if self._last_words is None or self._last_words[0] != words:
            self._last_words = (words, BadWordTable.of(words))
        return self._last_words[1]

    def _known(self, token_ids: Iterable[int]) -> Int64Array:
        ids = np.fromiter(token_ids, np.int64)
        return ids[(ids >= 0) & (ids < self.vocab_size)]

    def _mask(self, token_ids: Iterable[int]) -> npt.NDArray[np.int32]:
        """[ceil(V / 32)] with the bits of some ids."""
        bits = np.zeros(32 * self.allowed_ids.shape[1], np.bool_)
        bits[self._known(token_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _features_of(self, row: NewRow, *, has_bias: bool, has_stop_ids: bool) -> int:
        params = row.sampling_params
        penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        return (
            (RANDOM if params.temperature >= SAMPLING_EPS else 0)
            | (PENALTIES if penalised else 0)
            | (LOGIT_BIAS if has_bias else 0)
            | (ALLOWED_IDS if params.allowed_token_ids is not None else 0)
            | (MIN_TOKENS if has_stop_ids and params.min_tokens > 0 else 0)
            | (LOGPROBS if params.logprobs is not None else 0)
            | (BAD_WORDS if row.bad_words else 0)
            | (PROCESSORS if params.logits_processors else 0)
        )
