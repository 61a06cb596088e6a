"""The scheduler's benchmarks run, on a tiny model; what they measure there means nothing."""

from __future__ import annotations

import functools
import json
import operator
import pathlib
from typing import Any

import pytest

from tests.benchmark_modules import run_here, run_script
from tests.tiny_models import tiny_model


def test_host_time_of_the_core(tmp_path: pathlib.Path) -> None:
    found = tmp_path / "core.json"
    words = ["--rows", "2", "--calls", "20", "--num-scheduler-steps", "1", "3", "--json", str(found)]
    run_here("benchmarks/bench_core.py", *words)
    results = json.loads(found.read_text())["results"]
    assert [(result["rows"], result["num_scheduler_steps"]) for result in results] == [(2, 1), (2, 3)]
    assert all(0 < result["us_per_token"] <= result["median_us"] for result in results)


def test_lookups_of_ngrams() -> None:
    stdout, _ = run_here("benchmarks/bench_core.py", "--ngrams", "--rows", "2", "--calls", "20")
    rows, median, p90, target = stdout.splitlines()[-1].split()
    assert (int(rows), int(target)) == (2, 20)
    assert 0 < float(median) <= float(p90)


def test_compilation_of_grammars() -> None:
    words = ["--tokenizer", str(tiny_model("qwen2-tied")), "--count", "1"]
    figures: dict[str, Any] = json.loads(run_here("benchmarks/bench_grammars.py", *words)[0])
    assert figures["first"]["error"] is None and figures["first"]["ms"] > 0
    assert all(0 < figures[kind]["median_ms"] <= figures[kind]["worst_ms"] for kind in ("json", "regex"))


@pytest.mark.parametrize(
    ("bench", "args", "compared"),
    [
        ("prefix", ["--prefix-len", "100", "--tail-len", "4"], ("cold_ttft_s", "warm_ttft_s")),
        # two servers
        pytest.param(
            *("chunked", ["--prompt-len", "200", "--streams", "2", "--budget", "64"]),
            ("whole.worst_gap_s", "chunked.worst_gap_s"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_features_with_and_without(
    bench: str, args: list[str], compared: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # streams must go on while a long prompt is computed, however fast they are
    max_model_len = "16384" if bench == "chunked" else "256"
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    common = ["--model", str(tiny_model("qwen2-tied")), "--max-model-len", max_model_len, "--repeat", "1"]
    common += ["--vocab-size", "200"]
    result: dict[str, Any] = json.loads(run_script("benchmarks/bench_scheduling.py", bench, *common, *args))
    assert result["bench"] == bench
    first, second = (functools.reduce(operator.getitem, path.split("."), result) for path in compared)
    assert result["ratio"] == pytest.approx(first / second)
    assert min(first, second) > 0
