"""What requests wait for outside of the steps: a grammar that is compiled, KV that comes from elsewhere.

Each connector in turn is given a new request by `begin`. One that is not ready stays there, without slot and blocks,
until `take_ready` gives it back; then it waits for its turn as any other.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Sequence

from ascend_vllm.core.request import Request
from ascend_vllm.errors import RequestError


class Connector(abc.ABC):
    """One thing that requests may wait for. All is called by the engine core's thread, between the steps."""

    @abc.abstractmethod
    def attach(self, wake: threading.Event) -> None:
        """Gives the event that it sets, from any thread, when a request may be ready."""

    @abc.abstractmethod
    def begin(self, request: Request) -> bool:
        """Takes a new request in.

        Returns:
            Whether it has all that it needs from here; else it waits here, and `take_ready` gives it in the end.

        Raises:
            RequestError: it can never have that.
        """

    @abc.abstractmethod
    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that wait here no longer, in the order of their coming, or with why they cannot be served."""

    @abc.abstractmethod
    def forget(self, request: Request) -> bool:
        """Drops a request that waits here; False: it does not."""

    @property
    @abc.abstractmethod
    def waiting(self) -> list[Request]:
        """Requests that wait here."""

    @property
    @abc.abstractmethod
    def num_waiting(self) -> int:
        """Their number; asked in every step."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends all that goes on; requests that wait are dropped."""


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
        """Requests that wait for something."""
        return [request for connector in self._connectors for request in connector.waiting]

    @property
    def num_waiting(self) -> int:
        """Their number."""
        return sum(connector.num_waiting for connector in self._connectors)

    def begin(self, request: Request) -> bool:
        """Takes a new request in: see `Connector.begin`."""
        return self._begin(request, 0)

    def take_ready(self) -> list[tuple[Request, RequestError | None]]:
        """Requests that wait for nothing more, or for whom waiting was in vain: see `Connector.take_ready`."""
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

    def forget(self, request: Request) -> bool:
        """Drops a request that waits for something; False: it does not."""
        return any(connector.forget(request) for connector in self._connectors)

    def wait(self, timeout_s: float) -> None:
        """Waits until a request may be ready, but not for longer than this."""
        self._wake.wait(timeout_s)

    def close(self) -> None:
        """Ends all connectors."""
        for connector in self._connectors:
            connector.close()

    def _begin(self, request: Request, first: int) -> bool:
        return all(connector.begin(request) for connector in self._connectors[first:])
