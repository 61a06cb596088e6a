"""Requests that are sent before the one in front of them is answered, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
from collections.abc import AsyncGenerator

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from ascend_vllm.args.tables.server import GenerateServerArgs
from ascend_vllm.entrypoints.http.launcher import bind
from ascend_vllm.entrypoints.http.protocol import LimitedHttpProtocol
from ascend_vllm.entrypoints.http.server import HttpServer
from ascend_vllm.entrypoints.http.streaming import StreamResponse

# far more than all the buffers between a client and a server hold
MUCH = 18 << 20


def num_requests() -> int:
    """Requests of this process that are not forgotten, those of other tests' servers among them."""
    return sum(type(thing) is RequestResponseCycle for thing in gc.get_objects())


class Application:
    """What is asked.

    Attributes:
        most_known: most requests that the server knew of at a time, as far as they were counted.
        has_begun, has_ended: of the last stream.
    """

    def __init__(self) -> None:
        self.most_known = 0
        self._num_before = num_requests()
        self.has_begun = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._num_answered = 0
        self.app = FastAPI()
        self.app.add_api_route("/echo", self.echo, methods=["GET", "POST"])
        self.app.add_api_route("/stream", self.stream)

    def num_known(self) -> int:
        """Requests that the server has parsed and not forgotten."""
        return num_requests() - self._num_before

    async def echo(self, http: Request) -> Response:
        body = await http.body()
        self._num_answered += 1
        if self._num_answered % 1000 == 1:
            self.most_known = max(self.most_known, self.num_known())
        return Response(body or http.url.query.encode())

    async def stream(self) -> Response:
        """An answer that goes on until the client goes away."""

        async def pieces() -> AsyncGenerator[bytes, None]:
            while True:
                self.has_begun.set()
                yield b"x"
                await asyncio.sleep(0.05)

        async def close() -> None:
            self.has_ended.set()

        return StreamResponse(pieces(), None, close)


@contextlib.asynccontextmanager
async def opened() -> AsyncGenerator[tuple[Application, HttpServer, int], None]:
    gc.collect()
    application = Application()
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        args = GenerateServerArgs(host="127.0.0.1")
        server = HttpServer(application.app, args, sock, log_level="error", access_log=False)
        task = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield application, server, sock.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 20)


def kept_bytes(server: HttpServer) -> int:
    """What the server has read of its one connection and not parsed."""
    (connection,) = server.server_state.connections
    assert isinstance(connection, LimitedHttpProtocol)
    return len(connection._waiting)


@pytest.mark.parametrize("first", ["/stream", "/echo"])
async def test_what_waits_behind_an_answer_is_bounded(first: str) -> None:
    """A request of 22 bytes once took kilobytes while it waited, and each answer let thousands more be read."""
    async with opened() as (application, server, port):
        loop = asyncio.get_running_loop()
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setblocking(False)
            await loop.sock_sendall(sock, f"GET {first} HTTP/1.1\r\n\r\n".encode())
            if first == "/stream":
                await application.has_begun.wait()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(loop.sock_sendall(sock, b"GET /echo HTTP/1.1\r\n\r\n" * (MUCH // 22)), 1)
            assert application.num_known() <= 2
            # a read or two of the system's buffer
            assert 0 < kept_bytes(server) < 1 << 20


async def test_ten_thousand_requests_at_once_are_answered_in_turn() -> None:
    async with opened() as (application, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in range(10_000):
            writer.write(b"GET /echo?%d HTTP/1.1\r\n\r\n" % number)
        for number in range(10_000):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(b"%d" % number)) == b"%d" % number
        writer.close()
        assert application.most_known <= 3


@pytest.mark.parametrize("seed", range(4))
async def test_requests_may_be_cut_anywhere(seed: int) -> None:
    """Bodies with declared lengths and in chunks, with what looks like the ends of requests in them."""
    rng = random.Random(seed)
    bodies = [bytes(rng.choices(b"\r\nx0 GET/", k=rng.randrange(40))) or b"z" for _ in range(60)]
    sent = b""
    for body in bodies:
        head = b"POST /echo HTTP/1.1\r\nHost: x\r\n"
        if rng.random() < 0.5:
            sent += head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        else:
            cut = rng.randrange(1, len(body) + 1)
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part)
            trailer = rng.choice([b"", b"X-Trailer: y\r\n"])
            sent += head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailer + b"\r\n"
        sent += rng.choice([b"", b"\r\n"])
    async with opened() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while sent:
            size = rng.choice([1, 2, 5, 50, 500, 5000])
            writer.write(sent[:size])
            sent = sent[size:]
            if size < 500:  # or the system joins the parts again
                await asyncio.sleep(0.001)
        for body in bodies:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert head.startswith(b"HTTP/1.1 200"), head
            assert await reader.readexactly(len(body)) == body
        writer.close()


async def test_a_client_that_leaves_requests_behind_is_noticed() -> None:
    async with opened() as (application, _, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.1\r\n\r\n" + b"GET /echo?1 HTTP/1.1\r\n\r\n" * 20)
        await asyncio.wait_for(application.has_begun.wait(), 20)
        writer.close()
        await asyncio.wait_for(application.has_ended.wait(), 20)


async def test_a_wrong_request_behind_another_does_not_cut_its_answer() -> None:
    async with opened() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /echo?first HTTP/1.1\r\n\r\nhello\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200") and b"first" in answer and b"HTTP/1.1 400" in answer
        writer.close()


async def test_an_upgrade_to_another_protocol_ends_the_connection() -> None:
    """The parser understands nothing of what comes behind: it is not read."""
    async with opened() as (_, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        upgrade = b"GET /echo?first HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"
        writer.write(upgrade + b"GET /echo?2 HTTP/1.1\r\n\r\n" * 1000)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"first") and b"connection: close" in answer
        writer.close()
