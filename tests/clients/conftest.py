"""The environment of the clients, and the server that they all talk to."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server import OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

PROGRAMS = pathlib.Path(__file__).parent / "programs"
FLAGS = ["--served-model-name", "tiny", "--dtype", "float32", "--kv-cache-memory-bytes", "32M"]
# a model of random weights would write white space for ever
COMPACT = ["--structured-outputs-config", '{"disable_any_whitespace": true}']
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
# what these libraries would otherwise fetch, report or keep
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
    "NO_PROXY": "*",
}


@pytest.fixture(scope="session")
def client_command(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a command of the clients' environment; gives what it prints."""
    programs = pathlib.Path(sys.prefix) / "clients" / "bin"
    if not programs.is_dir():
        pytest.fail("the clients are not installed: `make test` does it, or `make clients` alone")
    home = tmp_path_factory.mktemp("clients")

    def run(command: str, *arguments: str) -> str:
        env = os.environ | OFFLINE | {"HOME": str(home), "HF_HOME": str(home / "hf")}
        env.pop("PYTHONPATH", None)
        done = subprocess.run(
            [str(programs / command), *arguments], capture_output=True, text=True, env=env, cwd=home, timeout=300
        )
        assert done.returncode == 0, (
            f"{command} ended with {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        )
        return done.stdout

    return run


@pytest.fixture(scope="session")
def client_program(client_command: Callable[..., str], clients_server: Server) -> Callable[[str], Any]:
    """Runs one of the programs against the server; gives the JSON on its last line."""

    def run(name: str) -> Any:
        output = client_command("python", str(PROGRAMS / name), clients_server.url)
        return json.loads(output.strip().splitlines()[-1])

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
