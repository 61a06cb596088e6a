"""The store of responses, in memory as JSON, for retrieval and for continuing conversations.

Responses are stored encoded, so that their size is known and small: as Python objects a body of many small items
would take twenty times the memory. Responses are visible only to the caller who created them.
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
# bytes of all stored responses
MAX_SIZE = 2**28
# responses that are generated in the background
MAX_RUNNING = 256
# bytes of a conversation that a response can continue
MAX_CONVERSATION = 2**23

# bytes of Python objects around the encoded bytes: per response, turn of a conversation, and event
_RESPONSE_OVERHEAD = 1500
_TURN_OVERHEAD = 400
_EVENT_OVERHEAD = 50
# bytes of the state of a background response while it is generated, and of each token of its prompt and output
_RUNNING_OVERHEAD = 20_000
_TOKEN_SIZE = 100
# memory of decoded JSON per byte of JSON, if it consists of small objects
_DECODED_SIZE = 20
# memory of log-probabilities per byte of their events
_LOGPROBS_WEIGHT = 6


class InvalidResponseError(RequestError):
    """A stored response cannot be used like this."""

    error_type = "invalid_request_error"


class ResponseNotFoundError(InvalidResponseError):
    """There is no response of this id, it was evicted, or it belongs to another caller."""

    status_code = 404

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", "response_id")


class StoreFullError(EngineBusyError):
    """Too many responses are being generated in the background, or they take too much memory."""

    def __init__(self, finding: str) -> None:
        super().__init__(
            f"{finding} Try again when some of them have ended, or ask without `background`.", "background"
        )


class EventLog:
    """The events of a background response, which any number of clients can follow from any position."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._ended = False
        self._changed = asyncio.Event()
        self.size = 0

    def extend(self, events: Sequence[bytes]) -> None:
        """Append events; their index in the log is their sequence number."""
        self._events.extend(events)
        self.size += sum(map(len, events)) + _EVENT_OVERHEAD * len(events)
        self._notify()

    def end(self) -> None:
        self._ended = True
        self._notify()

    def drop(self) -> None:
        """Delete the events; ends the streams of those who follow them."""
        self._events = []
        self.end()

    async def follow(self, starting_after: int = -1) -> AsyncGenerator[bytes, None]:
        """The events with sequence numbers above `starting_after`, including future ones, until the end."""
        index = max(starting_after + 1, 0)
        while True:
            changed = self._changed
            while index < len(self._events):
                yield self._events[index]
                index += 1
            if self._ended:
                return
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Turn:
    """A request's items and their answer, the last turn of a conversation; conversations share earlier turns.

    Args:
        items: of the request, a JSON array.
        output: items of the answer.
        previous: the turn before.

    Attributes:
        size: bytes of this turn.
        conversation_size: bytes of this turn and all before it.
    """

    __slots__ = ("_items", "_output", "conversation_size", "previous", "size")

    def __init__(self, items: bytes, output: Sequence[dict[str, Any]], previous: Turn | None) -> None:
        self._items = _trimmed(items)
        self._output = _trimmed(msgspec.json.encode([_without_logprobs(item) for item in output]))
        self.previous = previous
        self.size = len(items) + len(self._output) + _TURN_OVERHEAD
        self.conversation_size: int = self.size + (0 if previous is None else previous.conversation_size)

    def conversation(self, with_answer: bool = True) -> list[dict[str, Any]]:
        """All items up to this turn's answer, without instructions, which apply to one response only.

        Args:
            with_answer: include this turn's answer.

        Raises:
            RequestError: an item is nested too deeply.
        """
        turns = []
        turn: Turn | None = self
        while turn is not None:
            output = turn._output if with_answer or turn is not self else b"[]"
            try:
                turns.append([*msgspec.json.decode(turn._items), *msgspec.json.decode(output)])
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
    """A copy of the bytes without spare capacity: an encoder's result may occupy half as much memory again."""
    return bytes(memoryview(encoded))


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """An output item without log-probabilities, as input of later turns."""
    if not isinstance(item.get("content"), list):
        return item
    parts = [{name: value for name, value in part.items() if name != "logprobs"} for part in item["content"]]
    return item | {"content": parts}


