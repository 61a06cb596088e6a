"""The errors that clients get when a stopping server does not wait for them any longer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import re
import signal
import ssl
import warnings
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import Response

from ascend_vllm.args.tables.server import GenerateServerArgs
from ascend_vllm.entrypoints.generate.mindie import to_mindie_error
from ascend_vllm.entrypoints.http.errors import install_error_handlers
from ascend_vllm.entrypoints.http.launcher import bind
from ascend_vllm.entrypoints.http.server import HttpServer
from ascend_vllm.errors import ConfigError, ServerStoppingError
from tests.certificates import make_certificates
from tests.entrypoints.conftest import LONG_ENV, LONG_FLAGS, LONG_TOKENS
from tests.raw_requests import post_raw, read_events, read_rest
from tests.server import GENERATE_SERVER, OPENAI_SERVER, Server, needs_openssl, wait_until

FLAGS = [*LONG_FLAGS, "--enable-log-requests", "--shutdown-timeout", "1", "--sse-keep-alive-interval", "0.2"]
HELLO = [{"role": "user", "content": "Hello"}]
LONG: dict[str, Any] = {"model": "tiny", "temperature": 0, "ignore_eos": True}
PLACES: dict[str, dict[str, Any]] = {
    "/v1/completions": LONG | {"prompt": "Hello", "max_tokens": LONG_TOKENS},
    "/v1/chat/completions": LONG | {"messages": HELLO, "max_tokens": LONG_TOKENS},
    "/v1/responses": LONG | {"input": "Hello", "max_output_tokens": LONG_TOKENS},
    # which may end by itself: it is sent when nothing is generated any more
    "/v1/messages": LONG | {"messages": HELLO, "max_tokens": LONG_TOKENS},
}


def last_events(received: bytes) -> list[Any]:
    """The data of the last two events of a stream, as far as it is JSON, else as it is."""
    lines = [line.removeprefix("data: ") for line in received.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line.startswith("{") else line for line in lines[-2:]]


def status_and_body(received: bytes) -> tuple[int, Any]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def check_error(error: dict[str, Any]) -> None:
    assert error["type"] == "ServiceUnavailableError"
    assert "is being shut down" in error["message"]


def test_open_requests_are_told_that_the_server_ends(tiny_dir: str) -> None:
    """Their connections were once closed without an error."""
    flags = ["--model", tiny_dir, "--served-model-name", "tiny", *FLAGS]
    server = Server(OPENAI_SERVER, flags, LONG_ENV | {"VLLM_ENABLE_RESPONSES_API_STORE": "1"})
    try:
        server.wait_ready()
        streams, received = {}, {}
        background = PLACES["/v1/responses"] | {"background": True}
        for name, body in [("background", background), *PLACES.items()]:
            if name == "/v1/messages":
                core = server.engine_core()
                core.suspend()
            path = "/v1/responses" if name == "background" else name
            streams[name] = post_raw(server, path, body | {"stream": True})
            received[name] = read_events(streams[name], 3) if name != "/v1/messages" else streams[name].recv(65536)
        wholes = {path: post_raw(server, path, body) for path, body in PLACES.items()}
        assert wait_until(lambda: server.log.count("Received request ") == 9), server.log
        server.process.send_signal(signal.SIGTERM)
        for path, sock in streams.items():
            received[path] += read_rest(sock)
            # the answer's end, not a cut connection
            assert received[path].endswith(b"\r\n0\r\n\r\n"), path
        for path in ("/v1/completions", "/v1/chat/completions"):
            error, done = last_events(received[path])
            assert (done, error["error"]["code"]) == ("[DONE]", 503)
            check_error(error["error"])
        error = last_events(received["/v1/messages"])[-1]
        assert error["type"] == "error" and b"event: error\n" in received["/v1/messages"]
        check_error(error["error"])
        for path in ("/v1/responses", "background"):
            failed = last_events(received[path])[-1]
            assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
            assert failed["response"]["error"]["code"] == "server_error"
            assert "is being shut down" in failed["response"]["error"]["message"]
        for path, sock in wholes.items():
            status, body = status_and_body(read_rest(sock))
            assert status == 503, path
            check_error(body["error"])
            assert ("object" in body) == (path != "/v1/messages")
        # everybody has been told: the server need not wait until it kills it, which test_core_client.py does
        core.resume()
        assert server.wait_exit(30) == 0
        assert server.orphans() == []
        assert "The 1 s of --shutdown-timeout are over: 9 requests end early" in server.log
        assert "Traceback" not in server.log
    finally:
        server.close()


def test_the_generate_server_notices_lost_clients_and_tells_the_others_that_it_ends(tiny_dir: str) -> None:
    body = {"prompt": "Hello", "max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}
    server = Server(GENERATE_SERVER, ["--model", tiny_dir, *FLAGS[:-2]], LONG_ENV)
    try:
        server.wait_ready()
        assert f"  address   http://127.0.0.1:{server.port}/generate\n" in server.log
        # a client that leaves is no longer among those that are told
        with post_raw(server, "/generate", body | {"stream": True}) as sock:
            assert sock.recv(65536)
        assert wait_until(lambda: "Aborted request generate-" in server.log), server.log
        assert re.search(r"Received request generate-\w+: params: SamplingParams\(n=1.*max_tokens=30000", server.log)
        stream, whole = (post_raw(server, "/generate", body | {"stream": is_stream}) for is_stream in (True, False))
        assert stream.recv(65536)
        assert wait_until(lambda: server.log.count("Received request generate-") == 3)
        server.process.send_signal(signal.SIGINT)
        received = read_rest(stream)
        assert received.endswith(b"\0\r\n0\r\n\r\n")
        frame = received.removesuffix(b"\0\r\n0\r\n\r\n").rpartition(b"\r\n")[2]
        check_error(json.loads(frame)["error"])
        status, answer = status_and_body(read_rest(whole))
        assert status == 503
        check_error(answer["error"])
        assert server.wait_exit(30) == 0
    finally:
        server.close()
    status, answer = to_mindie_error(ServerStoppingError())
    assert (status, answer["type"]) == (503, "Service Unavailable")


@contextlib.asynccontextmanager
async def stopping(app: FastAPI, **flags: Any) -> Any:
    """A server of an application, told to stop afterwards; yields its port."""
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        args = GenerateServerArgs(host="127.0.0.1", **flags)
        server = HttpServer(app, args, sock, log_level="info", access_log=False)
        task = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 20)


async def test_what_is_not_in_the_engine_yet_is_refused() -> None:
    """A request that is still prepared, say its template rendered, when the time is over."""
    app, has_begun = FastAPI(), asyncio.Event()
    install_error_handlers(app)

    @app.get("/prepare")
    async def prepare() -> Response:
        has_begun.set()
        await asyncio.sleep(3600)
        return Response()

    async with stopping(app, shutdown_timeout=0.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /prepare HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(has_begun.wait(), 20)
    status, body = status_and_body(await asyncio.wait_for(reader.read(), 20))
    writer.close()
    assert status == 503
    check_error(body["error"])


@needs_openssl
async def test_nobody_speaks_less_than_tls_1_2_with_forward_secrecy(tmp_path: pathlib.Path) -> None:
    make_certificates(tmp_path)
    files = {"ssl_keyfile": str(tmp_path / "server.key"), "ssl_certfile": str(tmp_path / "server.pem")}

    async def handshake(port: int, ciphers: str, version: ssl.TLSVersion) -> tuple[str, str] | None:
        """The negotiated protocol; None: the handshake failed."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_ciphers(ciphers)
        with warnings.catch_warnings(action="ignore"):
            context.minimum_version = context.maximum_version = version
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        except (ssl.SSLError, ConnectionError):
            return None
        name, spoken, _ = writer.get_extra_info("cipher")
        writer.close()
        return name, spoken

    old, new, newest = ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
    async with stopping(FastAPI(), **files) as port:
        good = ("ECDHE-RSA-AES128-GCM-SHA256", "ECDHE-RSA-AES256-GCM-SHA384", "ECDHE-RSA-CHACHA20-POLY1305")
        for name in good:
            assert await handshake(port, name, new) == (name, "TLSv1.2")
        for name in ("AES256-GCM-SHA384", "ECDHE-RSA-AES256-SHA384", "ECDHE-RSA-AES128-SHA", "AES128-SHA"):
            assert await handshake(port, name, new) is None, name
        assert await handshake(port, "DEFAULT", newest) is not None
        assert await handshake(port, "ALL:@SECLEVEL=0", old) is None
    # the flag wins, but not over the version
    async with stopping(FastAPI(), **files, ssl_ciphers="AES256-GCM-SHA384:AES128-SHA:@SECLEVEL=0") as port:
        assert await handshake(port, "AES256-GCM-SHA384", new) == ("AES256-GCM-SHA384", "TLSv1.2")
        assert await handshake(port, good[0], new) is None
        assert await handshake(port, "ALL:@SECLEVEL=0", old) is None


def test_the_time_must_not_be_negative() -> None:
    GenerateServerArgs(shutdown_timeout=0).check()
    with pytest.raises(ConfigError, match=r"--shutdown-timeout must not be negative, got -1\."):
        GenerateServerArgs(shutdown_timeout=-1).check()
