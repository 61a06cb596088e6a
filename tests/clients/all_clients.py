"""Every client, each in an environment of its own, against servers of the demo model: `make test-clients`.

Not among the ordinary tests, whose files begin with test_: the environments take gigabytes.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.clients import checks
from tests.clients.conftest import FLAGS, TOOLS
from tests.server import OPENAI_SERVER, Server, running

# what each program shows: names of checks.CHECKS
CLIENTS = {
    "anthropic_node": "chat stream tool counted",
    "anthropic_python": "chat stream tool counted",
    "dspy": "chat structured",
    "guidellm": "benchmark",
    "haystack": "chat stream tool structured embedding",
    "hugging_face": "chat stream tool structured",
    "instructor": "structured",
    "langchain": "brief finish_reason chat usage stream completion tool structured embedding",
    "litellm": "finish_reason chat usage stream completion tool structured embedding",
    "llama_index": "chat stream completion tool structured embedding",
    "openai_agents": "chat stream responses tool structured",
    "openai_node": "models chat stream responses completion tool structured embedding",
    "openai_python": "models chat stream responses completion tool structured embedding",
    "outlines": "chat stream structured",
    "pydantic_ai": "chat stream tool structured",
    "vercel_ai": "chat stream tool structured embedding",
}
POOLING = ["--runner", "pooling", "--convert", "embed"]


@pytest.fixture(scope="session")
def servers(demo_model_dir: str) -> Iterator[tuple[Server, Server]]:
    """One that generates and one for embeddings."""
    model = ["--model", demo_model_dir, *FLAGS]
    with (
        running(OPENAI_SERVER, [*model, *TOOLS]) as server,
        running(OPENAI_SERVER, [*model, *POOLING]) as pooling_server,
    ):
        yield server, pooling_server


@pytest.fixture(scope="session")
def expected(servers: tuple[Server, Server]) -> checks.Expected:
    """Answers to plain HTTP requests."""
    return checks.ask(*(server.url for server in servers))


def test_every_program_is_listed() -> None:
    assert {path.parent.name for path in checks.HERE.glob("*/client.*")} == set(CLIENTS)


@pytest.mark.parametrize("name", CLIENTS)
def test_client(
    name: str,
    servers: tuple[Server, Server],
    expected: checks.Expected,
    demo_model_dir: str,
    clients_home: pathlib.Path,
) -> None:
    if (checks.HERE / name / "package.json").exists() and shutil.which("npm") is None:
        pytest.skip("needs Node: apt-get install nodejs npm")
    environment = pathlib.Path(sys.prefix) / "clients" / name
    if not environment.is_dir():
        pytest.fail(f"{name} is not installed: `make test-clients` does it")
    urls = [server.url for server in servers]
    seen = checks.run_client(name, environment, clients_home, *urls, checks.QUESTION, TOKENIZER=demo_model_dir)
    print(f"\n{name}:", json.dumps(seen | {"embedding": f"{len(seen.get('embedding', []))} numbers"}))
    assert set(seen) == set(CLIENTS[name].split())
    checks.check(seen, expected)
