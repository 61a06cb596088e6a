"""Measures the time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
