"""SIGINT and SIGTERM while a server starts: both end it, whatever it is doing, and nothing that it started stays.

A start goes through plain code (imports, reading files), then through an event loop. In plain code a signal raises
KeyboardInterrupt, so that nobody waits for an import to end; in the loop it cancels the task that starts the server.
Since an exception may be swallowed where it happens to be raised, the signal is remembered, and looked at again at
the next change from one to the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Generator
from types import FrameType

_HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """What the signals do from `raising` on; make one in the main thread."""

    def __init__(self) -> None:
        self._is_requested = False
        self._is_held_back = False

    @contextlib.contextmanager
    def raising(self) -> Generator[None, None, None]:
        """Within, a signal raises KeyboardInterrupt; afterwards they do what they did before."""
        before = {number: signal.signal(number, self._handle) for number in _HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def held_back(self) -> Generator[None, None, None]:
        """Within, a signal is only remembered; at the end it raises. For what must not be left half done.

        Raises:
            KeyboardInterrupt: a signal came, now or earlier.
        """
        self.hold_back()
        try:
            yield
        finally:
            self._is_held_back = False
        if self._is_requested:
            raise KeyboardInterrupt

    def hold_back(self) -> None:
        """From now on a signal is only remembered: the way to the loop, or to the end, is not cut short."""
        self._is_held_back = True

    @contextlib.contextmanager
    def cancelling(self) -> Generator[None, None, None]:
        """Within, a signal cancels the current task; come here by `hold_back`, and before the first await.

        Raises:
            asyncio.CancelledError: a signal came before.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        for number in _HANDLED:
            loop.add_signal_handler(number, self._cancel, task)
        try:
            if self._is_requested:
                raise asyncio.CancelledError
            yield
        finally:
            # the loop would set the system's own: a second signal then must not cut the ending short
            for number in _HANDLED:
                loop.remove_signal_handler(number)
                signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self._is_requested = True
        if not self._is_held_back:
            raise KeyboardInterrupt

    def _cancel(self, task: asyncio.Task[object] | None) -> None:
        self._is_requested = True
        if task is not None:
            task.cancel()
