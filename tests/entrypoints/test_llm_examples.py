"""The offline examples run as they are, from any directory."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.tiny_models import tiny_model

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("offline_inference.py", [], "Prompt: 'What does --block-size do?'\nOutput: '"),
        ("offline_chat.py", ["Is anyone there?"], "User: Is anyone there?\nAssistant: "),
    ],
)
def test_example(name: str, arguments: list[str], expected: str, tmp_path: pathlib.Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples" / name),
        "--model",
        tiny_model("qwen2-tied"),
        "--max-tokens",
        "5",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    result = subprocess.run(
        [*command, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout
    assert "Processed prompts: 100%" in result.stderr
