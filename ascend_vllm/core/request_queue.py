"""The scheduling policies: in which order requests are admitted and preempted."""

from __future__ import annotations

import abc
import bisect
import heapq
import itertools
from collections.abc import Iterator

from ascend_vllm.core.request import Request


class _Heap:
    """Requests ordered by a key, with removal. All operations but iteration take O(log n)."""

    def __init__(self) -> None:
        # (key, serial number, request id); the entry of a removed request stays until it is the first one
        self._heap: list[tuple[tuple[float, ...], int, str]] = []
        # request id → serial number of its entry, and the request
        self._present: dict[str, tuple[int, Request]] = {}

    def push(self, key: tuple[float, ...], serial: int, request: Request) -> None:
        self._present[request.request_id] = (serial, request)
        heapq.heappush(self._heap, (key, serial, request.request_id))

    def head(self) -> tuple[tuple[float, ...], int, str] | None:
        """The entry of the first request; None: there is none."""
        while self._heap:
            entry = self._heap[0]
            if self._is_entry(entry[1], entry[2]):
                return entry
            heapq.heappop(self._heap)
        return None

    def request(self, request_id: str) -> Request:
        return self._present[request_id][1]

    def remove(self, request_id: str) -> None:
        del self._present[request_id]

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Request]:
        order = sorted((key, serial, id_) for key, serial, id_ in self._heap if self._is_entry(serial, id_))
        return (self._present[id_][1] for _, _, id_ in order)

    def _is_entry(self, serial: int, request_id: str) -> bool:
        """Whether an entry is current: its request may have been removed, or added again with another entry."""
        present = self._present.get(request_id)
        return present is not None and present[0] == serial


class RequestQueue(abc.ABC):
    """Requests that wait for a slot, ordered by a policy. All operations but iteration take O(log n) or less.

    Further sequences of a client's request (`Request.is_further`) are in a heap of their own, so that others can be
    admitted before them.

    Attributes:
        has_ranks: a running request may be preempted for a waiting one, see `outranks`.
    """

    has_ranks = False

    def __init__(self) -> None:
        # first sequences, further ones
        self._heaps = (_Heap(), _Heap())
        self._counter = itertools.count(1)

    @abc.abstractmethod
    def _key(self, request: Request) -> tuple[float, ...]:
        """The sort key; requests with equal keys are in the order of their arrival."""

    def add(self, request: Request) -> None:
        """Adds a new request."""
        self._heaps[request.is_further].push(self._key(request), next(self._counter), request)

    def put_back(self, request: Request) -> None:
        """Adds a preempted request, before all others with the same key."""
        self._heaps[request.is_further].push(self._key(request), -next(self._counter), request)

    def next(self, *, passes_further: bool = False) -> Request | None:
        """The next request, which is not removed; None: there is none.

        Args:
            passes_further: skip further sequences.
        """
        first, further = self._heaps[0].head(), None if passes_further else self._heaps[1].head()
        if first is None or (further is not None and further < first):
            return None if further is None else self._heaps[1].request(further[2])
        return self._heaps[0].request(first[2])

    def remove(self, request: Request) -> None:
        """Removes a request from any position.

        Raises:
            KeyError: it is not in the queue.
        """
        self._heaps[request.is_further].remove(request.request_id)

    def place(self, request: Request, running: list[Request]) -> None:
        """Inserts a request into the running ones, of which the last is preempted first."""
        running.append(request)

    def outranks(self, waiting: Request, running: Request) -> bool:  # noqa: ARG002 - for policies with ranks
        """Whether a running request may be preempted for a waiting one."""
        return False

    def __len__(self) -> int:
        return len(self._heaps[0]) + len(self._heaps[1])

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self._heaps)


class FCFSQueue(RequestQueue):
    """First come, first served; preempted requests go to the front. The last one admitted is preempted first."""

    def _key(self, request: Request) -> tuple[float, ...]:  # noqa: ARG002 - only the order of arrival counts
        return ()


class PriorityQueue(RequestQueue):
    """The lowest `priority` value first, then the earliest arrival.

    The running request with the highest value, then the latest arrival, is preempted first, also for a waiting
    request with a lower value.
    """

    has_ranks = True

    def _key(self, request: Request) -> tuple[float, ...]:
        return _urgency(request)

    def place(self, request: Request, running: list[Request]) -> None:
        bisect.insort(running, request, key=_urgency)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_time


# --scheduling-policy → the queue
QUEUES: dict[str, type[RequestQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue}
