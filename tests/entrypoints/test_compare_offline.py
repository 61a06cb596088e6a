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


def test_rounded_weights(
    program: types.ModuleType, tiny_dir: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours gets what they need, and its limit is that of their bytes."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    target = tmp_path / "result.json"
    words = ["--model", tiny_dir, "--peer", "none", "--kv-cache-bytes", "2000000", "--json", str(target), *_SIZES[3:]]
    words += ["--batch-sizes", "1", "--weights", "int8", "--int8-activations"]
    monkeypatch.setattr("sys.argv", ["compare_offline.py", *words])
    program.main()
    content = json.loads(target.read_text())
    command = content["programs"]["ours"]["commands"]["main"]
    assert command.endswith("quantization='weight_only_int8', quantize_lm_head=True, cpu_int8_activations=True)")
    decode, _ = content["rows"]
    assert decode["title"] == "decode only, batch 1, int8" and decode["target"] == {"ratio_at_least": 1.1}
    plain = program.ModelFacts.of(tiny_dir)
    rounded = program.WEIGHTS["int8"].facts(plain)
    assert rounded.weight_bytes == plain.weight_bytes - plain.matrix_elements - plain.head_elements
    assert program.WEIGHTS["int4"].facts(plain).weight_bytes == plain.weight_bytes - plain.head_elements
    assert program.WEIGHTS["bf16"].facts(plain) == plain


def test_both_round_activations_or_neither(program: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.isdir", lambda _: True)
    for words, group in (
        ([], None),
        (["--weights", "int4"], "0"),
        (["--weights", "int8", "--int8-activations"], "32"),
    ):
        monkeypatch.setattr("sys.argv", ["compare_offline.py", "--model", "m", "--peer-model", "p", *words])
        args = program._parse_args()
        assert program._openvino_settings(args).get("DYNAMIC_QUANTIZATION_GROUP_SIZE") == group
        assert ("cpu_int8_activations" in program._our_settings(args)) == (group == "32")


@pytest.mark.parametrize(
    ("name", "script", "advice"),
    [
        ("OpenVINO GenAI", "offline_openvino.py", "`pip install openvino-genai optimum-intel`"),
        ("llama.cpp", "offline_llamacpp.py", "`pip install llama-cpp-python gguf`"),
    ],
)
def test_peers_that_are_not_installed(
    program: types.ModuleType,
    tmp_path: pathlib.Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    script: str,
    advice: str,
) -> None:
    """Without the packages, the error says what to install."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SystemExit, match=rf"{name} ended with code 1\."):
        program.Worker(name, str(python), script, {"model": str(tmp_path)})
    assert advice in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output-len", "1"], "--output-len must be at least 2, a first token and a decoded one, got 1"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        ([], "--peer-model: name the directory of the converted model"),
        (["--peer", "llama.cpp", "--peer-model", "/no"], "--peer-model: name the GGUF file"),
        (["--peer", "llama.cpp", "--peer-model", __file__], "it generates one sequence at a time here"),
        (["--peer", "none", "--int8-activations"], "only inputs of rounded weights are rounded"),
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
