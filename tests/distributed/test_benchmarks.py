"""The benchmarks of several workers, and of two commits, run and print what they document."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
from typing import Any

import pytest

from tests.benchmark_modules import load_benchmark, run_script
from tests.server import ROOT
from tests.tiny_models import tiny_model


def _result_of(*command: str) -> Any:
    """The JSON that a benchmark prints."""
    stdout = run_script(*command)
    return json.loads(stdout[stdout.index("{\n") :])


def test_the_ring_is_measured_both_ways() -> None:
    result = _result_of("benchmarks/bench_ring.py", "--workers", "2", "--requests", "16", "--steps", "20")
    assert (result["workers"], result["requests"]) == (2, 16)
    for way in ("ring", "pickle_and_pipes"):
        for times in result[way].values():
            assert times["send_us"] > 0
            assert times["all_us"] > 0
    assert result["decode_bytes"] < result["decode_and_grow_bytes"]


def test_two_workers_are_measured_against_one() -> None:
    lengths = ["--input-len", "8", "--output-len", "4", "--vocab-size", "128"]
    counts = ["--batch-sizes", "1", "3", "--rounds", "1", "--kv-cache-memory-bytes", "16M"]
    result = _result_of("benchmarks/bench_tensor_parallel.py", "--model", tiny_model("qwen2"), *lengths, *counts)
    rows = result["rows"]
    assert [(row["workers"], row["batch_size"]) for row in rows] == [(1, 1), (2, 1), (1, 3), (2, 3)]
    for row in rows:
        assert row["tokens_per_s"] == row["rounds"][0] > 0
    assert rows[0]["against_first"] == 1
    assert rows[1]["against_first"] == rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]


# ---- a commit and the working tree ---------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A repository whose only commit has this package; the gate compares with that."""
    (tmp_path / "ascend_vllm").symlink_to(ROOT / "ascend_vllm")
    author = ["-c", "user.name=A", "-c", "user.email=a@localhost"]
    for words in (["init", "-q", "-b", "main"], ["add", "."], [*author, "commit", "-q", "-m", "Begin"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(load_benchmark("bench_gate"), "ROOT", tmp_path)
    return tmp_path


def worktrees(repository: pathlib.Path) -> int:
    return len(subprocess.check_output(["git", "-C", str(repository), "worktree", "list"]).splitlines())


def test_the_gate_measures_a_commit_and_the_working_tree(
    repository: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rows", "core", "--rounds", "1", "--core-rows", "3", "--core-calls", "20"]
    code = load_benchmark("bench_gate").main(words)
    title, header, row, verdict = capsys.readouterr().out.splitlines()
    assert title.startswith("the working tree against") and title.endswith("Begin")
    assert header.split() == ["row", "commit", "tree", "ratio", "noise"]
    base, tree, unit, ratio = row.removeprefix("core: 3 rows").split()[:4]
    assert float(base) > 0 and float(tree) > 0 and unit == "µs" and float(ratio) > 0
    assert row.endswith("FELL") == (code == 1) == verdict.startswith("slower than the commit: core: 3 rows")
    assert worktrees(repository) == 1


def test_an_interrupted_gate_leaves_no_worktree(repository: pathlib.Path) -> None:
    gate = load_benchmark("bench_gate")
    with pytest.raises(KeyboardInterrupt), gate.checked_out(gate.find_base(None), build=False) as tree:
        assert (tree / "ascend_vllm" / "envs.py").exists()
        assert worktrees(repository) == 2
        raise KeyboardInterrupt
    assert not tree.parent.exists()
    assert worktrees(repository) == 1
    with pytest.raises(gate.GateError, match="no-such-commit"):
        gate.find_base("no-such-commit")


@pytest.mark.parametrize(
    ("readings", "ratio", "noise", "has_fallen"),
    [
        # µs of the commit, the working tree, the commit, …
        ([100, 130, 100, 132, 101, 90, 100], 1 / 1.30, 0.02, True),
        ([100, 110, 70, 112, 101, 112, 100], 2 / 110 / (1 / 100 + 1 / 70), 0.31, False),
        # the commit was always twice as fast as the working tree, but not equally fast itself
        ([100, 150, 50, 80, 60], 0.563, 0.50, False),
        ([100, 90, 100], 1 / 0.9, 0.02, False),
        ([100, 101, 100], 1 / 1.01, 0.02, False),
    ],
)
def test_a_row_falls_by_more_than_its_noise(
    readings: list[int], ratio: float, noise: float, has_fallen: bool
) -> None:
    gate = load_benchmark("bench_gate")
    values, sides = iter(readings), []

    def measure(side: int) -> Any:
        sides.append(side)
        name = "kept" if side else "gone"
        return {"row": gate.Reading(next(values), "µs", False), name: gate.Reading(1, "µs", False)}

    num_rounds = len(readings) // 2
    (result,) = gate.Gate((ROOT, ROOT), argparse.Namespace(rounds=num_rounds))._rounds(measure)
    assert result.name == "row" and sides == [0, *[1, 0] * num_rounds]
    assert (result.noise, result.has_fallen) == (pytest.approx(noise, abs=0.01), has_fallen)
    assert result.ratio == pytest.approx(ratio, rel=0.001)
    assert result.line().endswith("FELL") == has_fallen
