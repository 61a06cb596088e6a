"""How many requests begin in one turn of the event loop.

A flood of requests that all begin at once makes a turn of the loop as long as all of their beginnings together, and
only between two turns does the loop hear of new requests and of clients that have gone. So a few begin in each turn,
in the order in which they came; the others wait at the price of a future each, and those whose clients have gone by
then never begin.
"""

from __future__ import annotations

import asyncio
import collections

# A completion needs about half a millisecond until it first waits for something.
_NUM_PER_TURN = 4


class StartGate:
    """Lets some requests begin in each turn of the event loop; used by one loop only.

    Example::

        gate = StartGate()
        await gate.enter()  # at once, unless many others begin
    """

    def __init__(self) -> None:
        self._num_left = _NUM_PER_TURN
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._is_turn_awaited = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Waits until this request may begin."""
        loop = asyncio.get_running_loop()
        if not self._is_turn_awaited:
            self._is_turn_awaited = True
            loop.call_soon(self._begin_turn)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin_turn(self) -> None:
        """Lets those begin who have waited longest."""
        self._num_left = _NUM_PER_TURN
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            # cancelled ones take nobody's place
            if not turn.done():
                turn.set_result(None)
                self._num_left -= 1
        self._is_turn_awaited = bool(self._waiting)
        if self._is_turn_awaited:
            asyncio.get_running_loop().call_soon(self._begin_turn)
