"""The comparison of static batches, end to end on a tiny model."""

from __future__ import annotations

import json
import pathlib
import sys
import types

import pytest

from tests.benchmark_modules import load_benchmark
from tests.server import ROOT

_SIZES = ["--batch-sizes", "1", "3", "--input-len", "8", "--output-len", "4", "--rounds", "2", "--gib", "0.01"]


@pytest.fixture(scope="module")
def program() -> types.ModuleType:
    return load_benchmark("compare_offline")


def test_ours_alone(
    program: types.ModuleType,
    tiny_dir: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "result.json"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--model", tiny_dir, "--peer", "none", "--kv-cache-bytes", "2000000", "--json", str(target)]
    monkeypatch.setattr("sys.argv", ["compare_offline.py", *words, *_SIZES])
    program.main()
    content = json.loads(target.read_text())
    assert (content["kind"], content["rounds"]) == ("offline", 2)
    assert "--input-len 8 --output-len 4" in content["command"] and str(tmp_path) not in target.read_text()
    assert content["sizes"] == {"input_len": 8, "output_len": 4}
    assert list(content["programs"]) == ["ours"] and content["programs"]["ours"]["version"]
    assert [row["name"] for row in content["rows"]] == ["decode1", "whole1", "decode3", "whole3"]
    for row in content["rows"]:
        batch = int(row["name"][-1])
        assert len(row["readings"]["ours"]) == len(row["limit_readings"]) == 2 and row["ratio"] is None
        for value, figures in zip(row["readings"]["ours"], row["figures"]["ours"], strict=True):
            assert figures["first_token_s"] > 0
            if row["name"].startswith("whole"):
                assert value == pytest.approx(batch * 4 / figures["whole_s"])
            elif figures["whole_s"] > figures["first_token_s"]:
                assert value == pytest.approx(batch * 3 / (figures["whole_s"] - figures["first_token_s"]))
    assert "whole3" in capsys.readouterr().out


def test_openvino_that_is_not_installed(
    program: types.ModuleType, tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without the packages, the error says what to install."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=r"OpenVINO GenAI ended with code 1\."):
        program.Worker("OpenVINO GenAI", str(python), "offline_openvino.py", {"model": str(tmp_path)})
    assert "`pip install openvino-genai optimum-intel`" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output-len", "1"], "--output-len must be at least 2, a first token and a decoded one, got 1"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        ([], "--peer-model: name the directory of the converted model"),
    ],
)
def test_wrong_options(
    program: types.ModuleType,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_offline.py", "--model", "m", *words])
    with pytest.raises(SystemExit):
        program.main()
    assert message in capsys.readouterr().err
