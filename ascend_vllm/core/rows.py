"""The rows that run, and the slots they are in.

A row is a request, or one of several of it (see `RowKind`). What the workers must be told of slots is gathered here
until the next step is handed out.
"""

from __future__ import annotations

from ascend_vllm.core.request import NO_SLOT, Request, RowKind
from ascend_vllm.core.request_queue import RequestQueue
from ascend_vllm.types.step import SchedulerOutput

# what part of the slots a single request leaves to others
_KEPT_PART = 8
# Everybody's steps last longer the more rows there are: a single request runs at most so many, or this part of the
# slots, whichever is more.
_MANY_ROWS = 64
_MOST_PART = 4


class Rows:
    """Rows in slots 0 … num_slots-1.

    Args:
        num_slots: most rows that can run.
        queue: its policy orders the running rows.
        num_stages: pipeline stages, which are to work on different rows at the same time.

    Attributes:
        num_slots: as given.
        num_stages: as given.
        running: all rows; the last is the first to be preempted.
        by_slot: the same rows.
        free_slots: a stack.
        num_reserved: of the free slots, those that requests of several rows will come to need.
        max_further: most slots for further sequences of requests, so that one request with many of them leaves some
            to others.
    """

    def __init__(self, num_slots: int, queue: RequestQueue, num_stages: int = 1) -> None:
        self._queue = queue
        self.num_slots = num_slots
        self.num_stages = num_stages
        self.running: list[Request] = []
        self.by_slot: dict[int, Request] = {}
        # slot 0 lies on top at first
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.num_reserved = 0
        # beside the first sequence of their request
        kept = max(1, num_slots // _KEPT_PART)
        self.max_further = max(1, min(num_slots - kept, max(_MANY_ROWS, num_slots // _MOST_PART)) - 1)
        self._num_further = 0
        # freed since the last step that was handed out
        self._freed: list[int] = []
        # slot → (source slot, token), for the next step
        self.forks: dict[int, tuple[int, int]] = {}
        # (slot, token), for the next step
        self._sampled: list[tuple[int, int]] = []

    @property
    def max_decoding(self) -> int:
        """Most rows that should decode in a step: with stages a part of them, so that each stage has some."""
        if self.num_stages == 1:
            return self.num_slots
        num_decoding = sum(row.num_missing_tokens <= 1 for row in self.running)
        return -(-num_decoding // self.num_stages)

    @property
    def num_available(self) -> int:
        """Slots that a new row may take."""
        return len(self.free_slots) - self.num_reserved

    @property
    def passes_further(self) -> bool:
        """Whether further sequences of requests have all the slots that they may have."""
        return self._num_further >= self.max_further

    def enter(self, row: Request) -> None:
        """Gives a row a slot, and its place among the running ones."""
        self._take_slot(row)
        self._queue.place(row, self.running)

    def reserve(self, kind: RowKind, count: int) -> None:
        """Keeps so many free slots, and no more, for further rows of a request of this kind."""
        if count != kind.num_reserved_slots:
            self.num_reserved += count - kind.num_reserved_slots
            kind.num_reserved_slots = count

    def fork(self, row: Request, parent: Request) -> None:
        """Gives a new row one of its request's slots; the workers are to copy its parent's row.

        It runs beside its parent, so that the rows of a request are preempted together.
        """
        self._take_slot(row)
        self.running.insert(self.running.index(parent) + 1, row)
        self.forks[row.slot] = (parent.slot, row.token_ids[-1])

    def extend(self, row: Request) -> None:
        """Tells the workers of a row's next token, which need not be what they sampled."""
        self.forks[row.slot] = (row.slot, row.token_ids[-1])

    def go_on(self, row: Request, token_ids: list[int]) -> None:
        """Tells stages that do not sample what a row, which goes on, has got."""
        self._sampled += [(row.slot, token_id) for token_id in token_ids]

    def leave(self, row: Request) -> None:
        """Takes a row out of its slot and out of the running ones."""
        self.running.remove(row)
        self.vacate(row)

    def vacate(self, row: Request) -> None:
        """Takes a row's slot back, if it has one; `running` is the caller's to change."""
        if row.slot == NO_SLOT:
            return
        del self.by_slot[row.slot]
        self._num_further -= row.is_further
        source, _ = self.forks.pop(row.slot, (row.slot, 0))
        self.free_slots.append(row.slot)
        # the workers have not been told of a fork that was still to come
        if source == row.slot:
            self._freed.append(row.slot)
        row.slot = NO_SLOT

    def drop_finished(self) -> None:
        """Takes rows that have ended out of the running ones."""
        self.running = [row for row in self.running if not row.is_finished]

    def tell(self, step: SchedulerOutput) -> None:
        """Puts what has changed since the last step into this one."""
        step.freed_slots, self._freed = self._freed, []
        step.sampled, self._sampled = self._sampled, []
        if self.forks:
            step.forks = [(slot, source, token_id) for slot, (source, token_id) in self.forks.items()]
            self.forks.clear()

    def _take_slot(self, row: Request) -> None:
        row.slot = self.free_slots.pop()
        self.by_slot[row.slot] = row
        self._num_further += row.is_further


def rows_of(row: Request) -> list[Request]:
    """All rows of the request that a row belongs to, or that is given by itself."""
    return row.kind.rows_of(row)
