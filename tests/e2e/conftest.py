"""A server with the demo model in float32, shared by the tests of this directory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server import OPENAI_SERVER, Server, running


@pytest.fixture(scope="session")
def demo_server(demo_model_dir: str) -> Iterator[Server]:
    """The OpenAI-compatible server with the demo model, as a user starts it."""
    flags = ["--model", "demo", "--dtype", "float32", "--kv-cache-memory-bytes", "256M"]
    with running(OPENAI_SERVER, flags) as server:
        yield server
