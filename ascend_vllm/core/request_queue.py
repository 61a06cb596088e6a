"""The order in which requests wait, run and make room: the scheduling policies."""

from __future__ import annotations

import abc
import bisect
import collections
import heapq
import itertools
from collections.abc import Iterator

from ascend_vllm.core.request import Request


class RequestQueue(abc.ABC):
    """Requests that wait for a slot, ordered by a policy. All operations but iteration take O(log n) or less."""

    @abc.abstractmethod
    def add(self, request: Request) -> None:
        """Takes a request that has just arrived."""

    @abc.abstractmethod
    def put_back(self, request: Request) -> None:
        """Takes a preempted request: ahead of all that the policy does not place before it."""

    @abc.abstractmethod
    def peek(self) -> Request:
        """The next request, which stays.

        Raises:
            IndexError: none waits.
        """

    @abc.abstractmethod
    def pop(self) -> Request:
        """The next request, which leaves.

        Raises:
            IndexError: none waits.
        """

    @abc.abstractmethod
    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it stands.

        Raises:
            KeyError: it does not wait.
        """

    def place(self, request: Request, running: list[Request]) -> None:
        """Puts a request among the running ones, of which the last is the first to be preempted."""
        running.append(request)

    def outranks(self, waiting: Request, running: Request) -> bool:  # noqa: ARG002 - nobody does
        """Whether a waiting request may make a running one give up its place."""
        return False

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue(RequestQueue):
    """First come, first served; preempted requests go to the front. The last that was admitted is preempted first."""

    def __init__(self) -> None:
        # ordered, so that leaving from the middle takes no search
        self._requests: collections.OrderedDict[str, Request] = collections.OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        for request in self._requests.values():
            return request
        raise IndexError("no request waits")

    def pop(self) -> Request:
        request = self.peek()
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue(RequestQueue):
    """The lowest `priority` value first, then the earliest arrival.

    Among the running the highest value, then the latest arrival, is preempted first; also to let in a waiting
    request of a lower value.
    """

    def __init__(self) -> None:
        # (priority, arrival, serial number, request); an entry whose request left from the middle stays until it
        # comes to the front
        self._heap: list[tuple[int, float, int, Request]] = []
        # request id → serial number of its entry
        self._serials: dict[str, int] = {}
        self._counter = itertools.count(1)

    def add(self, request: Request) -> None:
        self._push(request, next(self._counter))

    def put_back(self, request: Request) -> None:
        # before all of the same priority and arrival
        self._push(request, -next(self._counter))

    def _push(self, request: Request, serial: int) -> None:
        self._serials[request.request_id] = serial
        heapq.heappush(self._heap, (request.priority, request.arrival_time, serial, request))

    def peek(self) -> Request:
        while self._heap:
            _, _, serial, request = self._heap[0]
            if self._serials.get(request.request_id) == serial:
                return request
            heapq.heappop(self._heap)
        raise IndexError("no request waits")

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._serials[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._serials[request.request_id]

    def place(self, request: Request, running: list[Request]) -> None:
        bisect.insort(running, request, key=_urgency)

    def outranks(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority

    def __len__(self) -> int:
        return len(self._serials)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, serial, request in self._heap if self._serials.get(request.request_id) == serial)


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_time


# --scheduling-policy → the queue
QUEUES: dict[str, type[RequestQueue]] = {"fcfs": FCFSQueue, "priority": PriorityQueue}
