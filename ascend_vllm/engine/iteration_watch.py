"""Notices that the engine core no longer answers: a step hangs, or takes longer than anybody will wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# A limit is this many ticks in a row without news. A tick that comes late, because this process itself was stopped
# or its event loop was busy, counts as one all the same: such a pause says nothing about the core.
_NUM_TICKS = 8


class IterationWatch:
    """A timer that runs while the core owes an answer.

    The core sends a message after every step, so that silence is a step that goes on. Nothing is done per message or
    per request: the timer asks a few times within the limit whether anything came.

    Args:
        timeout_s: seconds without news after which the core counts as hung; None: it never does.
        loop: on which the timer runs.
        has_news: whether anything came since it was last asked, or can be read now.
        on_timeout: called once; the watch has stopped then.

    Example::

        watch = IterationWatch(60.0, loop, has_news, declare_dead)
        watch.start()  # with every request
        watch.stop()  # when the last one is answered
    """

    def __init__(
        self,
        timeout_s: float | None,
        loop: asyncio.AbstractEventLoop,
        has_news: Callable[[], bool],
        on_timeout: Callable[[], None],
    ) -> None:
        self._tick_s = None if timeout_s is None else timeout_s / _NUM_TICKS
        self._loop = loop
        self._has_news = has_news
        self._on_timeout = on_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._num_silent = 0

    def start(self) -> None:
        """Starts to count, unless it does already."""
        if self._timer is None and self._tick_s is not None:
            self._num_silent = 0
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """Nothing is owed any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self._num_silent = 0 if self._has_news() else self._num_silent + 1
        if self._num_silent >= _NUM_TICKS:
            self._on_timeout()
        elif self._tick_s is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
