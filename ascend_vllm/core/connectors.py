"""What requests wait for outside of the steps, such as a grammar that is compiled, or KV from another machine.

A new request goes through the connectors in order. One that is not ready waits in a connector, without slot and
blocks, until `take_ready` returns it; after the last connector it is queued as any other.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence

from ascend_vllm.core.request import Request
from ascend_vllm.errors import RequestError


class Connector(abc.ABC):
    """Something that requests may wait for. The engine core's thread calls all methods, between steps."""

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
    def remove(self, request: Request) -> bool:
        """Removes a request; returns whether it was waiting here."""

    @property
    @abc.abstractmethod
    def waiting(self) -> list[Request]:
        """Requests that wait here, in order of arrival."""

    @property
    @abc.abstractmethod
    def num_waiting(self) -> int:
        """Their number; read in every step."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stops all work; waiting requests are dropped."""


class Connectors:
    """All connectors of an engine core, as one.

    Args:
        connectors: in the order in which requests go through them.
    """

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._connectors = connectors
        self._wake = threading.Event()
        for connector in connectors:
            connector.attach(self._wake)

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait in any connector."""
        return [request for connector in self._connectors for request in connector.waiting]

    @property
    def num_waiting(self) -> int:
        """Their number."""
        return sum(connector.num_waiting for connector in self._connectors)

    def begin(self, request: Request) -> bool:
        """See `Connector.begin`."""
        return self._begin(request, 0)

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that have passed all connectors, or failed in one: see `Connector.take_ready`."""
        self._wake.clear()
        ready: list[tuple[Request, RequestError | None]] = []
        for index, connector in enumerate(self._connectors):
            for request, error in connector.take_ready() if connector.num_waiting else ():
                if error is not None:
                    ready.append((request, error))
                    continue
                try:
                    if self._begin(request, index + 1):
                        ready.append((request, None))
                except RequestError as reason:
                    ready.append((request, reason))
        return ready

    def remove(self, request: Request) -> bool:
        """Removes a request; returns whether it was waiting."""
        return any(connector.remove(request) for connector in self._connectors)

    def wait(self, timeout_s: float) -> None:
        """Waits until a request may be ready, but at most `timeout_s`."""
        self._wake.wait(timeout_s)

    def close(self) -> None:
        """Closes all connectors."""
        for connector in self._connectors:
            connector.close()

    def _begin(self, request: Request, first: int) -> bool:
        return all(connector.begin(request) for connector in self._connectors[first:])
