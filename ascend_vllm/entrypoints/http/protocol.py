"""uvicorn's HTTP protocol with limits: on the head of a request, on a client's time, and on what it sends in advance.

uvicorn's own parser on httptools takes heads of any size, waits for ever for a request that was begun, and for ever
for a client that does not read its answer, and keeps whatever requests are sent behind one that is not answered yet.
Each of these ties up memory or a connection of a server that anybody may reach.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import re
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ascend_vllm.entrypoints.http.errors import error_body

# vLLM's defaults
DEFAULT_MAX_HEAD_BYTES = 4 << 20
DEFAULT_MAX_HEADERS = 256

# A client that sends this many bytes a second is slow, but not idle: each second's worth gives it a second more.
_MIN_BYTES_PER_S = 1000

# A refused client that still sends gets so long to read why. Were the connection closed at once, its next bytes would
# be answered with a reset, which throws away what it has not read yet.
_LINGER_S = 1.0

# How long the end of an encrypted connection takes to be sent, and perhaps to be answered.
_GOODBYE_S = 0.5

# What was sent behind a request that is not answered yet waits as bytes. With more of them than this nothing is read
# any more; with fewer it is, so that it is noticed if the client goes away.
_MAX_WAITING_BYTES = 1 << 16

# Paths that a server's keepers ask for to see whether it lives: they begin at once.
_AT_ONCE = frozenset({"/health", "/ping"})

# Where a request may end: at an empty line, or at the beginning of what arrives, if that ends an empty line. Two
# expressions, for one of both would look at each byte instead of for the first line's end: 40 times as slow.
_EMPTY_LINE = re.compile(rb"\n[\r\n]*\n")
_LINE_ENDS = re.compile(rb"[\r\n]+")

# httptools does not take apart longer addresses
_MAX_ADDRESS_BYTES = (1 << 16) - 1


# A completion needs about half a millisecond until it first waits for something.
_NUM_PER_TURN = 4


class StartGate:
    """Lets some requests begin in each turn of the event loop; used by one loop only.

    A flood of requests that all begin at once makes a turn of the loop as long as all of their beginnings together,
    and only between two turns does the loop hear of new requests and of clients that have gone. So a few begin in
    each turn, in the order in which they came; the others wait at the price of a future each, and those whose clients
    have gone by then never begin.

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


@dataclasses.dataclass(frozen=True)
class HttpLimits:
    """What one connection may take.

    Attributes:
        max_head_bytes: address and headers of a request.
        max_headers: number of headers of a request, trailers included.
        client_timeout_s: for a request to arrive, and for a client to read what waits for it.
    """

    max_head_bytes: int = DEFAULT_MAX_HEAD_BYTES
    max_headers: int = DEFAULT_MAX_HEADERS
    client_timeout_s: float = 60.0


class _HeadTooLargeError(Exception):
    """The head of a request, or the address in it, is above its limits."""


