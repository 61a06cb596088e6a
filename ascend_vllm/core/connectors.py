"""What requests wait for outside of the steps, such as a grammar that is compiled, or KV from another machine.

A new request goes in order through the connectors of the fields that are set in it. One that is not ready waits in a
connector, without slot and blocks, until `take_ready` returns it; after the last connector it is queued as any other.
"""

from __future__ import annotations

import abc
import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ascend_vllm.core.request import Request
from ascend_vllm.errors import RequestError


class Connector(abc.ABC):
    """Something that requests may wait for. The engine core's thread calls all methods, between steps.

    Attributes:
        field: the attribute of `Request` that it serves, such as "sampling_params.structured_outputs"; requests in
            which that is None or empty do not come here.
    """

    field: str

    @abc.abstractmethod
    def attach(self, wake: threading.Event) -> None:
        """Passes an event for the connector to set, from any thread, when a request may be ready."""

    @abc.abstractmethod
    def begin(self, request: Request) -> bool:
        """Adds a new request.

        Returns:
            Whether it is ready; if not, it waits here, and a later `take_ready` returns it.

        Raises:
            RequestError: it can never be ready.
        """

    @abc.abstractmethod
    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that no longer wait, in order of arrival, each with the error that ends it, or None."""

    @abc.abstractmethod
    def remove(self, request: Request) -> None:
        """Removes a request that waits here."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stops all work; waiting requests are dropped."""

    def stats(self) -> dict[str, Any]:
        """Fields of `SchedulerStats` that are known here, by name."""
        return {}


class Connectors:
    """All connectors of an engine core, as one.

    Args:
        connectors: in the order in which requests go through them.

    Attributes:
        fields: of each connector, gives the field of a request that it serves. A request with none of them needs no
            call of `begin`.
        waiting: requests that wait in connectors, in order of arrival there → indices of these.
    """

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._connectors = connectors
        self.fields: list[Callable[[Request], Any]] = [
            operator.attrgetter(connector.field) for connector in connectors
        ]
        self.waiting: dict[Request, int] = {}
        self._wake = threading.Event()
        for connector in connectors:
            connector.attach(self._wake)

    def begin(self, request: Request, first: int = 0) -> bool:
        """Has a request go through the connectors from `first` on: see `Connector.begin`."""
        for index in range(first, len(self._connectors)):
            if self.fields[index](request) and not self._connectors[index].begin(request):
                self.waiting[request] = index
                return False
        return True

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that have passed all connectors, or failed in one: see `Connector.take_ready`."""
        self._wake.clear()
        ready: list[tuple[Request, RequestError | None]] = []
        for index, connector in enumerate(self._connectors):
            for request, error in connector.take_ready():
                del self.waiting[request]
                failure = error
                try:
                    if failure is None and not self.begin(request, index + 1):
                        continue
                except RequestError as reason:
                    failure = reason
                ready.append((request, failure))
        return ready

    def remove(self, request: Request) -> None:
        """Removes a request that waits."""
        self._connectors[self.waiting.pop(request)].remove(request)

    def wait(self, timeout_s: float) -> None:
        """Waits until a request may be ready, but at most `timeout_s`."""
        self._wake.wait(timeout_s)

    def stats(self) -> dict[str, Any]:
        """Of all connectors: see `Connector.stats`."""
        return {name: value for connector in self._connectors for name, value in connector.stats().items()}

    def close(self) -> None:
        """Closes all connectors."""
        for connector in self._connectors:
            connector.close()
