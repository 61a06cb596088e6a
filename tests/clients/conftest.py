"""The environment of the ordinary runs' clients, and the server that they all talk to."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.clients.checks import run_command
from tests.server import OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

FLAGS = ["--served-model-name", "demo", "--dtype", "float32", "--kv-cache-memory-bytes", "32M"]
# a model of random weights would write white space for ever
COMPACT = ["--structured-outputs-config", '{"disable_any_whitespace": true}']
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


@pytest.fixture(scope="session")
def clients_home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Home and working directory of the clients."""
    return tmp_path_factory.mktemp("clients")


@pytest.fixture(scope="session")
def clients_environment() -> pathlib.Path:
    """The virtual environment of the clients of ordinary runs."""
    environment = pathlib.Path(sys.prefix) / "clients"
    if not (environment / "bin").is_dir():
        pytest.fail("the clients are not installed: `make test` does it, or `make clients` alone")
    return environment


@pytest.fixture(scope="session")
def client_command(clients_environment: pathlib.Path, clients_home: pathlib.Path) -> Callable[..., str]:
    """Runs a command of the clients' environment; gives what it prints."""

    def run(command: str, *arguments: str) -> str:
        return run_command([str(clients_environment / "bin" / command), *arguments], clients_home)

    return run


@pytest.fixture(scope="session")
def clients_model_dir() -> str:
    """A tiny model with a chat template."""
    return tiny_model("qwen2")


@pytest.fixture(scope="session")
def clients_server(clients_model_dir: str) -> Iterator[Server]:
    """The server of all clients."""
    with running(OPENAI_SERVER, ["--model", clients_model_dir, *FLAGS, *TOOLS, *COMPACT]) as server:
        yield server
