"""SIGINT and SIGTERM while a server starts: both end it at once, with all that it has started.

The start runs plain code (imports, reading files), then an event loop. In plain code a signal raises
KeyboardInterrupt, so that an import need not finish; in the loop it cancels the task that starts the server. Since
the code that happens to run may swallow the exception, the signal is also recorded, and checked at the next change.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Generator
from types import FrameType

_HANDLED = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles the signals from `raising` on; for the main thread."""

    def __init__(self) -> None:
        self._is_requested = False
        self._is_held_back = False

    @property
    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self._is_requested

    @contextlib.contextmanager
    def raising(self) -> Generator[None, None, None]:
        """Within, a signal raises KeyboardInterrupt; restores the previous handlers afterwards."""
        before = {number: signal.signal(number, self._handle) for number in _HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def held_back(self) -> Generator[None, None, None]:
        """Within, a signal is only recorded; it raises at the end. For code that must not be interrupted.

        Raises:
            KeyboardInterrupt: a signal came, now or earlier.
        """
        self.hold_back()
        try:
            yield
        finally:
            self._is_held_back = False
        self.release()

    def hold_back(self) -> None:
        """From now on a signal is only recorded, until `cancelling` checks it or the program ends."""
        self._is_held_back = True

    def release(self) -> None:
        """From now on a signal raises again.

        Raises:
            KeyboardInterrupt: a signal came, now or earlier.
        """
        self._is_held_back = False
        if self._is_requested:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def cancelling(self) -> Generator[None, None, None]:
        """Within, a signal cancels the current task; to be entered after `hold_back`, before the first await.

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
            # not the default handlers, which the loop restores: a second signal must not interrupt the shutdown
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
