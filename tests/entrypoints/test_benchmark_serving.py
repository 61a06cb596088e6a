"""The serving benchmark and the client examples against a real server."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import pytest
import safetensors.numpy

from tests.benchmark_modules import load_benchmark, run_here, run_script
from tests.server import ROOT, Server, needs_curl


def test_serving_beside_the_memory_limit(openai_server: Server, tmp_path: pathlib.Path, tiny_dir: str) -> None:
    result_file = tmp_path / "result.json"
    words = ["--base-url", openai_server.url, "--num-prompts", "6", "--input-len", "10", "--output-len", "5"]
    words += [
        "--max-concurrency",
        "3",
        "--roofline",
        tiny_dir,
        "--gib",
        "0.02",
        "--save-result",
        "--result-filename",
        str(result_file),
    ]
    stdout = run_script("benchmarks/benchmark_serving.py", *words, OMP_NUM_THREADS="1")
    result = json.loads(result_file.read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 0, 30)
    assert "Output token throughput (tok/s):" in stdout
    assert re.search(r"limit: [\d.]+ GB/s read / \d+ MB of weights = [\d.]+ decode steps/s", stdout)


@pytest.mark.parametrize("example", ["openai_chat_client.py", "openai_completion_client.py"])
def test_examples(openai_server: Server, example: str) -> None:
    extra = ["--max-tokens", "5"] if "chat" in example else []
    stdout, _ = run_here(f"examples/{example}", "--base-url", f"{openai_server.url}/v1", *extra)
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


def test_throughput_beside_the_memory_limit(tiny_dir: str) -> None:
    words = ["--model", tiny_dir, "--dtype", "float32", "--kv-cache-memory-bytes", "8M", "--disable-tqdm"]
    words += ["--input-len", "12", "--output-len", "4", "--num-prompts", "2", "--roofline", "--gib", "0.02"]
    printed, _ = run_here("benchmarks/benchmark_throughput.py", *words)
    assert "Total num output tokens:  8\n" in printed and "decode steps/s" in printed


def test_ops(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ops.json"
    run_here("benchmarks/bench_ops.py", *["--op", "rms_norm", "--budget", "0.01", "--json", str(path)])
    results = json.loads(path.read_text())
    assert {result["op"] for result in results} == {"rms_norm"}
    assert all(result["ratio"] == pytest.approx(result["torch_us"] / result["kernel_us"]) for result in results)


def test_the_memory_limit(tiny_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    with load_benchmark("comparison.limits").beside_memory_limit(tiny_dir, 0.02):
        pass
    stdout = capsys.readouterr().out
    found = re.search(r"limit: ([\d.]+) GB/s read / (\d+) MB of weights = ([\d.]+) decode steps/s", stdout)
    assert found is not None, stdout
    # all tensors but the input embedding, of which a step reads a row per sequence
    weights = safetensors.numpy.load_file(pathlib.Path(tiny_dir) / "model.safetensors")
    expected = sum(tensor.nbytes for name, tensor in weights.items() if "embed_tokens" not in name)
    bandwidth, steps = float(found[1]) * 1e9, float(found[3])
    assert bandwidth > 1e8
    assert steps == pytest.approx(bandwidth / expected, rel=0.1)
