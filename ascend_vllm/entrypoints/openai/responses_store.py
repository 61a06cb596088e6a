"""Responses that can be asked for later, and go on conversations; kept in memory, as bytes.

What is kept is encoded, so that it takes the memory that it counts for: as Python objects a body of many small items
would take twenty times its size. Responses belong to the caller who made them; to others they do not exist.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from ascend_vllm.entrypoints.openai.protocol_responses import ResponsesResponse
from ascend_vllm.errors import EngineBusyError, RequestError

MAX_RESPONSES = 1000
MAX_AGE_S = 24 * 3600.0
# bytes of everything that is kept
MAX_SIZE = 2**28
# responses that are generated in the background
MAX_RUNNING = 256
# bytes of a conversation that a response can go on from
MAX_CONVERSATION = 2**23

# bytes of the objects around the bytes: of a response, one turn of a conversation, an event
_RESPONSE_OVERHEAD = 1500
_TURN_OVERHEAD = 400
_EVENT_OVERHEAD = 50
# bytes of what waits for a background response, and what one of its tokens takes, of prompt and output
_RUNNING_OVERHEAD = 20_000
_TOKEN_SIZE = 100
# what decoded JSON takes for each of its bytes, if it consists of small objects
_DECODED_SIZE = 20
# what log-probabilities take for each byte of the events that tell them
_LOGPROBS_WEIGHT = 6


class InvalidResponseError(RequestError):
    """A stored response cannot be used like this."""

    error_type = "invalid_request_error"


class ResponseNotFoundError(InvalidResponseError):
    """There is no response of this id, or not any more, or it is not the caller's."""

    status_code = 404

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", "response_id")


class StoreFullError(EngineBusyError):
    """Responses that are generated in the background take all the room that there is for them."""

    def __init__(self, finding: str) -> None:
        super().__init__(
            f"{finding} Try again when some of them have ended, or ask without `background`.", "background"
        )


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
        self.size += sum(map(len, events)) + _EVENT_OVERHEAD * len(events)
        self._tell()

    def end(self) -> None:
        """There will be no more events."""
        self._ended = True
        self._tell()

    def drop(self) -> None:
        """Forget the events; whoever follows them hears no more."""
        self._events = []
        self.end()

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


class Turn:
    """A request's items and their answer, at the end of a conversation; conversations share their beginnings.

    Args:
        items: those of the request, a JSON array.
        output: the answer's items.
        previous: the turn it follows.

    Attributes:
        size: bytes of it.
        conversation_size: bytes of it and all turns before it.
    """

    __slots__ = ("_items", "_output", "conversation_size", "previous", "size")

    def __init__(self, items: bytes, output: Sequence[dict[str, Any]], previous: Turn | None) -> None:
        self._items = _trimmed(items)
        self._output = _trimmed(msgspec.json.encode([_without_logprobs(item) for item in output]))
        self.previous = previous
        self.size = len(items) + len(self._output) + _TURN_OVERHEAD
        self.conversation_size: int = self.size + (0 if previous is None else previous.conversation_size)

    def conversation(self) -> list[dict[str, Any]]:
        """All items up to its answer. Instructions are not among them: they hold for one response.

        Raises:
            RequestError: an item is nested too deeply.
        """
        turns = []
        turn: Turn | None = self
        while turn is not None:
            try:
                turns.append([*msgspec.json.decode(turn._items), *msgspec.json.decode(turn._output)])
            except RecursionError as error:
                raise InvalidResponseError(
                    "The conversation is nested too deeply to go on with.", "previous_response_id"
                ) from error
            turn = turn.previous
        return [item for items in reversed(turns) for item in items]

    def answered(self, output: Sequence[dict[str, Any]]) -> Turn:
        """The same turn with an answer."""
        return Turn(self._items, output, self.previous)


def _trimmed(encoded: bytes) -> bytes:
    """The same bytes; those that an encoder returns have room for up to half as many more behind them."""
    return bytes(memoryview(encoded))


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """An item of an answer as conversations need it."""
    if not isinstance(item.get("content"), list):
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return item | {"content": parts}


