"""Responses whose work is cancelled when the client disconnects.

Starlette's streaming response takes two tasks and a cancel scope, and may notice a disconnect only at the next write.
Here one listener per request notices it at once, and cancels the work, which aborts the request in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ascend_vllm.engine.text_threads import SHORT
from ascend_vllm.entrypoints.http.request_ids import claims_of

T = TypeVar("T")

# JSON of server-sent events
encode_json = msgspec.json.Encoder().encode

# a comment, which clients of server-sent events skip
KEEP_ALIVE = b": keep-alive\n\n"
# key of a scope: the server's own `send`, for the parts of a body, which no middleware of this package looks at
DIRECT_SEND = "ascend_vllm.direct_send"
# generators of an answer that are started in one iteration of the event loop
_STARTED_AT_ONCE = 16


class ClientDisconnectedError(Exception):
    """The client closed the connection before its answer was complete."""


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnectedError: it did.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def unless_gone(http: Request | None, size: int, work: Awaitable[T]) -> T:
    """The result of work on a text; for a long text it is cancelled if the client disconnects.

    Args:
        http: the client's request; None: the work is never cancelled.
        size: of the text, in characters.

    Raises:
        ClientDisconnectedError: the client disconnected.
    """
    if http is None or size <= SHORT:
        return await work
    return await run_unless_disconnected(http.receive, work)


class StreamResponse(Response):
    """A response whose body comes from an async generator of byte strings.

    Args:
        body: the chunks; it sends errors as chunks, too.
        media_type: content-type, or None for none.
        on_close: called at the end in any case, even if the body was never started.
        on_end: called after the body's last chunk, before the end of the response is sent.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        media_type: str | None,
        on_close: Callable[[], Awaitable[None]],
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._body = body
        self._on_close = on_close
        self._on_end = on_end
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache"} if media_type else None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send head and body, or stop when the client disconnects."""
        try:
            with contextlib.suppress(ClientDisconnectedError):
                await run_unless_disconnected(receive, self._send(send, scope.get(DIRECT_SEND, send)))
        finally:
            await self._body.aclose()
            await self._on_close()

    async def _send(self, send: Send, send_part: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._body:
            await send_part({"type": "http.response.body", "body": data, "more_body": True})
        if self._on_end is not None:
            self._on_end()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class WholeChainMiddleware:
    """Passes every part of an answer through the middleware inside of this, which may look at bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.pop(DIRECT_SEND, None)
        await self._app(scope, receive, send)


async def with_keep_alive(body: AsyncGenerator[bytes, None], interval_s: float) -> AsyncGenerator[bytes, None]:
    """The chunks of a body, and a comment of server-sent events whenever none came for `interval_s`."""
    waiting: asyncio.Future[bytes] | None = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(anext(body))
            done, _ = await asyncio.wait((waiting,), timeout=interval_s)
            if not done:
                yield KEEP_ALIVE
                continue
            try:
                data = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield data
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await body.aclose()


async def merge(generators: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several generators as they come, each with its generator's index; all are closed at the end.

    A generator runs at most one item ahead of the consumer, so that a slow consumer holds all of them back.
    """
    if len(generators) == 1:
        async with contextlib.aclosing(generators[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=1)
    pumps = []
    try:
        for index, generator in enumerate(generators):
            pumps.append(asyncio.ensure_future(_pump(index, generator, queue)))
            # starting one runs the checks of its request: let other tasks run in between
            if index % _STARTED_AT_ONCE == _STARTED_AT_ONCE - 1:
                await asyncio.sleep(0)
        async for pair in _drain(queue, len(pumps)):
            yield pair
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    generator: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | BaseException | None],
) -> None:
    """Put a generator's items into the queue, then None, or the exception that it raised."""
    try:
        async with contextlib.aclosing(generator) as items:
            async for item in items:
                await queue.put((index, item))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)


async def _drain(
    queue: asyncio.Queue[tuple[int, T] | BaseException | None], num_running: int
) -> AsyncIterator[tuple[int, T]]:
    while num_running:
        item = await queue.get()
        if item is None:
            num_running -= 1
        elif isinstance(item, BaseException):
            raise item
        else:
            yield item


async def collect(generators: Sequence[AsyncGenerator[T, None]]) -> list[T]:
    """The final outputs, in the order of the prompts."""
    async with contextlib.aclosing(merge(generators)) as outputs:
        finals = {index: output async for index, output in outputs}
    return [finals[index] for index in range(len(generators))]


async def open_stream(
    http: Request,
    generators: Sequence[AsyncGenerator[T, None]],
    shape: Callable[[AsyncGenerator[tuple[int, T], None]], AsyncGenerator[bytes, None]],
    interval_s: float,
) -> StreamResponse:
    """A stream of events, which starts only after the first output.

    So a request that the engine refuses, for example because its queue is full, gets an error status.

    Args:
        http: the request; the stream ends if its client disconnects.
        generators: the outputs of each prompt, or events made from them.
        shape: makes the stream from the merged outputs, each with its prompt's index.
        interval_s: seconds without output after which a comment is sent; 0: never.

    Raises:
        RequestError: the engine refused the request.
    """
    outputs = merge(generators)
    first = asyncio.ensure_future(anext(outputs))
    try:
        # with keep-alive comments the answer starts after the first interval even without an output
        await run_unless_disconnected(http.receive, asyncio.wait((first,), timeout=interval_s or None))
        if first.done():
            first.result()
    except BaseException:
        await _close(first, outputs)
        raise
    body = shape(_chain(first, outputs))
    if interval_s:
        body = with_keep_alive(body, interval_s)
    return StreamResponse(body, "text/event-stream", lambda: _close(first, outputs), on_end=claims_of(http).release)


async def _chain(
    first: asyncio.Future[tuple[int, T]], rest: AsyncGenerator[tuple[int, T], None]
) -> AsyncGenerator[tuple[int, T], None]:
    yield await first
    async for item in rest:
        yield item


async def _close(first: asyncio.Future[tuple[int, T]], rest: AsyncGenerator[tuple[int, T], None]) -> None:
    """Close the generators, even while the first output is awaited."""
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await rest.aclose()