class StoredResponse:
    """A response with its input.

    Args:
        response: at its start.
        items: of its own input, a JSON array.
        previous: the last turn of the conversation that it continues.
        caller: the response's owner, see `access.caller_of`.

    Attributes:
        id: of the response.
        response: the current state; None once it has ended, when only its encoded bytes are kept.
        turn: in its conversation; without the answer until the response has ended.
        events: of a background stream.
        task: generates a background response; None: it is not being generated.
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
        # bytes of the state while it is generated in the background, and memory per byte of its events
        self._running_size = 0
        self._output_weight = 1

    @property
    def size(self) -> int:
        """Bytes of the response without its turn."""
        num_events = 0 if self.events is None else self.events.size
        return _RESPONSE_OVERHEAD + len(self._encoded) + num_events + self._running_size

    def begin_running(
        self, num_prompt_tokens: int, num_prompt_characters: int, num_other_bytes: int, has_logprobs: bool
    ) -> None:
        """Add the memory of the state while it is generated in the background to `size`.

        Args:
            num_prompt_tokens: tokens of its prompt.
            num_prompt_characters: characters of its prompt.
            num_other_bytes: bytes of the request without its items.
            has_logprobs: whether its output has log-probabilities.
        """
        self._running_size = (
            _RUNNING_OVERHEAD
            + num_prompt_tokens * _TOKEN_SIZE
            + num_prompt_characters
            + num_other_bytes * _DECODED_SIZE
        )
        self._output_weight = _LOGPROBS_WEIGHT if has_logprobs else 1

    def add_events(self, events: Sequence[bytes]) -> None:
        """Add events, and count them also for the generated output, which takes about the same memory."""
        self._running_size += self._output_weight * sum(map(len, events))
        if self.events is not None:
            self.events.extend(events)

    def end(self) -> None:
        """Encode the finished response and drop its objects. Can be called several times."""
        if self.response is None:
            return
        self.turn = self.turn.answered(self.response.output)
        self._encoded = _trimmed(msgspec.json.encode(self.response))
        self.response = self.task = None
        self._running_size = 0
        if self.events is not None:
            self.events.end()

    def encoded(self) -> bytes:
        """The response's current state as JSON."""
        return self._encoded if self.response is None else msgspec.json.encode(self.response)


@dataclasses.dataclass(slots=True)
class _Kept:
    """A response in the store, the time of its last use, and the turn and size that it was counted with."""

    entry: StoredResponse
    turn: Turn
    used_s: float
    size: int


@dataclasses.dataclass(slots=True)
class _CallerResponses:
    """The responses of one caller.

    Attributes:
        running: responses generated in the background, which are never evicted.
        ended: the others, least recently used first.
        size: bytes of all of them.
    """

    running: dict[str, _Kept] = dataclasses.field(default_factory=dict)
    ended: OrderedDict[str, _Kept] = dataclasses.field(default_factory=OrderedDict)
    size: int = 0

    def __len__(self) -> int:
        return len(self.running) + len(self.ended)


