"""The running rows and their slots.

A row is a request, or one of a request's several rows (see `RowKind`). Changes of slots are collected here and sent
to the workers with the next step.
"""

from __future__ import annotations

from ascend_vllm.core.request import NO_SLOT, Request, RowKind
from ascend_vllm.core.request_queue import RequestQueue
from ascend_vllm.types.step import SchedulerOutput

# one request leaves at least 1 / this of the slots to others
_KEPT_PART = 8
# More rows make everybody's steps longer: one request gets at most this many slots, or 1 / _MOST_PART of them if that
# is more.
_MANY_ROWS = 64
_MOST_PART = 4


class Rows:
    """Rows in slots 0 … num_slots-1.

    Args:
        num_slots: most rows that can run.
        queue: its policy orders the running rows.
        num_stages: pipeline stages, which compute different rows at the same time.

    Attributes:
        num_slots: as given.
        num_stages: as given.
        running: all rows; the last is the first to be preempted.
        by_slot: the same rows.
        free_slots: a stack.
        num_reserved: free slots reserved for further rows of running requests.
        max_further: most slots for further sequences of clients' requests (`Request.is_further`), so that a request
            with many sequences leaves slots to others.
    """

    def __init__(self, num_slots: int, queue: RequestQueue, num_stages: int = 1) -> None:
        self._queue = queue
        self.num_slots = num_slots
        self.num_stages = num_stages
        self.running: list[Request] = []
        self.by_slot: dict[int, Request] = {}
        # slot 0 is on top at first
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.num_reserved = 0
        # without the slot of the first sequence
        kept = max(1, num_slots // _KEPT_PART)
        self.max_further = max(1, min(num_slots - kept, max(_MANY_ROWS, num_slots // _MOST_PART)) - 1)
        self._num_further = 0
        # slots freed since the last step was handed out
        self._freed: list[int] = []
        # slot → (source slot, token), for the next step
        self.forks: dict[int, tuple[int, int]] = {}
        # (slot, token), for the next step
        self._sampled: list[tuple[int, int]] = []

    @property
    def max_decoding(self) -> int:
        """Most rows that should decode in a step: with pipeline stages 1/num_stages, so that each has some."""
        if self.num_stages == 1:
            return self.num_slots
        num_decoding = sum(row.num_missing_tokens <= 1 for row in self.running)
        return -(-num_decoding // self.num_stages)

    @property
    def num_available(self) -> int:
        """Free slots that are not reserved."""
        return len(self.free_slots) - self.num_reserved

    @property
    def passes_further(self) -> bool:
        """Whether further sequences have reached `max_further`."""
        return self._num_further >= self.max_further

    def enter(self, row: Request) -> None:
        """Gives a row a slot and adds it to the running ones."""
        self._take_slot(row)
        self._queue.place(row, self.running)

    def reserve(self, kind: RowKind, count: int) -> None:
        """Sets the number of free slots reserved for further rows of a request of this kind."""
        if count != kind.num_reserved_slots:
            self.num_reserved += count - kind.num_reserved_slots
            kind.num_reserved_slots = count

    def fork(self, row: Request, parent: Request) -> None:
        """Gives a new row one of its request's reserved slots, into which the workers copy its parent's row.

        It is placed next to its parent, so that the rows of a request are preempted together.
        """
        self._take_slot(row)
        self.running.insert(self.running.index(parent) + 1, row)
        self.forks[row.slot] = (parent.slot, row.token_ids[-1])

    def extend(self, row: Request) -> None:
        """Sends the workers a row's newest token, which may differ from what they sampled."""
        self.forks[row.slot] = (row.slot, row.token_ids[-1])

    def send_sampled(self, row: Request, token_ids: list[int]) -> None:
        """Sends a row's sampled tokens to the pipeline stages that do not sample."""
        self._sampled += [(row.slot, token_id) for token_id in token_ids]

    def leave(self, row: Request) -> None:
        """Removes a row from its slot and from the running ones."""
        self.running.remove(row)
        self.vacate(row)

    def vacate(self, row: Request) -> None:
        """Frees a row's slot, if it has one; the caller changes `running`."""
        if row.slot == NO_SLOT:
            return
        del self.by_slot[row.slot]
        self._num_further -= row.is_further
        source, _ = self.forks.pop(row.slot, (row.slot, 0))
        self.free_slots.append(row.slot)
        # the workers do not know a fork that has not been sent yet
        if source == row.slot:
            self._freed.append(row.slot)
        row.slot = NO_SLOT

    def drop_finished(self) -> None:
        """Removes finished rows from the running ones."""
        self.running = [row for row in self.running if not row.is_finished]

    def add_updates(self, step: SchedulerOutput) -> None:
        """Adds what has changed since the last step to this one."""
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
    """All rows of a request, which is given itself or by one of its rows."""
    return row.kind.rows_of(row)
