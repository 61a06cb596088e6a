"""How long a call takes."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds_of(function: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
