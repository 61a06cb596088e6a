"""A result file of `ascend-vllm bench serve` is read by what was written for vLLM's."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from ascend_vllm.entrypoints.cli import main
from tests.server import Server

# field → kind, in the order of the file that `vllm bench serve` 0.32 wrote with the options below
FIELDS = json.loads((pathlib.Path(__file__).parent / "vllm_bench_serve_fields.json").read_text())
_OPTIONS = "--max-concurrency 3 --ignore-eos --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,90,99"
OPTIONS = [*_OPTIONS.split(), "--goodput", "ttft:60000", "--save-result", "--save-detailed", "--disable-tqdm"]


@pytest.fixture(scope="module")
def result_file(openai_server: Server, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("result")
    words = ["bench", "serve", "--base-url", openai_server.url, "--num-prompts", "7", *OPTIONS]
    # a server that is ahead of its reader sends several tokens at once: of so many some come later than others
    words += ["--random-input-len", "9", "--random-output-len", "150"]
    assert main([*words, "--result-dir", str(directory), "--result-filename", "r.json"]) == 0
    return directory / "r.json"


def kind(value: object) -> Any:
    """What a plot or a table would have to know of a value."""
    match value:
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "text"
        case list():
            # an answer that came as a whole has no gaps
            return ["list", kind(next(item for item in value if item != []))]
    raise ValueError(f"{value!r} has no kind")


def test_fields_and_kinds(result_file: pathlib.Path) -> None:
    result = json.loads(result_file.read_text())
    assert list(result) == list(FIELDS)
    assert {name: kind(value) for name, value in result.items()} == FIELDS


def summary(directory: pathlib.Path) -> list[dict[str, float]]:
    """A table of all results of a directory, as scripts of vLLM's users make it."""
    rows = []
    for path in directory.glob("*.json"):
        result = json.loads(path.read_text())
        row = {"qps": result["request_throughput"], "goodput": result["request_goodput"]}
        row["tok_s"] = result["output_throughput"]
        for metric in ("ttft", "tpot", "itl", "e2el"):
            row |= {f"{how}_{metric}": result[f"{how}_{metric}_ms"] for how in ("mean", "median", "std", "p99")}
        rows.append(row)
    return rows


def timeline(result: dict[str, Any]) -> list[list[float]]:
    """The times at which each request's tokens came, in seconds from the first request."""
    begin = min(result["start_times"])
    moments = []
    for start, ttft, itls in zip(result["start_times"], result["ttfts"], result["itls"], strict=True):
        times = [start - begin + ttft]
        for gap in itls:
            times.append(times[-1] + gap)
        moments.append(times)
    return moments


def test_scripts_for_vllms_results(result_file: pathlib.Path) -> None:
    (row,) = summary(result_file.parent)
    # seven requests of 150 tokens each, all of them good
    assert row["tok_s"] == pytest.approx(150 * row["qps"]) and row["goodput"] == pytest.approx(row["qps"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert 0 <= row[f"median_{metric}"] <= row[f"p99_{metric}"]
    result = json.loads(result_file.read_text())
    moments = timeline(result)
    assert len(moments) == 7 and max(map(max, moments)) <= result["duration"]
    for start, times, latency in zip(result["start_times"], moments, result["latencies"], strict=True):
        assert times[-1] == pytest.approx(start - min(result["start_times"]) + latency)
    # never more under way than allowed
    spans = [(times[-1] - latency, times[-1]) for times, latency in zip(moments, result["latencies"], strict=True)]
    assert max(sum(begin < end <= other for begin, other in spans) for _, end in spans) <= 3
    assert result["mean_ttft_ms"] == pytest.approx(1e3 * sum(result["ttfts"]) / 7)
