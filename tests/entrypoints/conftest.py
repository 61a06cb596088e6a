"""Servers shared by the tests of this directory: started once, with a tiny random model in float32."""

from __future__ import annotations

import gzip
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.server import GENERATE_SERVER, OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

ENGINE_FLAGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "32M", "--max-num-seqs", "64"]
# of `guarded_server`
KEY = "a secret"
# of `keyed_server`
ORIGIN = "https://a.example"


@pytest.fixture(scope="session")
def tiny_dir() -> str:
    """A tiny Qwen2 with random weights."""
    return tiny_model("qwen2")


@pytest.fixture(scope="session")
def openai_server(tiny_dir: str) -> Iterator[Server]:
    """The OpenAI-compatible server."""
    with running(
        OPENAI_SERVER, ["--model", tiny_dir, "--served-model-name", "tiny", "alias", *ENGINE_FLAGS]
    ) as server:
        yield server


# A request that no machine finishes while a test looks at it: the tiny model makes thousands of tokens a second.
LONG_TOKENS = 30_000
LONG_FLAGS = [*ENGINE_FLAGS, "--max-model-len", "32768", "--kv-cache-memory-bytes", "256M"]
LONG_ENV = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}


@pytest.fixture(scope="session")
def patient_server(tiny_dir: str) -> Iterator[Server]:
    """The OpenAI-compatible server whose requests may be long, and are short unless they say more; it logs them, and
    allows 8 sequences of a request.

    Nothing that is asked of it fills the context of what is asked next.
    """
    flags = ["--served-model-name", "tiny", "alias", "--override-generation-config", '{"max_new_tokens": 8}']
    flags += ["--enable-log-requests", "--max-sequences-per-request", "8"]
    with running(OPENAI_SERVER, ["--model", tiny_dir, *flags, *LONG_FLAGS], LONG_ENV) as server:
        yield server


@pytest.fixture(scope="session")
def compact_server(tiny_dir: str) -> Iterator[Server]:
    """The OpenAI-compatible server that reads tool calls, and writes JSON without whitespace.

    A model of random weights would fill JSON with whitespace.
    """
    flags = ["--structured-outputs-config", '{"disable_any_whitespace": true}', "--num-scheduler-steps", "4"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with running(
        OPENAI_SERVER, ["--model", tiny_dir, "--served-model-name", "tiny", *flags, *ENGINE_FLAGS]
    ) as server:
        yield server


@pytest.fixture(scope="session")
def trace_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where `developer_server` writes the traces of its worker."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="session")
def developer_server(tiny_dir: str, trace_dir: pathlib.Path) -> Iterator[Server]:
    """The OpenAI-compatible server with developers' routes, a prefix cache, priorities and several steps at once.

    Tests leave it awake and resumed.
    """
    flags = ["--served-model-name", tiny_dir, "tiny", "--block-size", "16", "--enable-prefix-caching"]
    flags += ["--enable-prompt-tokens-details", "--enable-sleep-mode", "--scheduling-policy", "priority"]
    flags += ["--num-scheduler-steps", "4"]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_TORCH_PROFILER_DIR": str(trace_dir)}
    with running(OPENAI_SERVER, ["--model", tiny_dir, *flags, *ENGINE_FLAGS], env) as server:
        yield server


class Collector(http.server.ThreadingHTTPServer):
    """A collector of OpenTelemetry traces over HTTP.

    Attributes:
        spans: all that came so far.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.spans: list[Span] = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _CollectorHandler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where `guarded_server` sends its traces."""
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def guarded_server(tiny_dir: str, collector: Collector) -> Iterator[Server]:
    """The OpenAI-compatible server with a key and with what is off by default."""
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
    flags += [
        "--enable-server-load-tracking",
        "--enable-tokenizer-info-endpoint",
        "--enable-log-requests",
        "--enable-log-outputs",
    ]
    flags += ["--sse-keep-alive-interval", "0.5", "--disable-access-log-for-endpoints", "/ping, /v1/models"]
    flags += ["--middleware", "tests.failing_middleware.FailingMiddleware"]
    flags += ["--otlp-traces-endpoint", collector.url, "--collect-detailed-traces", "model,worker"]
    env = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    }
    with running(
        OPENAI_SERVER,
        ["--model", tiny_dir, "--served-model-name", "tiny", "--api-key", KEY, *flags, *ENGINE_FLAGS],
        env,
    ) as server:
        yield server


@pytest.fixture(scope="session")
def keyed_server(tiny_dir: str) -> Iterator[Server]:
    """The OpenAI-compatible server with small limits for long requests, two keys, and one origin that browsers may
    call it from.
    """
    flags = ["--model", tiny_dir, "--served-model-name", "tiny", *LONG_FLAGS, "--max-body-bytes", "8K"]
    flags += ["--h11-max-header-count", "20", "--client-timeout-s", "1", "--api-key", "first", "--api-key", "second"]
    flags += ["--root-path", "/v", "--allowed-origins", json.dumps([ORIGIN]), "--allow-credentials"]
    flags += ["--allowed-methods", '["POST"]', "--allowed-headers", '["Authorization"]']
    with running(OPENAI_SERVER, flags, LONG_ENV) as server:
        yield server


@pytest.fixture(scope="session")
def generate_server(tiny_dir: str) -> Iterator[Server]:
    """The /generate server, which allows 70 sequences of a request, some more than run at once."""
    flags = ["--model", tiny_dir, "--max-sequences-per-request", "70", *ENGINE_FLAGS]
    with running(GENERATE_SERVER, flags) as server:
        yield server


@pytest.fixture
def http(openai_server: Server) -> Iterator[httpx.Client]:
    """An HTTP client of the OpenAI-compatible server."""
    with httpx.Client(base_url=openai_server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(openai_server: Server) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{openai_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
