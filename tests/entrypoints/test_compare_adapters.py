"""The comparison of servers with and without adapters, end to end on a tiny model: figures, not their values."""

from __future__ import annotations

import json
import pathlib
import sys

import pytest

from tests.benchmark_modules import load_benchmark
from tests.server import ROOT
from tests.tiny_models import tiny_model

_SIZES = ["--rounds", "1", "--waves", "1", "--input-len", "9", "--output-len", "6", "--concurrency", "8"]
_SIZES += ["--stream-len", "480", "--loads", "1", "--apart-s", "0.05", "--max-model-len", "512"]
_SIZES += ["--kv-cache-bytes", "8000000"]


def test_servers_in_turns(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peer is this project's own server under vLLM's name."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    peer = tmp_path / "vllm"
    peer.write_text(f'#!/bin/sh\nexec {sys.executable} -m ascend_vllm.entrypoints.cli "$@"\n')
    peer.chmod(0o755)
    model, target = tiny_model("llama", dtype="bfloat16"), tmp_path / "result.json"
    rows = ["unused", "one", "vllm-eight", "loading"]
    words = ["--model", model, "--peer-program", str(peer), "--json", str(target), "--rows", *rows, *_SIZES]
    monkeypatch.setattr("sys.argv", ["compare_adapters.py", *words])
    load_benchmark("compare_adapters").main()
    content = json.loads(target.read_text())
    assert str(tmp_path) not in target.read_text()
    programs = content["programs"]
    assert list(programs) == ["ours", "plain", "vllm"]
    assert "--enable-lora" not in programs["plain"]["command"]
    assert "--max-loras 8 --max-lora-rank 16" in programs["vllm"]["command"]
    *rates, loading = content["rows"]
    assert [row["name"] for row in rates] == rows[:3]
    assert [row["target"]["ratio_at_least"] for row in rates] == [0.95, 0.85, 1.5]
    for row in rates:
        assert row["ratio"] == row["ours"] / row["peer"] > 0
        for side in ("ours", "peer"):
            (figures,) = row["figures"][side]
            assert (figures["completed"], figures["total_output_tokens"]) == (8, 48)
    assert loading["target"]["at_most"] == 0.05
    (figures,) = loading["figures"]["ours"]
    assert all(found["count"] > 0 for found in figures.values())
    assert loading["ours"] == max(
        figures["loading_gap_s"]["longest"] - figures["usual_gap_s"]["median"],
        figures["first_use_gap_s"]["longest"] - figures["asked_gap_s"]["longest"],
    )
    assert "vllm-eight" in capsys.readouterr().out