class ResponseStore:
    """Keeps the most recently used responses, and all that are still running.

    When there are too many, the least recently used one of the caller with the most is evicted.

    Args:
        max_responses: most responses.
        max_age_s: seconds after which an unused response is evicted.
        max_size: most bytes of all responses and their conversations.
        max_running: most running responses, half of them per caller if there are several; half of `max_size`.
        clock: returns seconds.
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
        self._by_caller: dict[bytes, _CallerResponses] = {}
        # reference counts of turns: by their responses, and by the turns that follow
        self._num_references: dict[Turn, int] = {}
        self._num_responses = 0
        self._running_size = 0
        self.size = 0

    def __len__(self) -> int:
        return self._num_responses

    def has(self, response_id: str, caller: bytes = b"") -> bool:
        return self._find(response_id, caller) is not None

    def begin(self, entry: StoredResponse) -> None:
        """Add a response that is to be generated in the background.

        Raises:
            StoreFullError: there are too many of them, or they take too many bytes.
        """
        owned = self._by_caller.setdefault(entry.caller, _CallerResponses())
        num_running = sum(len(other.running) for other in self._by_caller.values())
        most_own = self._max_running // 2 if entry.caller else self._max_running
        if len(owned.running) >= most_own or num_running >= self._max_running:
            raise StoreFullError(f"At most {most_own} responses can be generated in the background at a time.")
        self._check_running_size(entry.size + entry.turn.size)
        self._add(owned, owned.running, entry)
        self._evict()

    def grow(self, entry: StoredResponse) -> None:
        """Update the size of a running response.

        Raises:
            StoreFullError: the running responses take too many bytes.
        """
        owned = self._by_caller[entry.caller]
        kept = owned.running[entry.id]
        added = entry.size - kept.size
        self._check_running_size(added)
        kept.size += added
        owned.size += added
        self.size += added
        self._running_size += added
        if self.size > self._max_size:
            self._evict()

    def put(self, entry: StoredResponse) -> None:
        """Add a response that has ended, or move it from the running ones; evicts others if there are too many."""
        owned = self._by_caller.setdefault(entry.caller, _CallerResponses())
        self._add(owned, owned.ended, entry)
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
        ended = self._by_caller[caller].ended
        if response_id in ended:
            ended.move_to_end(response_id)
        return kept.entry

    def delete(self, response_id: str, caller: bytes = b"") -> None:
        """Forget a caller's response, if it is there; conversations that go on from it keep its items."""
        kept = self._find(response_id, caller)
        if kept is not None:
            self._drop(self._by_caller[caller], kept)

    def _find(self, response_id: str, caller: bytes) -> _Kept | None:
        owned = self._by_caller.get(caller)
        return None if owned is None else owned.ended.get(response_id) or owned.running.get(response_id)

    def _check_running_size(self, added: int) -> None:
        limit = self._max_size // 2
        if self._running_size + added > limit:
            raise StoreFullError(f"The responses that are generated in the background take {limit} bytes.")

    def _add(self, owned: _CallerResponses, kept_there: dict[str, _Kept], entry: StoredResponse) -> None:
        kept = _Kept(entry, entry.turn, self._clock(), entry.size)
        # acquired before the old entry is released, so that turns of both are not counted twice
        size = kept.size + self._count(kept.turn, 1)
        self._forget(owned, entry.id)
        kept_there[entry.id] = kept
        self._num_responses += 1
        owned.size += size
        self.size += size
        if kept_there is owned.running:
            self._running_size += kept.size + kept.turn.size

    def _forget(self, owned: _CallerResponses, response_id: str) -> None:
        running = owned.running.pop(response_id, None)
        kept = running or owned.ended.pop(response_id, None)
        if kept is None:
            return
        size = kept.size + self._count(kept.turn, -1)
        self._num_responses -= 1
        owned.size -= size
        self.size -= size
        if running is not None:
            self._running_size -= kept.size + kept.turn.size

    def _evict(self) -> None:
        """Drop responses that are too old, then the least recently used until number and size are within limits."""
        oldest_s = self._clock() - self._max_age_s
        for owned in self._by_caller.values():
            while owned.ended and next(iter(owned.ended.values())).used_s < oldest_s:
                self._drop_oldest(owned)
        while self._num_responses > self._max_responses and self._drop_of_most(len):
            pass
        while self.size > self._max_size and self._drop_of_most(lambda owned: owned.size):
            pass

    def _drop_of_most(self, measure: Callable[[_CallerResponses], int]) -> bool:
        """Drop a response of the caller with the most; False: none can be dropped."""
        owned = max((owned for owned in self._by_caller.values() if owned.ended), key=measure, default=None)
        if owned is not None:
            self._drop_oldest(owned)
        return owned is not None

    def _drop_oldest(self, owned: _CallerResponses) -> None:
        self._drop(owned, next(iter(owned.ended.values())))

    def _drop(self, owned: _CallerResponses, kept: _Kept) -> None:
        self._forget(owned, kept.entry.id)
        if kept.entry.events is not None:  # also if clients still read them
            kept.entry.events.drop()

    def _count(self, turn: Turn | None, change: int) -> int:
        """Count a reference to a turn, and by it to those before.

        Args:
            change: 1, or -1 to undo it.

        Returns:
            Bytes of the turns that got their first reference, or lost their last one.
        """
        size = 0
        while turn is not None:
            count = self._num_references.pop(turn, 0) + change
            if count:
                self._num_references[turn] = count
            if count != max(change, 0):
                break
            size += turn.size
            turn = turn.previous
        return size
