"""Drafts by n-grams: the tokens behind an earlier occurrence of a row's last ones.

Of the n-grams that a text ends with, the longest one that occurs before counts, within limits, and of its occurrences
the first; that is vLLM's rule. A row has a hash table for each length, with the first occurrence of each n-gram, so
that a step takes time for its new tokens only, however long the text is.

Letters: M slots, L maximum tokens of a sequence, R rows of a step, k drafts of a row.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_vllm.ops.native import LIBRARY_PATH, load_native_library
from ascend_vllm.types.step import NO_DRAFT

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# tokens that a row's first tables have room for
_MIN_TOKENS = 256


class _Arguments(ctypes.Structure):
    """The struct of csrc_ascend/cpu/bind/ngrams.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("row_tokens", "shortest", "longest", "pads")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "num_tokens", "tables", "capacities", "num_indexed")),
    )


class NgramTables:
    """The hash tables of all slots, and what they find.

    Args:
        token_ids: [M, L+1] int32, of all slots; it must stay where it is, like `num_tokens`.
        num_tokens: [M] int64, of each slot.
        shortest: fewest last tokens that are looked up, 1 or more.
        longest: most of them, not below.
        pads: drafts that reach the end of the text are filled up with its last token.

    Example::

        tables.clear(slot)
        drafts = tables.drafts(np.array([slot]), 4)
    """

    def __init__(
        self, token_ids: Int32Array, num_tokens: Int64Array, shortest: int, longest: int, *, pads: bool
    ) -> None:
        self._token_ids, self._num_tokens = token_ids, num_tokens
        self._shortest, self._longest, self._pads = shortest, longest, pads
        num_slots = len(token_ids)
        # slot → its tables
        self._tables: list[Int32Array | None] = [None] * num_slots
        # [M] int64 each: address of a slot's tables, entries of each, tokens that are in them
        self._addresses, self._capacities, self._num_indexed = np.zeros((3, num_slots), np.int64)
        self._call: Any = None
        if load_native_library():
            # releases no GIL, unlike CDLL
            self._call = ctypes.PyDLL(str(LIBRARY_PATH)).ascend_vllm_ngram_drafts
            self._call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
            self._call.restype = ctypes.c_int64
        columns = (token_ids, num_tokens, self._addresses, self._capacities, self._num_indexed)
        sizes = (token_ids.shape[1], shortest, longest, pads)
        self._arguments = _Arguments(*sizes, *(column.ctypes.data for column in columns))

    def clear(self, slot: int) -> None:
        """Forgets the tokens of a slot, which has got another row."""
        self._tables[slot] = None
        self._addresses[slot] = self._capacities[slot] = self._num_indexed[slot] = 0

    def drafts(self, slots: Int64Array, count: int) -> Int32Array | None:
        """Drafts of the tokens behind the last ones of some rows.

        Args:
            slots: [R].
            count: k, 1 or more.

        Returns:
            [R, k], filled up with NO_DRAFT; None: there are none.
        """
        drafts = np.full((len(slots), count), NO_DRAFT, np.int32)
        if self._call is None:
            for row, slot in enumerate(slots.tolist()):
                found = drafts_of(
                    self._token_ids[slot, : self._num_tokens[slot]],
                    count,
                    self._shortest,
                    self._longest,
                    pads=self._pads,
                )
                drafts[row, : len(found)] = found
            return drafts if (drafts != NO_DRAFT).any() else None
        # at most half of the entries are used
        for slot in slots[2 * self._num_tokens[slots] > self._capacities[slots]].tolist():
            self._enlarge(slot)
        slots = np.ascontiguousarray(slots)
        found = self._call(
            ctypes.addressof(self._arguments), slots.ctypes.data, len(slots), drafts.ctypes.data, count
        )
        return drafts if found else None

    def _enlarge(self, slot: int) -> None:
        """Gives a slot empty tables with room for twice its tokens; the next call fills them."""
        num_tokens = max(2 * int(self._num_tokens[slot]), _MIN_TOKENS)
        capacity = 1 << (2 * num_tokens - 1).bit_length()
        # the pages are allocated when they are written
        tables = np.zeros((self._longest - self._shortest + 1, capacity), np.int32)
        self._tables[slot] = tables
        self._addresses[slot], self._capacities[slot], self._num_indexed[slot] = tables.ctypes.data, capacity, 0


def drafts_of(token_ids: Int32Array, count: int, shortest: int, longest: int, *, pads: bool) -> list[int]:
    """The definition of `NgramTables.drafts` for one text, whose time is proportional to its length.

    Args:
        token_ids: [n], prompt and output.
        count: most drafts.
        shortest: see `NgramTables`.
        longest: see there.
        pads: see there.

    Example:
        >>> drafts_of(np.array([1, 2, 3, 4, 1, 2], np.int32), 3, 1, 2, pads=False)
        [3, 4, 1]
    """
    end = len(token_ids)
    for length in range(min(longest, end - 1), shortest - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(token_ids[:-1], length)
        matches = np.flatnonzero((windows == token_ids[-length:]).all(axis=1))
        if len(matches):
            first = int(matches[0]) + length
            found: list[int] = token_ids[first : first + count].tolist()
            return found + [int(token_ids[-1])] * (count - len(found)) if pads else found
    return []
