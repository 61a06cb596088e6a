"""The timer that notices a silent engine core, on a clock that the test advances."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

import pytest

from ascend_vllm.engine.core_client import IterationWatchdog

TIMEOUT_S = 8.0


class Clock:
    """The one method of an event loop that the watchdog uses, on a clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()
        self._loop = asyncio.new_event_loop()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay_s, callback, (), self._loop)
        heapq.heappush(self._timers, (handle.when(), next(self._order), handle))
        return handle

    def advance(self, seconds: float) -> None:
        """Lets time pass, tick by tick."""
        end = self.now + seconds
        while self._timers and self._timers[0][0] <= end:
            self.now = max(self.now, self._timers[0][0])
            self._run_first()
        self.now = end

    def jump(self, seconds: float) -> None:
        """Lets time pass while nothing runs; what is due then runs late."""
        self.now += seconds
        due = sum(when <= self.now for when, _, _ in self._timers)
        for _ in range(due):
            self._run_first()

    def _run_first(self) -> None:
        handle = heapq.heappop(self._timers)[2]
        if not handle.cancelled():
            handle._run()

    @property
    def num_timers(self) -> int:
        return sum(not handle.cancelled() for _, _, handle in self._timers)

    def close(self) -> None:
        self._loop.close()


class Watched:
    """A watchdog, and a core that sends something when the test sets `has_activity`."""

    def __init__(self, clock: Clock, timeout_s: float | None) -> None:
        self.clock = clock
        self.num_timeouts = 0
        self.has_activity = False
        self.watch = IterationWatchdog(timeout_s, clock, self._ask, self._on_timeout)  # type: ignore[arg-type]

    def _ask(self) -> bool:
        had, self.has_activity = self.has_activity, False
        return had

    def _on_timeout(self) -> None:
        self.num_timeouts += 1


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    yield clock
    clock.close()


@pytest.fixture
def core(clock: Clock) -> Watched:
    return Watched(clock, TIMEOUT_S)


def test_silence_for_the_whole_limit_is_told_once(core: Watched, clock: Clock) -> None:
    core.watch.start()
    clock.advance(TIMEOUT_S - 0.01)
    assert core.num_timeouts == 0
    clock.advance(0.02)
    assert core.num_timeouts == 1
    clock.advance(10 * TIMEOUT_S)
    assert (core.num_timeouts, clock.num_timers) == (1, 0)


def test_news_begin_the_limit_anew(core: Watched, clock: Clock) -> None:
    core.watch.start()
    for _ in range(20):
        clock.advance(0.8 * TIMEOUT_S)
        core.has_activity = True
    assert core.num_timeouts == 0
    clock.advance(1.2 * TIMEOUT_S)
    assert core.num_timeouts == 1


def test_a_core_that_owes_nothing_may_be_silent(core: Watched, clock: Clock) -> None:
    clock.advance(10 * TIMEOUT_S)
    core.watch.start()
    clock.advance(0.9 * TIMEOUT_S)
    core.watch.stop()
    assert clock.num_timers == 0
    clock.advance(10 * TIMEOUT_S)
    # what was silent before does not count
    core.watch.start()
    clock.advance(0.9 * TIMEOUT_S)
    assert core.num_timeouts == 0
    core.watch.stop()
    core.watch.stop()


def test_further_requests_do_not_prolong_the_limit(core: Watched, clock: Clock) -> None:
    for _ in range(9):
        core.watch.start()
        assert clock.num_timers == 1
        clock.advance(TIMEOUT_S / 10)
    assert core.num_timeouts == 0
    clock.advance(TIMEOUT_S / 5)
    assert core.num_timeouts == 1


def test_a_pause_of_this_process_is_not_silence_of_the_core(core: Watched, clock: Clock) -> None:
    core.watch.start()
    for _ in range(7):
        clock.jump(100 * TIMEOUT_S)
    assert core.num_timeouts == 0
    clock.jump(100 * TIMEOUT_S)
    assert core.num_timeouts == 1


def test_no_limit(clock: Clock) -> None:
    core = Watched(clock, None)
    core.watch.start()
    clock.advance(1e9)
    core.watch.stop()
    assert (core.num_timeouts, clock.num_timers) == (0, 0)
