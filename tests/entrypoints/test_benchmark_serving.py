"""The serving benchmark and the client examples against a real server."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import safetensors.numpy

from tests.server import ROOT, Server, needs_curl


def run_script(*words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["--max-concurrency", "3", "--prefix-len", "20", "--vocab-size", "384"],
        ["--endpoint", "chat", "--request-rate", "200"],
        ["--endpoint", "generate", "--input-len", "3"],
    ],
    ids=lambda words: words[1],
)
def test_figures(request: pytest.FixtureRequest, tmp_path: pathlib.Path, tiny_dir: str, words: list[str]) -> None:
    server: Server = request.getfixturevalue("generate_server" if "generate" in words else "openai_server")
    result_file = tmp_path / "result.json"
    options = ["--base-url", server.url, "--num-prompts", "6", "--input-len", "10", "--output-len", "5"]
    options += ["--tokenizer", tiny_dir] if "chat" in words else []
    stdout = run_script("benchmarks/benchmark_serving.py", *options, *words, "--result-json", str(result_file))
    result = json.loads(result_file.read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["output_tokens"] == 30
    if "--prefix-len" in words:
        assert result["prompt_tokens"] == 6 * 30
    # a busy server may send all tokens of an answer in one event: then there are no gaps
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", *(["itl_ms"] if result["itl_ms"] else [])):
        assert list(result[name]) == ["mean", "median", "p90", "p99"]
        assert 0 <= result[name]["median"] <= result[name]["p99"]
    assert result["ttft_ms"]["mean"] < result["e2e_ms"]["mean"]
    assert "output throughput" in stdout


def test_a_failing_server_is_told(openai_server: Server, tmp_path: pathlib.Path) -> None:
    words = ["--base-url", openai_server.url, "--model", "nope", "--num-prompts", "2", "--warmup", "0"]
    done = subprocess.run(
        [sys.executable, "benchmarks/benchmark_serving.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "HTTP 404" in done.stdout


@pytest.mark.parametrize("example", ["openai_chat_client.py", "openai_completion_client.py"])
def test_examples(openai_server: Server, example: str) -> None:
    extra = ["--max-tokens", "5"] if "chat" in example else []
    stdout = run_script(f"examples/{example}", "--base-url", f"{openai_server.url}/v1", *extra)
    assert "tokens in, 5 out" in stdout if "chat" in example else "Log-probabilities" in stdout


@needs_curl
def test_shell_examples(openai_server: Server, generate_server: Server) -> None:
    for script, server, text in (
        ("curl_openai.sh", openai_server, "data: [DONE]"),
        ("curl_generate.sh", generate_server, '{"text": ["hello'),
    ):
        done = subprocess.run(
            ["sh", f"examples/{script}", server.url, *(["tiny"] if "openai" in script else [])],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert text in done.stdout


def test_the_memory_limit(tiny_dir: str) -> None:
    stdout = run_script("benchmarks/bandwidth.py", "--gib", "0.02", "--roofline", tiny_dir)
    found = re.search(r"limit: ([\d.]+) GB/s read / (\d+) MB of weights = ([\d.]+) decode steps/s", stdout)
    assert found is not None, stdout
    # all tensors but the input embedding, of which a step reads a row per sequence
    weights = safetensors.numpy.load_file(pathlib.Path(tiny_dir) / "model.safetensors")
    expected = sum(tensor.nbytes for name, tensor in weights.items() if "embed_tokens" not in name)
    bandwidth, steps = float(found[1]) * 1e9, float(found[3])
    assert bandwidth > 1e8
    assert steps == pytest.approx(bandwidth / expected, rel=0.1)
