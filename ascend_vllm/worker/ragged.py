"""Lists of different lengths, one per slot, read many at a time without a loop over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

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
    """For each slot a list of token ids, with a number beside each.

    Lists lie one after another in an arena that is compacted when it is full, so that memory follows what is
    in use and not the longest list times the number of slots.

    Args:
        num_slots: slots 0 … num_slots-1, all empty at first.
    """

    def __init__(self, num_slots: int) -> None:
        # [num_slots] place in the arena, and length, of each slot's list
        self._start = np.zeros(num_slots, np.int64)
        self._count = np.zeros(num_slots, np.int64)
        # [capacity]; [0, _end) has been written, by lists in use or not
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
        """Gives some slots the lists of others. They share memory: a list is replaced, never changed."""
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
            padding: what fills the rest of a row.

        Returns:
            [R, longest list]; without columns if all are empty.
        """
        counts = self._count[slots]
        rows, ids, _ = self.gather(slots)
        matrix = np.full((len(slots), int(counts.max(initial=0))), padding, np.int64)
        matrix[rows, ragged_arange(np.zeros_like(counts), counts)] = ids
        return matrix

    def _compact(self, room: int) -> None:
        """Moves all lists to the front of an arena with room for one more and as much again."""
        live = np.flatnonzero(self._count)
        _, ids, values = self.gather(live)
        capacity = max(_SMALLEST_ARENA, 2 * (len(ids) + room))
        self._start[live] = np.cumsum(self._count[live]) - self._count[live]
        self._ids, self._values = np.zeros(capacity, np.int64), np.zeros(capacity, np.float32)
        self._ids[: len(ids)], self._values[: len(ids)] = ids, values
        self._end = len(ids)