class StoredResponse:
    """A response and what it was made of.

    Args:
        response: which has begun.
        items: the items of its own input, a JSON array.
        previous: the end of the conversation it goes on with.
        caller: whose response it is, see `access.caller_of`.

    Attributes:
        id: of the response.
        response: as it is now; None once it has ended, when all that is left of it is bytes.
        turn: of its conversation; without the answer until it has ended.
        events: of a background stream.
        task: what generates a background response; None: nothing does.
    """

    def __init__(
        self, response: ResponsesResponse, items: bytes, previous: Turn | None = None, caller: bytes = b""
    ) -> None:
        self.id = response.id
        self.caller = caller
        self.response: ResponsesResponse | None = response
        self.turn = Turn(items, (), previous)
        self.events: EventLog | None = None
        self.task: asyncio.Task[None] | None = None
        self._encoded = b""
        # bytes of what is there only while it is generated in the background, and for each byte of its events
        self._running_size = 0
        self._output_weight = 1

    @property
    def size(self) -> int:
        """Bytes of it beside its turn."""
        num_events = 0 if self.events is None else self.events.size
        return _RESPONSE_OVERHEAD + len(self._encoded) + num_events + self._running_size

    def begin_running(
        self, num_prompt_tokens: int, num_prompt_characters: int, num_other_bytes: int, has_logprobs: bool
    ) -> None:
        """Count what is there while it is generated in the background.

        Args:
            num_prompt_tokens: tokens of its prompt.
            num_prompt_characters: characters of it.
            num_other_bytes: of the request beside its items.
            has_logprobs: its output comes with log-probabilities.
        """
        self._running_size = (
            _RUNNING_OVERHEAD
            + num_prompt_tokens * _TOKEN_SIZE
            + num_prompt_characters
            + num_other_bytes * _DECODED_SIZE
        )
        self._output_weight = _LOGPROBS_WEIGHT if has_logprobs else 1

    def add_events(self, events: Sequence[bytes]) -> None:
        """Take in events of what is generated, which itself takes about as much as they do."""
        self._running_size += self._output_weight * sum(map(len, events))
        if self.events is not None:
            self.events.extend(events)

    def end(self) -> None:
        """Nothing of the response will change any more. May be called again."""
        if self.response is None:
            return
        self.turn = self.turn.answered(self.response.output)
        self._encoded = _trimmed(msgspec.json.encode(self.response))
        self.response = self.task = None
        self._running_size = 0
        if self.events is not None:
            self.events.end()

    def encoded(self) -> bytes:
        """The response as it is now, as JSON."""
        return self._encoded if self.response is None else msgspec.json.encode(self.response)


@dataclasses.dataclass(slots=True)
class _Kept:
    """A response in the store, when it was used last, and what it was counted with."""

    entry: StoredResponse
    turn: Turn
    used_s: float
    size: int


class _Shelf:
    """The responses of one caller.

    Attributes:
        running: those that are generated in the background, which stay.
        ended: the others, the least recently used first.
        size: bytes of all.
    """

    __slots__ = ("ended", "running", "size")

    def __init__(self) -> None:
        self.running: dict[str, _Kept] = {}
        self.ended: OrderedDict[str, _Kept] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.ended)


