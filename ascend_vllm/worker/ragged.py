"""Lists of different lengths, one per slot, read without a Python loop over the slots."""

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
