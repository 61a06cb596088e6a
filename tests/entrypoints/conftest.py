"""Servers that the tests of this room share: started once, on a tiny random model in float32."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.server import GENERATE_SERVER, OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

ENGINE_FLAGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "32M", "--max-num-seqs", "64"]
# of `guarded_server`
KEY = "a secret"


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


@pytest.fixture(scope="session")
def guarded_server(tiny_dir: str) -> Iterator[Server]:
    """The OpenAI-compatible server with a key and with what is off by default."""
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"]
    with running(
        OPENAI_SERVER,
        ["--model", tiny_dir, "--served-model-name", "tiny", "--api-key", KEY, *flags, *ENGINE_FLAGS],
    ) as server:
        yield server


@pytest.fixture(scope="session")
def generate_server(tiny_dir: str) -> Iterator[Server]:
    """The /generate server."""
    with running(GENERATE_SERVER, ["--model", tiny_dir, *ENGINE_FLAGS]) as server:
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
