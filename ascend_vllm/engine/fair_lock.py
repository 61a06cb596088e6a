"""A lock for a thread that takes it again and again and others that want it now and then."""

from __future__ import annotations

import threading
from types import TracebackType


class FairLock:
    """A lock that whoever waits for it gets when it is released next.

    A thread that releases a `threading.Lock` and takes it again at once nearly always wins against those that wait,
    which have to wake up first. Here who waits holds the gate to the lock, so that nobody gets past.

    Example::

        with lock:
            ...
    """

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._gate:
            self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()
