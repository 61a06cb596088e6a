"""The benchmarks of several workers run, and print what they document."""

from __future__ import annotations

import json
from typing import Any

from tests.benchmark_modules import run_script
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
