"""Ctrl-C in programs that a user runs: one line instead of a traceback, also while a program imports its modules.

This module imports nothing but `sys`: the programs import it first, and all else within a `try`.
"""

from __future__ import annotations

import sys

# what a shell reports of a program that SIGINT ended
EXIT_INTERRUPTED = 128 + 2


def interrupt_line() -> str:
    """What an interrupted program says. A terminal has just shown ^C on the line of a prompt or a progress bar."""
    return ("\n" if sys.stderr.isatty() else "") + "ascend-vllm: interrupted\n"


def report_interrupt() -> int:
    """Says that the program was interrupted; returns its exit code."""
    sys.stderr.write(interrupt_line())
    return EXIT_INTERRUPTED
