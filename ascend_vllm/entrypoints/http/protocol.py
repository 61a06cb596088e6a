"""uvicorn's HTTP protocol with limits on request heads, on slow clients, and on pipelined requests.

uvicorn's httptools protocol accepts heads of any size, waits for ever for the rest of a request and for clients that
do not read their answers, and buffers any number of pipelined requests. Each of these would let clients tie up the
server's memory or connections.
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
from ascend_vllm.entrypoints.http.streaming import DIRECT_SEND

# vLLM's defaults
DEFAULT_MAX_HEAD_BYTES = 4 << 20
DEFAULT_MAX_HEADERS = 256

# A client that sends at least this fast does not time out: that many bytes extend its time by a second.
_MIN_BYTES_PER_S = 1000

# For a refused client that still sends to read the error. If the connection were closed at once, its next bytes would
# cause a reset, which discards what it has not read yet.
_LINGER_S = 1.0

# For TLS's close_notify to be sent, and perhaps answered.
_CLOSE_NOTIFY_S = 0.5

# Pipelined requests are buffered as bytes. Above this limit reading is paused; below it reading goes on, so that a
# disconnect is noticed.
_MAX_WAITING_BYTES = 1 << 16

# health checks, which are not delayed by StartLimiter
_AT_ONCE = frozenset({"/health", "/ping"})

# Where a request may end: after an empty line, or at the beginning of the data, if that completes an empty line. A
# single expression for both would be 40 times as slow, since it could not search for the first newline.
_EMPTY_LINE = re.compile(rb"\n[\r\n]*\n")
_LINE_ENDS = re.compile(rb"[\r\n]+")

# longest URL that httptools parses
_MAX_ADDRESS_BYTES = (1 << 16) - 1


# requests per iteration of the loop; a completion takes about half a millisecond until its first await
_NUM_PER_TURN = 4


class StartLimiter:
    """Starts only a few requests in each iteration of the event loop; for one loop.

    If a burst of requests started in one iteration, new requests and disconnects would not be noticed until all of
    them had run to their first await. So a few start per iteration, first come, first served; the others wait for
    futures, and never start if their clients disconnect meanwhile.

    Example::

        start_limiter = StartLimiter()
        await start_limiter.enter()  # at once, unless many others start
    """

    def __init__(self) -> None:
        self._num_left = _NUM_PER_TURN
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._is_turn_scheduled = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self) -> None:
        """Waits until this request may start."""
        loop = asyncio.get_running_loop()
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            loop.call_soon(self._begin_turn)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin_turn(self) -> None:
        """Starts the requests that have waited longest."""
        self._num_left = _NUM_PER_TURN
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            # cancelled ones do not count
            if not turn.done():
                turn.set_result(None)
                self._num_left -= 1
        self._is_turn_scheduled = bool(self._waiting)
        if self._is_turn_scheduled:
            asyncio.get_running_loop().call_soon(self._begin_turn)


@dataclasses.dataclass(frozen=True)
class HttpLimits:
    """Limits of one connection.

    Attributes:
        max_head_bytes: URL and headers of a request.
        max_headers: number of headers of a request, trailers included.
        client_timeout_s: seconds for a request to arrive, and for a client to read buffered data.
    """

    max_head_bytes: int = DEFAULT_MAX_HEAD_BYTES
    max_headers: int = DEFAULT_MAX_HEADERS
    client_timeout_s: float = 60.0


class _HeadTooLargeError(Exception):
    """The head of a request, or its URL, exceeds the limits."""


class _PausableFlowControl(FlowControl):
    """Flow control with a hold that overrides `resume_reading` until it is released."""

    _is_held = False

    def hold(self) -> None:
        """Pause reading until `release`."""
        self._is_held = True
        self.pause_reading()

    def release(self) -> None:
        self._is_held = False
        self.resume_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless it is held."""
        if not self._is_held:
            super().resume_reading()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Pipelined requests are parsed and answered one after the other.

    A request that is not complete in time is answered with 408, one whose head is too large with 431, one whose URL
    is too long with 414; all close the connection. A client that does not read its answer is disconnected, which
    aborts its request.

    Args:
        limits: of the connection.
        start_limiter: shared by all connections.
        kwargs: uvicorn's arguments of a protocol.
    """

    flow: _PausableFlowControl

    def __init__(self, *, limits: HttpLimits, start_limiter: StartLimiter, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._limits = limits
        self._start_limiter = start_limiter
        self._answer = self.app
        self.app = self._begin
        # bytes of the head's parsed parts, and bytes received before its end, since the parser reports whole headers
        self._head_bytes = self._unparsed_head_bytes = 0
        self._is_head = False
        # whether a request has arrived whole and nothing of the next one
        self._is_complete = False
        # of a body whose length was declared
        self._num_body_bytes_left = 0
        # pipelined data, behind a request that is not answered yet
        self._waiting = bytearray()
        self._start = 0.0
        self._num_received = 0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # set once a request was refused: further data is discarded
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PausableFlowControl(transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        self._waiting.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse up to the end of a request that must be answered first, and buffer the rest."""
        num_parsed = self._parse(data)
        if num_parsed == len(data) or self._is_refused():
            return
        self._waiting += data[num_parsed:]
        if len(self._waiting) > _MAX_WAITING_BYTES:
            self.flow.hold()

    async def _begin(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application when the request may start, unless its client has disconnected."""
        cycle = self.cycle
        if scope["path"] not in _AT_ONCE:
            await self._start_limiter.enter()
        if not cycle.disconnected:
            scope[DIRECT_SEND] = send
            try:
                await self._answer(scope, receive, send)
            finally:
                # `send` is a method of what has the scope: without the cycle both are freed now
                scope.pop(DIRECT_SEND, None)

    def on_response_complete(self) -> None:
        """Parse the buffered pipelined data."""
        super().on_response_complete()
        if self._waiting and not self._is_refused():
            del self._waiting[: self._parse(self._waiting)]
            if len(self._waiting) <= _MAX_WAITING_BYTES:
                self.flow.release()

    def _parse(self, data: bytes | bytearray) -> int:
        """Parse up to the end of a request that is not answered yet; returns how many bytes were parsed.

        The data is split so that each call of the parser contains the end of at most one request.
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
        """Parse, then check the head's size and update the timeout."""
        was_head = self._is_head
        self._is_complete = False
        super().data_received(data)
        if self._is_refused():
            return
        if was_head and self._is_head:
            self._unparsed_head_bytes += len(data)
            if self._unparsed_head_bytes > self._limits.max_head_bytes:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._head_message())
                return
        if self._is_complete:
            self._stop_reading_timer()
        elif self._read_timer is None:
            self._await_request()
        elif self.cycle is None or not self.cycle.response_complete:
            # not for the body of a request that has been answered already: it is discarded, and gets no more time
            self._num_received += len(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_head, self._is_complete, self._head_bytes, self._unparsed_head_bytes = True, False, 0, 0

    def on_url(self, url: bytes) -> None:
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
            # no upgrade is supported, and the parser stops here
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes_left = max(self._num_body_bytes_left - len(body), 0)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_complete, self._num_body_bytes_left = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, or a head that exceeds the limits."""
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
        """Start the timeout of a client that does not read its answer."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._limits.client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, or abort it later if the client has not read the end of its answer."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.loop.call_later(self._limits.client_timeout_s, self.transport.abort)
        else:
            self._close_socket()

    def _close_socket(self) -> None:
        """Abort a closed TLS connection after a while.

        Its socket would otherwise stay open until the client sends close_notify, and the client's next request would
        be lost.
        """
        if not self.transport.can_write_eof():
            self.loop.call_later(_CLOSE_NOTIFY_S, self.transport.abort)

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
        """Start the timeout of a request."""
        self._start, self._num_received = self.loop.time(), 0
        self._read_timer = self.loop.call_later(self._limits.client_timeout_s, self._check_request)

    def _check_request(self) -> None:
        """Refuse the request if its time is over, else check again later."""
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
        """Send an error and close; only close if the application's answer has begun."""
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
        """Whether further data is discarded."""
        return self._linger_timer is not None or self.transport.is_closing()

    def _close_when_read(self) -> None:
        """Shut down the write side, and close when the client does, or after a while."""
        # TLS connections cannot be half-closed
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        self.flow.release()
        if self.cycle is not None and not self.cycle.response_complete:
            # ends the application's wait for the rest of the body
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
