"""--max-concurrent-requests-per-key: what counts, for whom, and until when; over real connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import prometheus_client
import pytest
from fastapi import FastAPI

from ascend_vllm.args.tables.server import FrontendArgs, GenerateServerArgs
from ascend_vllm.entrypoints.generate import app as generate_app
from ascend_vllm.entrypoints.http.launcher import bind
from ascend_vllm.entrypoints.http.server import HttpServer
from ascend_vllm.entrypoints.openai.app import build_app
from ascend_vllm.errors import ConfigError
from ascend_vllm.outputs import RequestOutput
from tests.scripted_engine import ScriptedEngine

FIRST, SECOND = {"authorization": "Bearer first"}, {"authorization": "Bearer second"}
ASK: dict[str, Any] = {"prompt": "Hello", "stream": True}


class Engine(ScriptedEngine):
    """An engine that sends the first output at once, and the rest when `may_end` is set.

    Attributes:
        may_end: set when it does.
    """

    def __init__(self) -> None:
        super().__init__(["Hi", "!"])
        self.may_end = asyncio.Event()
        self.metrics = prometheus_client.CollectorRegistry()

    async def check_health(self) -> None:
        pass

    async def generate(self, prompt: Any, *arguments: Any, **more: Any) -> AsyncGenerator[RequestOutput, None]:
        ids = prompt if isinstance(prompt, dict) else {"prompt_token_ids": [1]}
        async for output in super().generate(ids, *arguments, **more):
            yield output
            await self.may_end.wait()


@contextlib.asynccontextmanager
async def client_of(app: FastAPI, address: str = "127.0.0.1") -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a server of this application."""
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        args = FrontendArgs(host="127.0.0.1", shutdown_timeout=0)
        server = HttpServer(app, args, sock, log_level="error", access_log=False)
        task = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=30) as http:
                yield http
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 20)


async def statuses_soon(http: httpx.AsyncClient, wanted: int, headers: dict[str, str]) -> bool:
    """Whether a request is answered like this, at once or as soon as the server has seen what happened before."""
    for _ in range(200):
        if (await http.get("/v1/models", headers=headers)).status_code == wanted:
            return True
        await asyncio.sleep(0.02)
    return False


async def begin(stack: contextlib.AsyncExitStack, http: httpx.AsyncClient, **more: Any) -> httpx.Response:
    """A stream that has begun."""
    response = await stack.enter_async_context(http.stream("POST", "/v1/completions", json=ASK, **more))
    assert response.status_code == 200
    return response


async def test_requests_of_a_key_are_limited_and_those_of_others_are_not() -> None:
    engine = Engine()
    args = FrontendArgs(api_key=["first", "second"], max_concurrent_requests_per_key=2)
    async with client_of(build_app(engine, args)) as http, contextlib.AsyncExitStack() as stack:  # type: ignore[arg-type]
        streams = [contextlib.AsyncExitStack() for _ in range(2)]
        for stream in streams:
            await stack.enter_async_context(stream)
            await begin(stream, http, headers=FIRST)
        # whatever is asked, and however the key is shown
        asked = [("POST", "/v1/completions", FIRST), ("GET", "/v1/models", FIRST), ("POST", "/tokenize", FIRST)]
        asked += [("POST", "/v1/messages", {"x-api-key": "first", "authorization": f"Bearer {n}"}) for n in range(3)]
        for method, path, headers in asked:
            refused = await http.request(method, path, json=ASK, headers=headers)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), path
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("TooManyRequestsError", 429)
            assert "--max-concurrent-requests-per-key" in error["message"]
        # somebody else, nobody, and those who watch the server
        assert (await http.get("/v1/models", headers=SECOND)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401
        for path in ("/health", "/metrics", "/version", "/ping"):
            assert (await http.get(path, headers=FIRST)).status_code == 200
        # a client that goes away frees a place
        await streams[0].aclose()
        assert await statuses_soon(http, 200, FIRST)
        # and so does the end of an answer, a wrong request, and one that nobody foresaw
        for _ in range(3):
            assert (await http.post("/v1/completions", json={"prompt": 1.5}, headers=FIRST)).status_code == 400
            assert (await http.post("/tokenize", json={"prompt": "x"}, headers=FIRST)).status_code == 200
            assert (await http.get("/nowhere", headers=FIRST)).status_code == 404
            engine.may_end.set()
            assert (await http.post("/v1/completions", json=ASK, headers=FIRST)).status_code == 200
            engine.may_end.clear()
        for _ in range(2):
            await begin(stack, http, headers=FIRST)
        assert (await http.get("/v1/models", headers=FIRST)).status_code == 429
        engine.may_end.set()
        assert await statuses_soon(http, 200, FIRST)


async def test_without_keys_the_address_counts() -> None:
    engine = Engine()
    app = build_app(engine, FrontendArgs(max_concurrent_requests_per_key=1))  # type: ignore[arg-type]
    async with client_of(app) as http, contextlib.AsyncExitStack() as stack:
        await begin(stack, http, headers=FIRST)
        assert (await http.get("/v1/models", headers=SECOND)).status_code == 429
        assert (await http.get("/health")).status_code == 200
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=http.base_url, transport=elsewhere) as other:
            assert (await other.get("/v1/models")).status_code == 200
        engine.may_end.set()


async def test_a_background_response_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    engine = Engine()
    app = build_app(engine, FrontendArgs(max_concurrent_requests_per_key=2))  # type: ignore[arg-type]
    async with client_of(app) as http:
        for _ in range(2):
            begun = await http.post("/v1/responses", json={"input": "Hello", "background": True})
            assert begun.json()["status"] in ("queued", "in_progress")
        assert (await http.get("/v1/models")).status_code == 429
        engine.may_end.set()
        assert await statuses_soon(http, 200, {})
        done = (await http.get(f"/v1/responses/{begun.json()['id']}")).json()
        assert done["status"] == "completed"


@pytest.mark.parametrize("form", ["vllm", "mindie"])
async def test_the_generate_server_has_the_limit_too(form: str) -> None:
    engine = Engine()
    args = GenerateServerArgs(max_concurrent_requests_per_key=1, generate_format=form)
    app = generate_app.build_app(engine, args)  # type: ignore[arg-type]
    async with client_of(app) as http, http.stream("POST", "/generate", json=ASK) as response:
        assert response.status_code == 200
        refused = await http.post("/generate", json=ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["type"] == ("TooManyRequestsError" if form == "vllm" else "Too Many Requests")
        assert (await http.get("/health")).status_code == 200
        engine.may_end.set()
        await response.aread()


def test_the_limit_must_not_be_negative() -> None:
    with pytest.raises(ConfigError, match="--max-concurrent-requests-per-key must not be negative, got -1"):
        FrontendArgs(max_concurrent_requests_per_key=-1).check()
