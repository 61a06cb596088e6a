"""What draft models and EAGLE heads may cost by reading: prompts, and tokens that are decoded without drafts.

A request that may have drafts costs time before it has any, and in steps without. This pays if its drafts gain more.
So reading is booked against what drafts gain and a small share of all time. Requests that begin while more was spent
than that have no drafts, and nothing of them is read.
"""

from __future__ import annotations

import math

# share of all time that reading may cost beyond what drafts gain
_READING_SHARE = 0.01
# seconds of steps after which what was saved up is down to 1/e: later requests may be of another kind
_SAVED_S = 60.0
# requests that may begin between two steps, and tokens of several: what they will cost is not known yet
_MOST_AT_ONCE, _MOST_TOKENS_AT_ONCE = 8, 2048


class ReadingBudget:
    """Whether reading is paid for.

    Example::

        budget = ReadingBudget()
        budget.takes_another(300)  # True
        budget.add(1.0, -0.5)
        budget.takes_another(300)  # False, until 49 seconds more have passed or drafts have gained 0.49 seconds
    """

    def __init__(self) -> None:
        self._left_s = 0.0
        self._num_new = self._num_new_tokens = 0

    def add(self, seconds: float, gained_s: float) -> None:
        """Adds a step.

        Args:
            seconds: that it took.
            gained_s: seconds that drafts saved in it, less those that reading took.
        """
        if self._left_s > 0:
            self._left_s *= math.exp(-seconds / _SAVED_S)
        self._left_s += _READING_SHARE * seconds + gained_s
        self._num_new = self._num_new_tokens = 0

    def takes_another(self, num_tokens: int) -> bool:
        """Whether another request that begins, with so many tokens, may have drafts; it counts as begun then."""
        num_tokens += self._num_new_tokens
        if self._left_s < 0 or self._num_new == _MOST_AT_ONCE:
            return False
        if self._num_new and num_tokens > _MOST_TOKENS_AT_ONCE:
            return False
        self._num_new, self._num_new_tokens = self._num_new + 1, num_tokens
        return True
