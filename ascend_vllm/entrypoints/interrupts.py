"""Ctrl-C in programs that a user runs in a terminal: one line instead of a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

# what a shell reports of a program that SIGINT ended
EXIT_INTERRUPTED = 128 + signal.SIGINT


def report_interrupt() -> int:
    """Says that the program was interrupted; returns its exit code."""
    # a terminal has just shown ^C on the line of a prompt or a progress bar
    line = ("\n" if sys.stderr.isatty() else "") + "ascend-vllm: interrupted\n"
    # no buffered file: a signal may come while it is written to
    os.write(2, line.encode())
    return EXIT_INTERRUPTED


def _end(*_: object) -> None:
    os._exit(report_interrupt())


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Within, or in a function with this decorator, Ctrl-C ends the process on the spot.

    For imports, which may replace a KeyboardInterrupt by errors of their own, and for engines, which it would leave
    in the middle of a change. Other programs' own handlers stay.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
