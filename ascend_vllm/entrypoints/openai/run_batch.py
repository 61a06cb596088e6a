"""Answers requests from a file without a server: ``python -m ascend_vllm.entrypoints.openai.run_batch -i IN -o OUT``.

A line of the input is a request in OpenAI's batch format, a line of the output its answer, in the same order::

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"id": "vllm-…", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}}, "error": null}

The requests are sent to the server's ASGI application in this process, so that the answers are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import secrets
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import prometheus_client
import tqdm

from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.args.parser import FlexibleArgumentParser
from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.entrypoints.demo_model import with_demo_model
from ascend_vllm.entrypoints.http import launcher
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = init_logger(__name__)

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
# most requests in the application at a time, a task each; the engine schedules them
_MAX_OPEN = 4096


class BatchRequest(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def read_requests(path: pathlib.Path) -> list[BatchRequest]:
    """Reads the requests of a file; empty lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input-file {path} cannot be read: {error}") from error
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests.append(msgspec.json.decode(line, type=BatchRequest))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--input-file {path}, line {number}: {error}") from error
    return requests


async def post(app: FastAPI, url: str, body: bytes) -> tuple[int, bytes]:
    """Sends a POST request to an ASGI application without a socket; returns status and body."""
    status, chunks = 500, []
    was_sent = False
    closed = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal was_sent
        if was_sent:
            # the client does not disconnect before it has its answer
            await closed.wait()
            return {"type": "http.disconnect"}
        was_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            chunks.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("batch", 0),
        "server": ("batch", 80),
    }
    try:
        await app(scope, receive, send)
    finally:
        closed.set()
    return status, b"".join(chunks)


async def answer(app: FastAPI, request: BatchRequest) -> dict[str, Any]:
    """The line of the output for a request."""
    response: dict[str, Any] = {"status_code": 400, "request_id": f"vllm-batch-{secrets.token_hex(16)}", "body": None}
    output = {"id": f"vllm-{secrets.token_hex(16)}", "custom_id": request.custom_id, "response": response}
    if request.url not in URLS:
        error = f"Only {', '.join(URLS[:-1])} and {URLS[-1]} are supported in the batch endpoint."
        return output | {"error": error}
    if request.body.get("stream"):
        return output | {"response": None, "error": "Request must not be sent in stream mode"}
    response["status_code"], body = await post(app, request.url, msgspec.json.encode(request.body))
    decoded = json.loads(body)
    if response["status_code"] != 200:
        return output | {"error": decoded}
    response["body"] = decoded
    return output | {"error": None}


async def answer_all(app: FastAPI, requests: Sequence[BatchRequest]) -> list[dict[str, Any]]:
    """The outputs of all requests in order; shows a progress bar."""
    room = asyncio.Semaphore(_MAX_OPEN)
    with tqdm.tqdm(total=len(requests), desc="Running batch", dynamic_ncols=True) as bar:

        async def one(request: BatchRequest) -> dict[str, Any]:
            async with room:
                output = await answer(app, request)
            bar.update(1)
            return output

        return await asyncio.gather(*map(one, requests))


def add_arguments(parser: FlexibleArgumentParser) -> None:
    """Adds the flags of this program and of the engine."""
    parser.description = "Answers a file of OpenAI requests, without a server."
    add = parser.add_argument_group("Batch").add_argument
    add("-i", "--input-file", type=pathlib.Path, required=True, help="the requests, one JSON object a line")
    add("-o", "--output-file", type=pathlib.Path, required=True, help="where the answers go, one JSON object a line")
    add("--response-role", default="assistant", help="the role of generated messages")
    add("--enable-metrics", action="store_true", help="serve Prometheus metrics while the batch runs")
    add("--url", default="0.0.0.0", help="the address of the metrics")
    add("--port", type=int, default=8000, help="the port of the metrics")
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Answers a file of requests; returns the exit code: 0, 2 for a wrong flag or input, 1 if the engine fails."""
    return launcher.exit_code_of(lambda: asyncio.run(_run(args)))


async def _run(args: argparse.Namespace) -> int:
    requests = read_requests(args.input_file)
    try:
        args.output_file.touch()
    except OSError as error:
        raise ConfigError(f"--output-file {args.output_file} cannot be written: {error}") from error
    engine_args = with_demo_model(EngineArgs.from_cli_args(args))

    from ascend_vllm.engine.async_llm import AsyncLLM
    from ascend_vllm.entrypoints.openai.app import build_app

    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        await engine.ready()
        app = build_app(engine, FrontendArgs(response_role=args.response_role))
        if args.enable_metrics:
            prometheus_client.start_http_server(args.port, args.url, engine.metrics)
            logger.info("Metrics: http://%s:%d/metrics", args.url, args.port)
        outputs = await answer_all(app, requests)
    finally:
        engine.shutdown()
    args.output_file.write_bytes(b"".join(msgspec.json.encode(output) + b"\n" for output in outputs))
    logger.info("%d answers are in %s", len(outputs), args.output_file)
    return 0


def main() -> None:
    parser = FlexibleArgumentParser()
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))


if __name__ == "__main__":
    main()