class _HeldFlowControl(FlowControl):
    """Flow control that can be held: nothing is read until it is released, whoever wants to go on reading."""

    _is_held = False

    def hold(self) -> None:
        """Read nothing any more."""
        self._is_held = True
        self.pause_reading()

    def release(self) -> None:
        """Read on."""
        self._is_held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        """Read on, unless it is held."""
        if not self._is_held:
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Its requests are answered one after the other: the next one is parsed only when the one before is answered.

    A request that is not complete in time is answered with 408, one whose head is too large with 431, one whose
    address is with 414; all close the connection. A client that does not read its answer is disconnected, which
    aborts its request.

    Args:
        limits: of the connection.
        gate: lets requests of all connections begin.
        kwargs: what uvicorn gives a protocol.
    """

    flow: _HeldFlowControl

    def __init__(self, *, limits: HttpLimits, gate: StartGate, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._limits = limits
        self._gate = gate
        self._answer = self.app
        self.app = self._begin
        # as the parser shows it, which does not show a header that has not ended; and all that came before its end
        self._head_bytes = self._unended_head_bytes = 0
        self._is_head = False
        # whether a request has arrived whole and nothing of the next one
        self._is_complete = False
        # of a body whose length was declared
        self._num_body_bytes_left = 0
        # what came behind a request that is not answered yet
        self._waiting = bytearray()
        self._start = 0.0
        self._num_received = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # set once a request was refused: what still comes is thrown away
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client that connects must send something."""
        super().connection_made(transport)
        self.flow = _HeldFlowControl(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._cancel_timers()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._waiting.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse as far as to the end of a request that must be answered first."""
        num_parsed = self._parse(data)
        if num_parsed == len(data) or self._is_refused():
            return
        self._waiting += data[num_parsed:]
        if len(self._waiting) > _MAX_WAITING_BYTES:
            self.flow.hold()

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request when its turn comes, if its client is still there then."""
        cycle = self.cycle
        if scope["path"] not in _AT_ONCE:
            await self._gate.enter()
        if not cycle.disconnected:
            await self._answer(scope, receive, send)

    def on_response_complete(self) -> None:
        """Go on with what was sent behind the request."""
        super().on_response_complete()
        if self._waiting and not self._is_refused():
            del self._waiting[: self._parse(self._waiting)]
            if len(self._waiting) <= _MAX_WAITING_BYTES:
                self.flow.release()

    def _parse(self, data: bytes | bytearray) -> int:
        """Parse until a request is complete that is not answered; how many bytes were parsed.

        All that is parsed at once holds no more than one end of a request.
        """
        start = 0
        while start < len(data) and not self._is_refused() and not (self._is_complete and self._is_answering()):
            end = start + self._num_body_bytes_left
            if end == start:
                found = (_LINE_ENDS.match(data) if start == 0 else None) or _EMPTY_LINE.search(data, start)
                end = len(data) if found is None else found.end()
            self._parse_part(bytes(data[start:end]))
            start = min(end, len(data))
        return start

    def _parse_part(self, data: bytes) -> None:
        """Parse, then see what is still missing."""
        was_head = self._is_head
        self._is_complete = False
        super().data_received(data)
        if self._is_refused():
            return
        if was_head and self._is_head:
            self._unended_head_bytes += len(data)
            if self._unended_head_bytes > self._limits.max_head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._head_message())
                return
        if self._is_complete:
            self._stop_reading_timer()
        elif self._read_timer is None:
            self._await_request()
        elif self.cycle is None or not self.cycle.response_complete:
            # the body of a request that was refused is thrown away, and gets no more time
            self._num_received += len(data)

    def on_message_begin(self) -> None:
        """A new head."""
        super().on_message_begin()
        self._is_head, self._is_complete, self._head_bytes, self._unended_head_bytes = True, False, 0, 0

    def on_url(self, url: bytes) -> None:
        """A part of the address."""
        self._count_head(len(url))
        super().on_url(url)
        if len(self.url) > _MAX_ADDRESS_BYTES:
            raise _HeadTooLargeError

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer of a chunked body."""
        self._count_head(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > self._limits.max_headers:
            raise _HeadTooLargeError

    def on_headers_complete(self) -> None:
        """The head has ended; trailers are counted with it."""
        self._is_head = False
        super().on_headers_complete()
        self._num_body_bytes_left = int(dict(self.headers).get(b"content-length", 0))
        if self.parser.should_upgrade():
            # to nothing that this server speaks, and the parser stops here
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._num_body_bytes_left = max(self._num_body_bytes_left - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has arrived."""
        self._is_complete, self._num_body_bytes_left = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP, or above the limits of a head, is refused."""
        is_too_large = self._head_bytes > self._limits.max_head_bytes or (
            self.headers is not None and len(self.headers) > self._limits.max_headers
        )
        if is_too_large:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._head_message())
        elif self.headers is not None and len(self.url) > _MAX_ADDRESS_BYTES:
            message = f"The address of the request is too long: {_MAX_ADDRESS_BYTES} bytes are allowed."
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, message)
        elif self._is_answering():
            self.transport.close()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        """The client reads more slowly than the answer is made."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection is closed; one whose client never reads the end of its answer is cut."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self._limits.client_timeout_s, self.transport.abort)
        else:
            self._close_socket()

    def _close_socket(self) -> None:
        """Have the client of a closed connection notice, though it is not reading.

        With TLS the socket would stay open until the client has said goodbye, too; it would send its next request
        into nothing.
        """
        if not self.transport.can_write_eof():
            self.loop.call_later(_GOODBYE_S, self.transport.abort)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_head_bytes:
            raise _HeadTooLargeError

    def _head_message(self) -> str:
        limits = self._limits
        return (
            f"The head of the request is too large: {limits.max_head_bytes} bytes (--h11-max-incomplete-event-size) "
            f"and {limits.max_headers} headers (--h11-max-header-count) are allowed."
        )

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        """Start the time for a request to arrive."""
        self._start, self._num_received = self.loop.time(), 0
        self._read_timer = self.loop.call_later(self._limits.client_timeout_s, self._check_request)

    def _check_request(self) -> None:
        """Whether the request that was waited for has its time used up."""
        self._read_timer = None
        if self._is_refused():
            return
        allowed_s = self._limits.client_timeout_s + self._num_received / _MIN_BYTES_PER_S
        left_s = self._start + allowed_s - self.loop.time()
        # the client cannot send while the server does not read
        if left_s > 0 or self.flow.read_paused:
            delay_s = left_s if left_s > 0 else self._limits.client_timeout_s
            self._read_timer = self.loop.call_later(delay_s, self._check_request)
        elif self._is_head or self._is_answering():
            seconds = f"{self._limits.client_timeout_s:g}"
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT, f"The request did not arrive within {seconds} s (--client-timeout-s)."
            )
        else:
            self.transport.close()
            self._close_socket()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer and close; without an answer if the one to the body that is refused has begun."""
        self._cancel_timers()
        if not self._is_answering() or not self.cycle.response_started:
            content = msgspec.json.encode(error_body(message, "Bad Request", status.value))
            lines = [
                f"HTTP/1.1 {status.value} {status.phrase}",
                "content-type: application/json",
                f"content-length: {len(content)}",
                "connection: close",
            ]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + content)
            self._close_when_read()
        else:
            self.transport.close()

    def _is_refused(self) -> bool:
        """Whether nothing that comes matters any more."""
        return self._linger_timer is not None or self.transport.is_closing()

    def _close_when_read(self) -> None:
        """Say that the answer has ended, and close once the client does, or after a while."""
        # an encrypted connection has only one end
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        self.flow.release()
        if self.cycle is not None and not self.cycle.response_complete:
            # the application need not wait for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _cancel_timers(self) -> None:
        self._stop_reading_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
