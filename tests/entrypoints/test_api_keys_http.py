"""API keys protect routes, whatever the spelling of their paths: real connections to the real application.

The engine is a scripted one, as requests without a key must not reach it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import prometheus_client
import pytest
from fastapi import FastAPI
from starlette.routing import Mount

from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.entrypoints.http.launcher import bind
from ascend_vllm.entrypoints.http.server import HttpServer
from ascend_vllm.entrypoints.openai.app import build_app
from tests.recording_middleware import RecordingMiddleware
from tests.scripted_engine import ScriptedEngine

KEY = "sesame"
PAGES = {"/docs", "/redoc", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"}
OPEN = PAGES | {"/health", "/ping", "/version", "/metrics", "/ui", "/ui/{name}"}
OPEN_PATHS = PAGES | {"/health", "/ping", "/version", "/metrics", "/ui", "/ui/resp_1"}
# what an operator, or a mistake, may give to --root-path
ROOT_PATHS = ["", "/", "//", "/llm", "/llm/", "/a/b", "/v", "/v1", "/v1/", "/v1/completions", "/health", "/metrics/"]


class Engine(ScriptedEngine):
    """A scripted engine with a health check."""

    def __init__(self, pooler: PoolerConfig | None = None) -> None:
        super().__init__(["Hi"])
        self.config = msgspec.structs.replace(
            self.config, model=msgspec.structs.replace(self.config.model, pooler=pooler)
        )
        self.metrics = prometheus_client.CollectorRegistry()

    async def check_health(self) -> None:
        pass


@pytest.fixture
def every_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables everything that adds routes."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/absent")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")


@pytest.fixture
def reached() -> Iterator[list[str | None]]:
    RecordingMiddleware.reached.clear()
    yield RecordingMiddleware.reached
    RecordingMiddleware.reached.clear()


def make_app(root_path: str = "", pooler: PoolerConfig | None = None, **flags: Any) -> FastAPI:
    args = FrontendArgs(
        api_key=[KEY],
        root_path=root_path,
        enable_tokenizer_info_endpoint=True,
        middleware=["tests.recording_middleware.RecordingMiddleware"],
        **flags,
    )
    return build_app(Engine(pooler), args)  # type: ignore[arg-type]


def methods_and_paths(app: FastAPI) -> list[tuple[str, str]]:
    """A request for each of the application's routes."""
    return [
        (method, re.sub(r"\{\w+\}", "resp_1", route.path))
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or ["GET"])
        if hasattr(route, "path")
    ]


class Connection:
    """A connection to a server.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, target: str, *headers: str) -> tuple[int, str, bytes]:
        """Status, location and body of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        lines = [f"{method} {target} HTTP/1.1", "Host: x", "Content-Length: 0", *headers, "", ""]
        writer.write("\r\n".join(lines).encode())
        head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode("latin-1")
        length = re.search(r"content-length: (\d+)", head)
        body = b"" if length is None or method == "HEAD" else await reader.readexactly(int(length[1]))
        if "connection: close" in head:
            self.close()
        location = re.search(r"location: (.*)\r", head)
        return int(head.split()[1]), location[1] if location else "", body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@contextlib.asynccontextmanager
async def connected(app: FastAPI) -> AsyncGenerator[Connection, None]:
    """A connection to a server of this application."""
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        server = HttpServer(app, FrontendArgs(host="127.0.0.1"), sock, log_level="error", access_log=False)
        task = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        connection = Connection(sock.getsockname()[1])
        try:
            yield connection
        finally:
            connection.close()
            server.should_exit = True
            await asyncio.wait_for(task, 10)


def spellings(path: str, root: str) -> list[str]:
    """Spellings with which a client may try to reach a path."""
    root = root.rstrip("/")
    inner = path[1:].replace("/", "%2f")
    return [
        path,
        f"{root}{path}",
        f"{root}/{path}",
        f"{root}{root}{path}",
        f"/{path}",
        f"{path}/",
        f"{root}{path}//",
        f"/.{path}",
        f"/x/..{path}",
        f"{root}/%2e%2e{path}",
        f"/{inner}",
        f"{root or chr(47)}%2f{inner}",
        f"{path[:1]}%{ord(path[1]):02x}{path[2:]}",
        f"{root.upper()}{path.upper()}",
        f"{path};/health",
        f"{path}?/health",
        f"/health/..{path}",
        f"http://x{root}{path}",
    ]


