"""The examples run as they are, from any directory; those of clients against a server.

One is a process of its own. For the others, whose imports would take most of the time, this process is enough.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from ascend_vllm.tools.train_eagle.data import read_samples
from tests.benchmark_modules import run_here
from tests.lora_adapters import Adapter, write_adapter
from tests.server import ROOT, Server
from tests.tiny_models import tiny_model


def test_an_example_is_a_whole_program(tmp_path: pathlib.Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, ROOT / "examples" / "offline_inference.py"),
            *("--model", tiny_model("qwen2-tied"), "--max-tokens", "5"),
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"Prompt: 'What does --block-size do\?'\nOutput: '", result.stdout)
    assert "Processed prompts: 100%" in result.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("offline_chat.py", ["Is anyone there?"], r"User: Is anyone there\?\nAssistant: "),
        (
            "offline_speculation.py",
            ["--max-tokens", "64"],
            r"Tokens: 64, of \d+ drafts \d+ were right\.",
        ),
        (
            "offline_structured_outputs.py",
            ["--max-tokens", "64"],
            r"(?s)Output: (flag|metric)\n.*Output: 20\d\d-\d\d-\d\d\n.*Output: \{.*As a dict: \{'name'",
        ),
    ],
)
def test_offline_example(name: str, arguments: list[str], expected: str, tmp_path: pathlib.Path) -> None:
    words = ["--model", tiny_model("qwen2-tied"), "--max-tokens", "5", *arguments]
    stdout, stderr = run_here(f"examples/{name}", *words, directory=tmp_path)
    assert re.search(expected, stdout)
    assert "Processed prompts: 100%" in stderr


def test_example_that_writes_answers_down(tmp_path: pathlib.Path) -> None:
    """A head can be trained on the file."""
    (tmp_path / "questions.txt").write_text("Who are you?\nIs it warm?\n")
    model, answers = tiny_model("qwen2-tied"), tmp_path / "answers.jsonl"
    words = ["--model", model, "--questions", "questions.txt", "--max-tokens", "5", str(answers)]
    stdout, _ = run_here("examples/offline_own_answers.py", *words, directory=tmp_path)
    assert stdout.endswith(f"4 answers are in {answers}.\n")
    read = [json.loads(line)["messages"] for line in answers.read_text().splitlines()]
    assert [[message["role"] for message in messages] for messages in read] == [["user", "assistant"]] * 4
    assert [messages[0]["content"] for messages in read] == ["Who are you?", "Is it warm?"] * 2
    assert all(messages[1]["content"] for messages in read)
    assert len(read_samples(str(answers), AutoTokenizer.from_pretrained(model), 64)) == 4


def test_example_of_an_adapter(tmp_path: pathlib.Path) -> None:
    model = tiny_model("qwen2-tied")
    words = ["--model", model, "--adapter", write_adapter(tmp_path / "adapter", model, Adapter("voice", rank=32))]
    stdout, _ = run_here("examples/offline_lora.py", *words, "--max-tokens", "20", "Is it?", directory=tmp_path)
    found = re.fullmatch(r"(?s)User: Is it\?\nModel: (.*)\nAdapter: (.*)\n\n", stdout)
    assert found and found[1] != found[2]


def test_example_of_embeddings(tmp_path: pathlib.Path) -> None:
    words = ["--model", tiny_model("qwen2-tied"), "The weather is fine"]
    stdout, _ = run_here("examples/offline_embedding.py", *words, directory=tmp_path)
    lines = stdout.splitlines()
    assert lines[:2] == ["Question: The weather is fine", "Numbers of its embedding: 64"]
    # the last text is the question
    assert [line[9:] for line in lines[2:]][-1] == "The weather is fine"
    assert lines[-1].startswith("+1.0000")
    assert all(re.match(r"[+-][01]\.\d{4}  ", line) for line in lines[2:])


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
def test_example_of_a_client(name: str, expected: str, compact_server: Server, tmp_path: pathlib.Path) -> None:
    words = ["--base-url", f"{compact_server.url}/v1", "--max-tokens", "150", "Is it warm?"]
    stdout, _ = run_here(f"examples/{name}", *words, directory=tmp_path)
    assert re.search(expected, stdout)
