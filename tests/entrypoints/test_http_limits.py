"""What clients may send, and how slowly: sizes, times, keys and origins, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import re
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ascend_vllm.args.tables.server import FrontendArgs, GenerateServerArgs
from ascend_vllm.entrypoints.http import protocol
from ascend_vllm.entrypoints.http.errors import install_error_handlers
from ascend_vllm.entrypoints.http.launcher import bind
from ascend_vllm.entrypoints.http.server import HttpServer
from ascend_vllm.entrypoints.http.streaming import ClientDisconnectedError, StreamResponse
from ascend_vllm.errors import ConfigError
from tests.certificates import make_certificates
from tests.entrypoints.conftest import ORIGIN
from tests.server import Server, is_idle, metric, wait_until

MEBIBYTE = b"x" * (1 << 20)


class Echo:
    """An application that counts, and remembers what became of its requests.

    Attributes:
        lost: requests whose client went away before the body was whole.
        closed: set when a stream has ended, in whatever way.
    """

    def __init__(self) -> None:
        self.lost = 0
        self.closed = asyncio.Event()
        self.app = FastAPI()
        install_error_handlers(self.app)
        self.app.add_api_route("/size", self.size, methods=["POST"])
        self.app.add_api_route("/much", self.much)
        self.app.add_api_route("/slowly", self.slowly, methods=["POST"])
        self.app.add_exception_handler(ClientDisconnectedError, self.gone)

    async def size(self, http: Request) -> Response:
        return Response(str(len(await http.body())))

    async def much(self) -> Response:
        """More than all buffers between a server and a client hold."""

        async def pieces() -> AsyncGenerator[bytes, None]:
            for _ in range(64):
                yield MEBIBYTE

        async def close() -> None:
            self.closed.set()

        return StreamResponse(pieces(), None, close)

    async def slowly(self, http: Request) -> Response:
        """An answer that takes longer than a client may."""
        await http.body()

        async def pieces() -> AsyncGenerator[bytes, None]:
            for _ in range(5):
                await asyncio.sleep(0.2)
                yield b"x"

        async def close() -> None:
            self.closed.set()

        return StreamResponse(pieces(), None, close)

    async def gone(self, _http: Request, _error: Exception) -> Response:
        self.lost += 1
        return Response(status_code=499)


class Door:
    """A server of `Echo` on a socket.

    Attributes:
        echo: what is served.
        port: where.
    """

    def __init__(self, echo: Echo, port: int) -> None:
        self.echo = echo
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, data: bytes) -> bytes:
        """All that comes until the server closes the connection."""
        reader, writer = await self.connect()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def opened(**flags: Any) -> AsyncGenerator[Door, None]:
    echo = Echo()
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        args = GenerateServerArgs(host="127.0.0.1", **flags)
        server = HttpServer(echo.app, args, sock, log_level="info", access_log=False)
        task = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield Door(echo, sock.getsockname()[1])
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 10)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and message of an error answer in JSON."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    status = int(head.split()[1])
    content = json.loads(body)
    assert content["error"]["code"] == content["code"] == status
    assert content["error"]["message"] == content["message"]
    return status, content["message"]


# ---- bodies --------------------------------------------------------------------------------------------------


async def test_a_body_may_be_as_large_as_the_limit_and_no_larger() -> None:
    async with opened(max_body_bytes=1000) as door, httpx.AsyncClient(timeout=60) as http:
        url = f"http://127.0.0.1:{door.port}/size"

        async def chunks(count: int) -> AsyncGenerator[bytes, None]:
            for _ in range(count):
                yield b"x" * 100

        assert (await http.post(url, content=b"x" * 1000)).text == "1000"
        assert (await http.post(url, content=chunks(10))).text == "1000"
        for content in (b"x" * 1001, chunks(11)):
            response = await http.post(url, content=content)
            assert response.status_code == 413
            assert "--max-body-bytes" in response.json()["error"]["message"]
            assert response.json()["error"]["param"] == "body"
        assert (await http.post(url, content=b"")).text == "0"


async def test_a_body_that_is_too_large_is_refused_before_it_is_sent() -> None:
    async with opened(max_body_bytes=1000) as door:
        reader, writer = await door.connect()
        head = post("/size", b"x" * 2000, "Expect: 100-continue").partition(b"x" * 2000)[0]
        writer.write(head)
        assert (await asyncio.wait_for(reader.readline(), 30)).startswith(b"HTTP/1.1 413")
        writer.close()


async def test_a_refused_connection_goes_on() -> None:
    async with opened(max_body_bytes=1000) as door:
        answer = await door.ask(post("/size", MEBIBYTE) + post("/size", b"abc", "Connection: close"))
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer.endswith(b"\r\n\r\n3")


# ---- heads ---------------------------------------------------------------------------------------------------


async def test_the_number_of_headers_is_limited() -> None:
    async with opened(h11_max_header_count=20) as door:
        # Host, Content-Length and Connection come with it
        few = [f"X-{number}: y" for number in range(17)]
        assert (await door.ask(post("/size", b"abc", "Connection: close", *few))).endswith(b"3")
        status, message = error_of(await door.ask(post("/size", b"abc", "Connection: close", "X: y", *few)))
        assert status == 431
        assert "--h11-max-header-count" in message


async def test_the_size_of_a_head_is_limited() -> None:
    async with opened(h11_max_incomplete_event_size=1000) as door:
        assert (await door.ask(post("/size", b"abc", "Connection: close", "X: " + "y" * 800))).endswith(b"3")
        status, message = error_of(await door.ask(post("/size", b"abc", "X: " + "y" * 1000)))
        assert status == 431
        assert "--h11-max-incomplete-event-size" in message
        assert error_of(await door.ask(post("/size?" + "y" * 1000, b"abc")))[0] == 431


async def test_a_client_that_goes_on_sending_can_read_why_it_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_LINGER_S", 60.0)
    loop = asyncio.get_running_loop()
    async with opened(h11_max_incomplete_event_size=1000) as door:
        with socket.create_connection(("127.0.0.1", door.port)) as sock:
            sock.setblocking(False)
            await loop.sock_sendall(sock, post("/size", b"abc", "X: " + "y" * 1000))
            answer = await loop.sock_recv(sock, 1)
            # the server has refused: were the connection closed, the first of these would be answered with a reset
            for _ in range(10):
                await asyncio.sleep(0.001)
                await loop.sock_sendall(sock, b"y" * 1000)
            while data := await loop.sock_recv(sock, 65536):
                answer += data
        assert error_of(answer)[0] == 431


async def test_a_header_without_an_end_is_limited() -> None:
    async with opened(h11_max_incomplete_event_size=1000) as door:
        reader, writer = await door.connect()
        answer = asyncio.create_task(reader.read())
        writer.write(b"POST /size HTTP/1.1\r\nX: ")
        for _ in range(100):
            await asyncio.sleep(0.005)
            if answer.done():
                break
            writer.write(b"y" * 100)
        assert error_of(await asyncio.wait_for(answer, 10))[0] == 431
        writer.close()


async def test_defaults_let_large_heads_pass() -> None:
    async with opened() as door:
        lines = [f"X-{number}: {'y' * 15_000}" for number in range(250)]
        for headers in (["X: " + "y" * (1 << 20)], lines):
            answer = await door.ask(post("/size", b"abc", "Connection: close", *headers))
            assert answer.endswith(b"\r\n\r\n3")
        many = [f"X-{number}: y" for number in range(254)]
        assert error_of(await door.ask(post("/size", b"", *many, "X: y")))[0] == 431


async def test_the_length_of_an_address_is_limited() -> None:
    """Each of many parts of it was put behind all before, and what is this long is no address for the parser."""
    async with opened() as door:
        longest = "/size?" + "a=b&" * 16_382 + "c"
        assert (await door.ask(post(longest, b"abc", "Connection: close"))).endswith(b"\r\n\r\n3")
        for path in (longest + "d", "/" + "x" * 3_900_000):
            status, message = error_of(await door.ask(post(path, b"abc")))
            assert status == 414
            assert "65535 bytes are allowed" in message


async def test_what_is_no_http_is_a_400() -> None:
    async with opened() as door:
        assert (await door.ask(b"hello\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert (await door.ask(b"POST /size HTTP/1.1\r\nContent-Length: x\r\n\r\n")).startswith(b"HTTP/1.1 400")


# ---- times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent", [b"POST /size HTTP/1.1\r\nX: y", post("/size", b"abc")[:-1], b"POST /size HTTP/1.1\r\nX: y\r\n"]
)
async def test_a_request_must_arrive_in_time(sent: bytes) -> None:
    async with opened(client_timeout_s=0.2) as door:
        start = time.monotonic()
        status, message = error_of(await door.ask(sent))
        assert status == 408
        assert "--client-timeout-s" in message
        assert 0.2 <= time.monotonic() - start < 5


async def test_a_client_that_says_nothing_is_disconnected() -> None:
    async with opened(client_timeout_s=0.2) as door:
        assert await door.ask(b"") == b""
        assert await door.ask(b"\r\n") == b""


async def test_bytes_that_drip_give_no_more_time() -> None:
    async with opened(client_timeout_s=0.3) as door:
        reader, writer = await door.connect()
        answer = asyncio.create_task(reader.read())
        start = time.monotonic()
        for byte in post("/size", b"abc"):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)
            if answer.done():
                break
        assert error_of(await asyncio.wait_for(answer, 10))[0] == 408
        assert time.monotonic() - start < 5
        writer.close()


async def test_a_body_that_arrives_slowly_but_steadily_is_taken() -> None:
    async with opened(client_timeout_s=0.3) as door:
        reader, writer = await door.connect()
        body = b"x" * 20_000
        request = post("/size", body, "Connection: close")
        start = time.monotonic()
        for index in range(0, len(request), 2000):
            writer.write(request[index : index + 2000])
            await asyncio.sleep(0.08)
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"20000")
        assert time.monotonic() - start > 0.6
        writer.close()


async def test_the_application_hears_of_a_body_that_never_came() -> None:
    async with opened(client_timeout_s=0.2) as door:
        assert error_of(await door.ask(post("/size", b"abc")[:-1]))[0] == 408
        _, writer = await door.connect()
        writer.write(post("/size", b"abc")[:-1])
        await writer.drain()
        writer.close()
        for _ in range(500):
            if door.echo.lost == 2:
                break
            await asyncio.sleep(0.01)
        assert door.echo.lost == 2


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    async with opened(client_timeout_s=0.3) as door:
        _, writer = await door.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(door.echo.closed.wait(), 10)
        writer.close()


async def test_a_client_that_reads_gets_all_of_it() -> None:
    async with opened(client_timeout_s=0.3) as door, httpx.AsyncClient() as http:
        response = await http.get(f"http://127.0.0.1:{door.port}/much")
        assert len(response.content) == 64 << 20


async def test_a_long_answer_takes_the_time_it_needs() -> None:
    async with opened(client_timeout_s=0.3) as door:

        async def ask_and_send(more: bytes) -> None:
            reader, writer = await door.connect()
            writer.write(post("/slowly", b"abc"))
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(more)
            answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
            assert answer.count(b"1\r\nx\r\n") == 5
            writer.close()

        # an empty line after the request, as old clients send it, and the head of the next one begin nothing
        await asyncio.gather(*map(ask_and_send, (b"", b"\r\n", b"POST /size HTTP/1.1\r\n")))


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "1")
    async with opened() as door:
        start = time.monotonic()
        assert (await door.ask(post("/size", b"abc"))).endswith(b"3")
        # a second more than was asked for: a client that keeps connections as long would else ask one that is closing
        assert 2 <= time.monotonic() - start < 5
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "soon")
    with pytest.raises(ConfigError, match="VLLM_HTTP_TIMEOUT_KEEP_ALIVE must be a whole number of seconds"):
        async with opened():
            pass


async def test_clients_notice_that_an_idle_connection_with_tls_was_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """One that reads an answer late has it when the server has closed the connection, and asks again."""
    monkeypatch.setenv("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "1")
    make_certificates(tmp_path)
    trust = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    files = {f"ssl_{kind}file": str(tmp_path / f"server.{end}") for kind, end in (("key", "key"), ("cert", "pem"))}
    async with (
        opened(**files) as door,
        httpx.AsyncClient(base_url=f"https://127.0.0.1:{door.port}", verify=trust) as http,
    ):
        async with http.stream("POST", "/slowly", content=b"abc") as answer:
            await asyncio.wait_for(door.echo.closed.wait(), 10)
            # two seconds of keeping it, and what closing takes
            await asyncio.sleep(3.5)
            assert await answer.aread() == b"xxxxx"
        assert (await http.post("/size", content=b"abc")).text == "3"


@pytest.mark.parametrize(
    "name", ["h11_max_incomplete_event_size", "h11_max_header_count", "max_body_bytes", "client_timeout_s"]
)
def test_limits_must_be_above_0(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for args in (FrontendArgs, GenerateServerArgs):
        args(**{name: 1}).check()  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{flag} must be above 0, got 0."):
            args(**{name: 0}).check()  # type: ignore[arg-type]


# ---- the whole server ----------------------------------------------------------------------------------------


@pytest.fixture
def browser(keyed_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=keyed_server.url, timeout=30, headers={"Origin": ORIGIN}) as client:
        yield client


def test_every_key_opens_and_nothing_like_it(browser: httpx.Client) -> None:
    for key in ("first", "second"):
        assert browser.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    wrong = ["Bearer", "Bearer firs", "Bearer firstt", "Bearer first second", "bearer first", "first"]
    for value in [*wrong, "Bearer FIRST", "Basic first", "Bearer \xe9", "Bearer " + "x" * 10_000]:
        response = browser.get("/v1/models", headers={"Authorization": value.encode("latin-1")})
        assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"}), value
    assert browser.get("/v1/../v1/models").status_code == 401
    assert browser.get("/%76%31/models").status_code == 401
    # behind a prefix that the path begins with, and a slash more than it needs
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for path in ("/v1/completions", "/v/v1/completions", "/v//v1/completions", "/v1//completions"):
        assert browser.post(path, json=body).status_code == 401, path
    for path in ("/v1/completions", "/v/v1/completions"):
        assert browser.post(path, json=body, headers={"Authorization": "Bearer first"}).status_code == 200, path


def test_origins(browser: httpx.Client) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    response = browser.options("/v1/completions", headers=ask)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert response.headers["access-control-allow-credentials"] == "true"
    assert response.headers["access-control-allow-methods"] == "POST"
    for wrong in (
        {"Origin": "https://b.example"},
        {"Access-Control-Request-Method": "PUT"},
        {"Access-Control-Request-Headers": "x-other"},
    ):
        assert browser.options("/v1/completions", headers=ask | wrong).status_code == 400, wrong
    other = browser.get("/version", headers={"Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
    # errors too may be read by the page that caused them
    for answer in (browser.get("/v1/models"), browser.get("/nowhere")):
        assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_limits_of_the_whole_server(keyed_server: Server, browser: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "x" * 9000, "max_tokens": 1}
    assert browser.post("/v1/completions", json=body).status_code == 401
    browser.headers["Authorization"] = "Bearer first"
    response = browser.post("/v1/completions", json=body)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "RequestEntityTooLargeError"
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert browser.post("/tokenize", json=body).status_code == 413
    assert browser.get("/health", headers={f"X-{number}": "y" for number in range(20)}).status_code == 431
    assert browser.post("/v1/completions", json=body | {"prompt": "x"}).status_code == 200
    with socket.create_connection(("127.0.0.1", keyed_server.port), timeout=30) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 408")


def test_a_client_that_does_not_read_frees_its_blocks(keyed_server: Server, browser: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "seed": 1, "ignore_eos": True}
    # many sequences with log-probabilities make the answer long, so that the buffers are soon full
    data = json.dumps(body | {"stream": True, "logprobs": 20, "n": 16}).encode()
    with socket.socket() as sock:
        # a small window: what a client does not read has to wait in the server
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", keyed_server.port))
        sock.sendall(post("/v1/completions", data, "Authorization: Bearer first", "Content-Type: application/json"))
        assert wait_until(lambda: metric(browser, "num_requests_running") > 0)
        assert wait_until(lambda: is_idle(browser), 60), browser.get("/metrics").text
    aborted = re.search(
        r'^vllm:request_success_total\{.*"abort".*\} (\S+)$', browser.get("/metrics").text, re.MULTILINE
    )
    assert aborted is not None and float(aborted[1]) >= 1
