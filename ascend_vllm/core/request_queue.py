"""The order in which requests wait, run and make room: the scheduling policies."""

from __future__ import annotations

import abc
import bisect
import heapq
import itertools
from collections.abc import Iterator

from ascend_vllm.core.request import Request


class _Line:
    """Requests in the order of a key; one may leave from anywhere. All operations but iteration take O(log n)."""

    def __init__(self) -> None:
        # (key, serial number, request id); the entry of a request that has left stays until it comes to the front
        self._heap: list[tuple[tuple[float, ...], int, str]] = []
        # request id → serial number of its entry, and the request
        self._present: dict[str, tuple[int, Request]] = {}

    def push(self, key: tuple[float, ...], serial: int, request: Request) -> None:
        self._present[request.request_id] = (serial, request)
        heapq.heappush(self._heap, (key, serial, request.request_id))

    def head(self) -> tuple[tuple[float, ...], int, str] | None:
        """The entry of the first request; None: the line is empty."""
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
        """Whether a request with this entry is still there; it may have left and come again with another."""
        present = self._present.get(request_id)
        return present is not None and present[0] == serial


class RequestQueue(abc.ABC):
    """Requests that wait for a slot, ordered by a policy. All operations but iteration take O(log n) or less.

    Further sequences of a caller's request (`Request.is_further`) stand in a line of their own, so that the others
    can be let in past them.
    """

    def __init__(self) -> None:
        # of first sequences, of further ones
        self._lines = (_Line(), _Line())
        self._counter = itertools.count(1)

    @abc.abstractmethod
    def _key(self, request: Request) -> tuple[float, ...]:
        """What orders requests, before the order of their coming does."""

    def add(self, request: Request) -> None:
        """Takes a request that has just arrived."""
        self._lines[request.is_further].push(self._key(request), next(self._counter), request)

    def put_back(self, request: Request) -> None:
        """Takes a preempted request: ahead of all that the policy does not place before it."""
        self._lines[request.is_further].push(self._key(request), -next(self._counter), request)

    def next(self, *, passes_further: bool = False) -> Request | None:
        """The next request, which stays; None: none waits.

        Args:
            passes_further: further sequences of requests are passed over.
        """
        first, further = self._lines[0].head(), None if passes_further else self._lines[1].head()
        if first is None or (further is not None and further < first):
            return None if further is None else self._lines[1].request(further[2])
        return self._lines[0].request(first[2])

    def peek(self) -> Request:
        """The next request, which stays.

        Raises:
            IndexError: none waits.
        """
        request = self.next()
        if request is None:
            raise IndexError("no request waits")
        return request

    def pop(self) -> Request:
        """The next request, which leaves.

        Raises:
            IndexError: none waits.
        """
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands.

        Raises:
            KeyError: it does not wait.
        """
        self._lines[request.is_further].remove(request.request_id)

    def place(self, request: Request, running: list[Request]) -> None:
        """Puts a request among the running ones, of which the last is the first to be preempted."""
        running.append(request)

    def outranks(self, waiting: Request, running: Request) -> bool:  # noqa: ARG002 - nobody does
        """Whether a waiting request may make a running one give up its place."""
        return False

    def __len__(self) -> int:
        return len(self._lines[0]) + len(self._lines[1])

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain(*self._lines)


class FCFSQueue(RequestQueue):
    """First come, first served; preempted requests go to the front. The last that was admitted is preempted first."""

    def _key(self, request: Request) -> tuple[float, ...]:  # noqa: ARG002 - their coming alone counts
        return ()


class PriorityQueue(RequestQueue):
    """The lowest `priority` value first, then the earliest arrival.

    Among the running the highest value, then the latest arrival, is preempted first; also to let in a waiting
    request of a lower value.
    """

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
