"""The servers that get hostile requests, and long ones after them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz.probe import MODEL_NAME
from tests.server import GENERATE_SERVER, OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

FLAGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "64", "--max-model-len", "256"]
_OPENAI = ["--served-model-name", MODEL_NAME, "tiny", "--disable-log-requests", "--disable-uvicorn-access-log"]
# kind → program and flags
_SERVERS = {
    "openai": (OPENAI_SERVER, [*_OPENAI, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]),
    "pooling": (OPENAI_SERVER, [*_OPENAI, "--runner", "pooling"]),
    "generate": (GENERATE_SERVER, ["--disable-log-requests"]),
    "mindie": (GENERATE_SERVER, ["--disable-log-requests", "--generate-format", "mindie"]),
}


@pytest.fixture(scope="session")
def fuzzed_servers() -> Iterator[Callable[[str], Server]]:
    """Gives the server of a kind, which is started when it is first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def server_of(kind: str) -> Server:
            module, flags = _SERVERS[kind]
            return stack.enter_context(running(module, ["--model", tiny_model("qwen2"), *FLAGS, *flags]))

        yield server_of
