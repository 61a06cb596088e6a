"""Responses that can be asked for later, and go on conversations; kept in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from ascend_vllm.entrypoints.openai.protocol_responses import ResponsesResponse
from ascend_vllm.errors import RequestError

MAX_RESPONSES = 1000
MAX_AGE_S = 24 * 3600.0
# characters of conversations and bytes of events
MAX_SIZE = 2**28

_RUNNING = ("queued", "in_progress")


class InvalidResponseError(RequestError):
    """A stored response cannot be used like this."""

    error_type = "invalid_request_error"


class ResponseNotFoundError(InvalidResponseError):
    """There is no response of this id, or not any more."""

    status_code = 404

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", "response_id")


class EventLog:
    """The events of a background response, for whoever asks for them, at any time."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()
        self.size = 0

    def extend(self, events: Sequence[bytes]) -> None:
        """Append events; the number of each is its place."""
        self._events.extend(events)
        self.size += sum(map(len, events))
        self._tell()

    def end(self) -> None:
        """There will be no more events."""
        self._ended = True
        self._tell()

    async def follow(self, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events with greater numbers, those that are still to come as well."""
        index = max(starting_after + 1, 0)
        while True:
            news = self._news
            while index < len(self._events):
                yield self._events[index]
                index += 1
            if self._ended:
                return
            await news.wait()

    def _tell(self) -> None:
        """Wake those who wait."""
        self._news.set()
        self._news = asyncio.Event()


@dataclasses.dataclass
class StoredResponse:
    """A response and what it was made of.

    Attributes:
        response: as it is now.
        items: the items of its own input.
        previous: the response it goes on from; conversations share their beginnings.
        size: characters of the whole conversation, its answer included.
        events: of a background stream.
        task: what generates a background response; None: the response came at once.
    """

    response: ResponsesResponse
    items: list[dict[str, Any]]
    previous: StoredResponse | None
    size: int
    events: EventLog | None = None
    task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether its end is still to come."""
        return self.response.status in _RUNNING

    @property
    def total_size(self) -> int:
        """What it counts for among the others."""
        return self.size + (self.events.size if self.events else 0)

    def conversation(self) -> list[dict[str, Any]]:
        """All items up to its answer. Instructions are not among them: they hold for one response."""
        turns = []
        turn: StoredResponse | None = self
        while turn is not None:
            turns.append([*turn.items, *turn.response.output])
            turn = turn.previous
        return [item for items in reversed(turns) for item in items]


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A response in the store: when it was used last, and what it counts for."""

    entry: StoredResponse
    used_s: float
    size: int


class ResponseStore:
    """The most recently used responses; running ones are always kept.

    Args:
        max_responses: most responses.
        max_age_s: seconds after which a response that nobody asked for is forgotten.
        max_size: most characters of all of them.
        clock: tells seconds.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_age_s: float = MAX_AGE_S,
        max_size: int = MAX_SIZE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_age_s = max_age_s
        self._max_size = max_size
        self._clock = clock
        # least recently used first
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def put(self, entry: StoredResponse) -> None:
        """Keep a response, or take note that it has grown; others that are too much are forgotten."""
        self._forget(entry.response.id)
        self._kept[entry.response.id] = _Kept(entry, self._clock(), entry.total_size)
        self._size += entry.total_size
        self._evict()

    def get(self, response_id: str) -> StoredResponse:
        """The response of this id.

        Raises:
            ResponseNotFoundError: there is none.
        """
        self._evict()
        kept = self._kept.get(response_id)
        if kept is None:
            raise ResponseNotFoundError(response_id)
        self._kept[response_id] = dataclasses.replace(kept, used_s=self._clock())
        self._kept.move_to_end(response_id)
        return kept.entry

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id, None)
        if kept is not None:
            self._size -= kept.size

    def _evict(self) -> None:
        """Forget responses that are too old, and the least recently used of too many or too large ones."""
        oldest_s = self._clock() - self._max_age_s
        count, size = len(self._kept), self._size
        doomed = []
        for response_id, kept in self._kept.items():
            if kept.used_s >= oldest_s and count <= self._max_responses and size <= self._max_size:
                break
            if not kept.entry.running:
                doomed.append(response_id)
                count -= 1
                size -= kept.size
        for response_id in doomed:
            self._forget(response_id)