class ResponseStore:
    """The most recently used responses; those that run are always kept.

    Where there are too many, the caller who has most of them loses the one that was used least recently.

    Args:
        max_responses: most responses.
        max_age_s: seconds after which a response that nobody asked for is forgotten.
        max_size: most bytes of all of them, and of the conversations that they go on with.
        max_running: most responses that run; half of them, of one caller of several. They may take half of the bytes.
        clock: tells seconds.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_age_s: float = MAX_AGE_S,
        max_size: int = MAX_SIZE,
        max_running: int = MAX_RUNNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_age_s = max_age_s
        self._max_size = max_size
        self._max_running = max_running
        self._clock = clock
        self._shelves: dict[bytes, _Shelf] = {}
        # how much holds a turn: its response, and turns that follow it
        self._holders: dict[Turn, int] = {}
        self._num_responses = 0
        self._running_size = 0
        self.size = 0

    def __len__(self) -> int:
        return self._num_responses

    def has(self, response_id: str, caller: bytes = b"") -> bool:
        """Whether a caller's response of this id is kept."""
        return self._find(response_id, caller) is not None

    def begin(self, entry: StoredResponse) -> None:
        """Keep a response that is to be generated in the background.

        Raises:
            StoreFullError: too many are, or they take too many bytes.
        """
        shelf = self._shelves.setdefault(entry.caller, _Shelf())
        num_running = sum(len(other.running) for other in self._shelves.values())
        most_own = self._max_running // 2 if entry.caller else self._max_running
        if len(shelf.running) >= most_own or num_running >= self._max_running:
            raise StoreFullError(f"At most {most_own} responses can be generated in the background at a time.")
        self._check_running_size(entry.size + entry.turn.size)
        self._add(shelf, shelf.running, entry)
        self._evict()

    def grow(self, entry: StoredResponse) -> None:
        """Take note that a response that runs has grown.

        Raises:
            StoreFullError: those that run take too many bytes.
        """
        shelf = self._shelves[entry.caller]
        kept = shelf.running[entry.id]
        added = entry.size - kept.size
        self._check_running_size(added)
        kept.size += added
        shelf.size += added
        self.size += added
        self._running_size += added
        if self.size > self._max_size:
            self._evict()

    def put(self, entry: StoredResponse) -> None:
        """Keep a response that has ended; others that are too much are forgotten."""
        shelf = self._shelves.setdefault(entry.caller, _Shelf())
        self._add(shelf, shelf.ended, entry)
        self._evict()

    def get(self, response_id: str, caller: bytes = b"") -> StoredResponse:
        """A caller's response of this id.

        Raises:
            ResponseNotFoundError: there is none.
        """
        self._evict()
        kept = self._find(response_id, caller)
        if kept is None:
            raise ResponseNotFoundError(response_id)
        kept.used_s = self._clock()
        ended = self._shelves[caller].ended
        if response_id in ended:
            ended.move_to_end(response_id)
        return kept.entry

    def _find(self, response_id: str, caller: bytes) -> _Kept | None:
        shelf = self._shelves.get(caller)
        return None if shelf is None else shelf.ended.get(response_id) or shelf.running.get(response_id)

    def _check_running_size(self, added: int) -> None:
        limit = self._max_size // 2
        if self._running_size + added > limit:
            raise StoreFullError(f"The responses that are generated in the background take {limit} bytes.")

    def _add(self, shelf: _Shelf, kept_there: dict[str, _Kept], entry: StoredResponse) -> None:
        kept = _Kept(entry, entry.turn, self._clock(), entry.size)
        # held again before it is let go: what nothing holds would be counted anew
        size = kept.size + self._hold(kept.turn)
        self._forget(shelf, entry.id)
        kept_there[entry.id] = kept
        self._num_responses += 1
        shelf.size += size
        self.size += size
        if kept_there is shelf.running:
            self._running_size += kept.size + kept.turn.size

    def _forget(self, shelf: _Shelf, response_id: str) -> None:
        running = shelf.running.pop(response_id, None)
        kept = running or shelf.ended.pop(response_id, None)
        if kept is None:
            return
        size = kept.size + self._let_go(kept.turn)
        self._num_responses -= 1
        shelf.size -= size
        self.size -= size
        if running is not None:
            self._running_size -= kept.size + kept.turn.size

    def _evict(self) -> None:
        """Forget responses that are too old, and the least recently used of too many or too large ones."""
        oldest_s = self._clock() - self._max_age_s
        for shelf in self._shelves.values():
            while shelf.ended and next(iter(shelf.ended.values())).used_s < oldest_s:
                self._drop_oldest(shelf)
        while self._num_responses > self._max_responses and self._drop_of_most(len):
            pass
        while self.size > self._max_size and self._drop_of_most(lambda shelf: shelf.size):
            pass

    def _drop_of_most(self, measure: Callable[[_Shelf], int]) -> bool:
        """Forget a response of the caller who has most; whether there was one that can be forgotten."""
        shelf = max((shelf for shelf in self._shelves.values() if shelf.ended), key=measure, default=None)
        if shelf is not None:
            self._drop_oldest(shelf)
        return shelf is not None

    def _drop_oldest(self, shelf: _Shelf) -> None:
        response_id, kept = next(iter(shelf.ended.items()))
        self._forget(shelf, response_id)
        if kept.entry.events is not None:  # however slowly they are read
            kept.entry.events.drop()

    def _hold(self, turn: Turn | None) -> int:
        """Hold a turn, and with it those before it; bytes of what nothing held before."""
        size = 0
        while turn is not None:
            self._holders[turn] = self._holders.get(turn, 0) + 1
            if self._holders[turn] > 1:
                break
            size += turn.size
            turn = turn.previous
        return size

    def _let_go(self, turn: Turn | None) -> int:
        """Undo `_hold`; bytes of what nothing holds any more."""
        size = 0
        while turn is not None:
            self._holders[turn] -= 1
            if self._holders[turn] > 0:
                break
            del self._holders[turn]
            size += turn.size
            turn = turn.previous
        return size
