"""The order in which requests wait."""

from __future__ import annotations

import abc
import collections
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

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue(RequestQueue):
    """First come, first served; preempted requests go to the front."""

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
