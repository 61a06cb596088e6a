"""Seconds of steps, and of proposing drafts, as they are measured; core/draft_costs.py decides by them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# weight of a new measurement that is above, or below, the ones before; most of it that counts
_UP_WEIGHT, _DOWN_WEIGHT, _MOST_GROWTH = 0.15, 0.3, 2.0
# of so many first ones the least counts
_FIRST_NOTES = 4
# numbers of tokens up to here are measured one by one, larger ones in fourths of an octave
EXACT_TOKENS, GROUP = 16, 2**0.25
# steps after which a cost is forgotten: so many for each that was noted, and at most
_KEPT_FOR_EACH, _MOST_KEPT = 100, 4000


@dataclasses.dataclass(slots=True)
class _Cost:
    """What steps of about so many tokens cost."""

    num_tokens: float
    seconds: float
    count: int
    noted_at: int

    def is_old(self, now: int) -> bool:
        return now - self.noted_at > min(_KEPT_FOR_EACH * self.count, _MOST_KEPT)


class StepCosts:
    """Seconds of steps by their number of tokens: moving averages, the old ones of which are forgotten.

    Example::

        costs = StepCosts()
        costs.note(8, 0.02, now=1)
        costs.count(8, now=20)  # 1
    """

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}

    def note(self, num_tokens: int, seconds: float, now: int) -> None:
        """Adds a step; `now` counts all steps."""
        key = _key(num_tokens)
        cost = self._costs.get(key)
        if cost is None or cost.is_old(now):
            self._costs[key] = _Cost(num_tokens, seconds, 1, now)
            return
        seconds = min(seconds, _MOST_GROWTH * cost.seconds)
        weight = _UP_WEIGHT if seconds > cost.seconds else _DOWN_WEIGHT
        if cost.count < _FIRST_NOTES and seconds < cost.seconds:
            # the first steps of a size may have to prepare something
            weight = 1.0
        cost.seconds += weight * (seconds - cost.seconds)
        cost.num_tokens += weight * (num_tokens - cost.num_tokens)
        cost.count, cost.noted_at = cost.count + 1, now

    def forget(self) -> None:
        """Forgets all that was noted."""
        self._costs.clear()

    def count(self, num_tokens: int, now: int) -> int:
        """How many steps of about so many tokens have been noted; 0: none lately."""
        cost = self._costs.get(_key(num_tokens))
        return 0 if cost is None or cost.is_old(now) else cost.count

    def points(self, now: int) -> list[tuple[float, float]]:
        """Numbers of tokens, ascending, and the seconds of such steps, without those that are forgotten."""
        return sorted((cost.num_tokens, cost.seconds) for cost in self._costs.values() if not cost.is_old(now))

    def at(self, num_tokens: int) -> float:
        """Seconds of a step, on the line between the nearest ones that were ever noted; 0: none was."""
        if (known := self._costs.get(_key(num_tokens))) is not None:
            return known.seconds
        if not self._costs:
            return 0.0
        xs, ys = zip(*sorted((cost.num_tokens, cost.seconds) for cost in self._costs.values()), strict=True)
        return float(np.interp(num_tokens, xs, ys))


def _key(num_tokens: int) -> int:
    if num_tokens <= EXACT_TOKENS:
        return num_tokens
    return EXACT_TOKENS + round(4 * math.log2(num_tokens / EXACT_TOKENS))


class ProposingCosts:
    """Seconds of proposing drafts, by how many each row gets and by the number of rows.

    Reading the last step's tokens comes before the first draft, so that one costs more than the next ones.

    Args:
        max_drafts: most drafts of a row, k.

    Example::

        costs = ProposingCosts(4)
        costs.note(1, 2, 0.003, now=1)
        costs.note(1, 4, 0.004, now=2)
        costs.at(1, np.array([1, 2, 3, 4]))  # 0.00225, 0.003, 0.0035, 0.004
    """

    def __init__(self, max_drafts: int) -> None:
        self._costs = [StepCosts() for _ in range(max_drafts)]

    def note(self, num_rows: int, depth: int, seconds: float, now: int) -> None:
        """Adds what it took to propose `depth` drafts, 1 … k, for each row; `now` counts all steps."""
        self._costs[depth - 1].note(num_rows, seconds, now)

    def at(self, num_rows: int, depths: IntArray) -> FloatArray:
        """Seconds of proposing so many drafts for each row; 0: nothing was noted.

        They are on the line between the nearest numbers of drafts that were noted. Of the fewest that were, half of
        the cost counts as fixed, for even fewer; beyond the most that were, each draft costs their mean.
        """
        known = [(depth, cost.at(num_rows)) for depth, cost in enumerate(self._costs, 1)]
        known = [(depth, seconds) for depth, seconds in known if seconds > 0]
        if not known:
            return np.zeros(len(depths))
        xs, measured = zip(*known, strict=True)
        # what was measured at other times may contradict: fewer drafts do not take longer
        ys = np.minimum.accumulate(measured[::-1])[::-1]
        inside = np.interp(depths, (0, *xs), (ys[0] / 2, *ys))
        seconds: FloatArray = inside * np.maximum(depths / xs[-1], 1.0)
        return seconds