@pytest.mark.parametrize("root_path", ROOT_PATHS)
async def test_no_spelling_of_a_path_opens_a_guarded_route(
    root_path: str, every_route: None, reached: list[str | None]
) -> None:
    """`--root-path /llm/` with /llm//v1/completions, and `--root-path /v` with /v1/completions, once did."""
    app = make_app(root_path)
    app.root_path = root_path  # with the slash at its end
    async with connected(app) as connection:
        for method, path in dict.fromkeys(methods_and_paths(app)):
            for target in dict.fromkeys(spellings(path, root_path)):
                reached.clear()
                status, location, body = await connection.ask(method, target)
                if status == 401:
                    assert method == "HEAD" or body == b'{"error":"Unauthorized"}'
                    assert reached == [], target
                elif status == 307:  # to what is open, by a slash less
                    assert location.rstrip("/").endswith(tuple(OPEN_PATHS)), target
                else:
                    assert reached and (reached[0] in OPEN or (status, reached) == (404, [None])), (method, target)


async def test_every_route_is_there_and_opens_with_the_key(every_route: None, reached: list[str | None]) -> None:
    """The test above tries what it should, and what it tries is refused for the missing key alone."""
    pooler = PoolerConfig(task="embed", convert="embed")
    for app in (make_app(), make_app(pooler=pooler), make_app("/llm/", pooler)):
        routes = methods_and_paths(app)
        paths = {path for _, path in routes}
        assert paths >= OPEN_PATHS | {"/tokenize", "/tokenizer_info", "/load", "/openapi.json"}
        assert paths >= {"/sleep", "/collective_rpc", "/start_profile", "/v1/load_lora_adapter", "/invocations"}
        async with connected(app) as connection:
            for method, path in routes:
                opens_without = path in OPEN_PATHS
                status, _, _ = await connection.ask(method, path)
                assert (status != 401) == opens_without, (method, path)
                reached.clear()
                status, _, _ = await connection.ask(method, path, f"Authorization: Bearer {KEY}")
                assert status != 401 and len(reached) == 1, (method, path)
                status, _, _ = await connection.ask(method, path, "Authorization: Bearer wrong", f"x-api-key: {KEY}")
                assert (status != 401) == (opens_without or path.startswith("/v1/messages")), (method, path)


async def test_what_leads_to_no_route_tells_nothing_without_a_key() -> None:
    async with connected(make_app()) as connection:
        answers = {}
        for path in ("/v1/completions", "/v1/models/", "/nowhere", "/", "/v1", "/health/x", "*", "/docs/x"):
            for method in ("GET", "POST", "PUT", "DELETE", "HEAD", "TRACE", "OPTIONS"):
                answers[method, path] = await connection.ask(method, path)
        for (method, path), answer in answers.items():
            assert answer == answers[method, "/nowhere"], (method, path)
        assert answers["GET", "/nowhere"][0] == 401
        status, _, body = answers["OPTIONS", "/v1/completions"]
        assert (status, json.loads(body)["error"]["message"]) == (405, "Method Not Allowed")
        # with the key it is as it was
        key = f"Authorization: Bearer {KEY}"
        assert (await connection.ask("GET", "/nowhere", key))[0] == 404
        assert (await connection.ask("PUT", "/v1/models", key))[0] == 405
        assert (await connection.ask("GET", "/v1/completions/", key))[0] == 307
        # and so is what is open
        assert (await connection.ask("GET", "/health/"))[0] == 307
        assert (await connection.ask("HEAD", "/health"))[0] == 405
        ask = ("Origin: http://a.example", "Access-Control-Request-Method: POST")
        assert (await connection.ask("OPTIONS", "/v1/completions", *ask))[0] == 200


async def test_routes_added_later_are_guarded(reached: list[str | None]) -> None:
    """Routes of any kind that are added to the complete application need the key by default."""

    async def secret() -> str:
        return "secret"

    app = make_app()
    app.add_api_route("/later", secret)
    app.mount("/mounted", FastAPI())
    app.mount("/health/below", FastAPI())
    app.router.routes.insert(0, Mount("/v1/models/mounted", FastAPI()))
    async with connected(app) as connection:
        for path in ("/later", "/mounted/docs", "/mounted/", "/health/below/docs", "/v1/models/mounted/docs"):
            assert (await connection.ask("GET", path))[0] == 401, path
        assert reached == []
        assert (await connection.ask("GET", "/later", f"Authorization: Bearer {KEY}"))[0] == 200


async def test_a_key_for_inference_alone(every_route: None) -> None:
    """As in vLLM, but that /invocations is among them, and by their routes, not by how they are written."""
    app = make_app("/v", api_key_scope="inference")
    async with connected(app) as connection:
        for method, path in methods_and_paths(app):
            guarded = path.startswith(("/v1/", "/v2/", "/inference/", "/invocations"))
            for target in (path, f"/v{path}"):
                status, _, _ = await connection.ask(method, target)
                assert (status == 401) == guarded, (method, target)
        for path in ("//v1/models", "/v//v1/models", "/nowhere", "/v1/models/"):
            assert (await connection.ask("GET", path))[0] == 401
        assert (await connection.ask("POST", "/tokenize"))[0] == 400
