"""What SIGINT and SIGTERM do while a server starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from ascend_vllm.entrypoints.http.stop_signals import StopSignals

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@BOTH
def test_plain_code_is_left_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), StopSignals().raising():
        send(number)
        raise AssertionError("the signal was not noticed")
    assert signal.getsignal(number) is before


@BOTH
def test_what_must_not_be_half_done_is_finished_first(number: signal.Signals) -> None:
    stop = StopSignals()
    done = []
    with stop.raising(), pytest.raises(KeyboardInterrupt), stop.held_back():
        send(number)
        done.append(1)
    assert done


@BOTH
def test_an_interrupt_that_was_swallowed_is_not_forgotten(number: signal.Signals) -> None:
    stop = StopSignals()
    with stop.raising():
        with contextlib.suppress(KeyboardInterrupt):
            send(number)
        with pytest.raises(KeyboardInterrupt), stop.held_back():
            pass


@BOTH
def test_the_loop_s_task_is_cancelled(number: signal.Signals) -> None:
    stop = StopSignals()

    async def wait() -> None:
        with stop.cancelling():
            send(number)
            await asyncio.Event().wait()

    with stop.raising():
        stop.hold_back()
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(wait())
        # a second one, while everything ends
        send(number)


@BOTH
def test_a_signal_on_the_way_to_the_loop(number: signal.Signals) -> None:
    stop = StopSignals()

    async def wait() -> None:
        with stop.cancelling():
            raise AssertionError("the signal was not noticed")

    with stop.raising():
        stop.hold_back()
        send(number)
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(wait())
