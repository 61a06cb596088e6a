"""The examples run as they are, from any directory; those of clients against a server."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.entrypoints.conftest import ENGINE_FLAGS
from tests.server import OPENAI_SERVER, Server, running
from tests.tiny_models import tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("offline_inference.py", [], r"Prompt: 'What does --block-size do\?'\nOutput: '"),
        ("offline_chat.py", ["Is anyone there?"], r"User: Is anyone there\?\nAssistant: "),
        (
            "offline_structured_outputs.py",
            ["--max-tokens", "64"],
            r"(?s)Output: (flag|metric)\n.*Output: 20\d\d-\d\d-\d\d\n.*Output: \{.*As a dict: \{'name'",
        ),
    ],
)
def test_offline_example(name: str, arguments: list[str], expected: str, tmp_path: pathlib.Path) -> None:
    result = run(name, ["--model", tiny_model("qwen2-tied"), "--max-tokens", "5", *arguments], tmp_path)
    assert re.search(expected, result.stdout)
    assert "Processed prompts: 100%" in result.stderr


def test_example_of_embeddings(tmp_path: pathlib.Path) -> None:
    result = run("offline_embedding.py", ["--model", tiny_model("qwen2-tied"), "The weather is fine"], tmp_path)
    lines = result.stdout.splitlines()
    assert lines[:2] == ["Question: The weather is fine", "Numbers of its embedding: 64"]
    # the last text is the question
    assert [line[9:] for line in lines[2:]][-1] == "The weather is fine"
    assert lines[-1].startswith("+1.0000")
    assert all(re.match(r"[+-][01]\.\d{4}  ", line) for line in lines[2:])


@pytest.fixture(scope="module")
def server(tiny_dir: str) -> Iterator[Server]:
    """One that reads tool calls; a model of random weights would fill JSON with whitespace."""
    flags = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    flags += ["--guided-decoding-backend", "auto:disable-any-whitespace"]
    with running(OPENAI_SERVER, ["--model", tiny_dir, *flags, *ENGINE_FLAGS]) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai_responses_client.py", r"\n\n\d+ tokens in, 150 out\n\nAnd then: "),
        (
            "openai_tools_client.py",
            r'(?s)get_temperature\(\s*\{\s*"city"\s*:\s*"\w+"\s*\}\s*\)\n→ \{"city": "\w+", "celsius": \d+\}\n',
        ),
    ],
)
def test_example_of_a_client(name: str, expected: str, server: Server, tmp_path: pathlib.Path) -> None:
    result = run(name, ["--base-url", f"{server.url}/v1", "--max-tokens", "150", "Is it warm?"], tmp_path)
    assert re.search(expected, result.stdout)


def run(name: str, arguments: list[str], directory: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """An example's end, which was a good one."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result
