"""The comparison of servers, end to end on a tiny model: how figures are collected and reported, not their values."""

from __future__ import annotations

import json
import math
import pathlib
import re
import statistics
import sys
import time
import types
from typing import Any

import pytest

from tests.benchmark_modules import load_benchmark
from tests.server import ROOT
from tests.tiny_models import tiny_model

_SIZES = ["--input-len", "9", "--output-len", "6", "--long-len", "40", "--long-prompts", "1", "--waves", "1"]
_SIZES += ["--mixed-output-len", "200", "--max-model-len", "256", "--rounds", "1", "--gib", "0.01"]
_SIZES += ["--kv-cache-bytes", "2000000", "--memory-kv-cache-bytes", "100000"]


@pytest.fixture(scope="module")
def program() -> types.ModuleType:
    return load_benchmark("compare_servers")


@pytest.fixture(autouse=True)
def servers_find_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def compare(
    program: types.ModuleType, words: list[str], directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    target = directory / "result.json"
    monkeypatch.setattr("sys.argv", ["compare_servers.py", *words, *_SIZES, "--json", str(target)])
    program.main()
    content = json.loads(target.read_text())
    assert isinstance(content, dict)
    assert str(directory) not in target.read_text()
    return content


def test_two_servers_in_turns(
    program: types.ModuleType,
    tiny_dir: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The peer is this project's own server under the peer's name: it takes the same flags and variables."""
    peer = tmp_path / "vllm"
    peer.write_text(f'#!/bin/sh\n[ "$VLLM_NO_USAGE_STATS" = 1 ] && exec {sys.executable} -m '
                    'ascend_vllm.entrypoints.cli "$@"\n')  # fmt: skip
    peer.chmod(0o755)
    words = ["--model", tiny_dir, "--rows", "c1", "ttft", "--peer-program", str(peer), "--note", "a test"]
    content = compare(program, words, tmp_path, monkeypatch)
    assert (content["kind"], content["note"], content["rounds"]) == ("servers", "a test", 1)
    assert content["sizes"]["long_len"] == 40 and content["machine"]["cpu"]
    assert "--peer-program" not in content["command"] and "--rows c1 ttft" in content["command"]
    for side, name in (("ours", "ascend-vllm"), ("peer", "vllm")):
        about = content["programs"][side]
        assert about["name"] == name and about["version"]
        assert f"{name} serve {tiny_dir} --dtype bfloat16 --max-model-len 256" in about["commands"]["main"]
    assert "VLLM_CPU_OMP_THREADS_BIND=" in content["programs"]["peer"]["commands"]["main"]
    c1, ttft = content["rows"]
    assert [row["name"] for row in content["rows"]] == ["c1", "ttft"]
    for row in content["rows"]:
        assert row["readings"] == {"ours": [row["ours"]], "peer": [row["peer"]]}
        assert row["ratio"] == row["ours"] / row["peer"] > 0
        # before both, between them and after
        assert len(row["machine_limits"]) == 3
    assert c1["meets_target"] == (c1["ratio"] >= 1.5) and ttft["meets_target"] == (ttft["ratio"] <= 0.55)
    for side in ("ours", "peer"):
        (figures,) = c1["figures"][side]
        assert (figures["completed"], figures["total_output_tokens"]) == (1, 6)
        assert figures["output_throughput"] == c1[side]
    assert c1["share_of_limit"] == pytest.approx(c1["ours"] / c1["limit"])
    assert ttft["share_of_limit"] == pytest.approx(ttft["limit"] / ttft["ours"])
    printed = capsys.readouterr().out
    # ours, the peer's, ours, the peer's
    turns = [line.split()[1] for line in printed.splitlines() if line.split()[0] in ("c1", "ttft")]
    assert turns[:4] == ["ascend-vllm", "vllm"] * 2


def test_start_memory_and_gaps_of_one_server(
    program: types.ModuleType, tiny_dir: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", tiny_dir, "--rows", "start", "memory", "mixed", "--peer", "none", "--warm-starts", "0"]
    content = compare(program, words, tmp_path, monkeypatch)
    assert [row["name"] for row in content["rows"]] == ["start", "memory", "mixed"]
    start, memory, mixed = content["rows"]
    assert start["ours"] > start["limit"] > 0
    assert [row["peer"] for row in content["rows"]] == [row["ratio"] for row in content["rows"]] == [None] * 3
    (figures,) = memory["figures"]["ours"]
    assert memory["ours"] == pytest.approx(figures["resident_mb"] - figures["weights_mb"] - figures["kv_cache_mb"])
    assert 0.08 < figures["kv_cache_mb"] <= 0.1
    # Python and torch are far larger than this model
    assert memory["ours"] > 20
    (figures,) = mixed["figures"]["ours"]
    # tokens that are ready together are sent together
    assert 1 <= figures["gaps"] <= 4 * 199 and figures["long_prompts"] >= 1
    assert figures["p50_gap_s"] <= figures["p99_gap_s"] == mixed["ours"] <= figures["max_gap_s"]
    assert mixed["limit"] is None


def test_prompts_longer_than_the_other_rows_allow(
    program: types.ModuleType, tiny_dir: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers of these rows take such prompts, and several are sent at a time."""
    words = ["--model", tiny_dir, "--rows", "long8k", "long8k-mixed", "--peer", "none"]
    words += ["--long8k-len", "300", "--long8k-streams", "2", "--long8k-prompts", "3"]
    alone, mixed = compare(program, words, tmp_path, monkeypatch)["rows"]
    (figures,) = alone["figures"]["ours"]
    assert figures["total_input_tokens"] == 300 and alone["ours"] == figures["median_ttft_ms"] / 1e3
    assert alone["limit"] > 0
    (figures,) = mixed["figures"]["ours"]
    assert 1 <= figures["gaps"] <= 2 * 199
    assert figures["long_prompts"] >= 3 and figures["long_prompts"] % 3 == 0
    assert mixed["ours"] == figures["p99_gap_s"] <= figures["max_gap_s"]


def test_requests_that_arrive_at_random(
    program: types.ModuleType,
    tiny_dir: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both rows are of one run, at the flag's rate or at a share of what the server answers in a closed loop."""
    words = ["--model", tiny_dir, "--rows", "open-ttft", "open-gap", "--peer", "none", "--open-s", "1"]
    content = compare(program, [*words, "--open-rate", "20"], tmp_path, monkeypatch)
    ttft, gap = content["rows"]
    assert ttft["figures"]["ours"] == gap["figures"]["ours"]
    (figures,) = ttft["figures"]["ours"]
    assert (figures["rate"], figures["completed"]) == (20, 20)
    assert ttft["ours"] == figures["p99_ttft_ms"] / 1e3 > 0 and gap["ours"] == figures["p99_itl_ms"] / 1e3
    # 9 in and 6 out, each by 90% more or less
    assert 20 * 1 <= figures["total_input_tokens"] <= 20 * 17 and 20 * 1 <= figures["total_output_tokens"] <= 20 * 11
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) != (20 * 9, 20 * 6)
    # the last one is sent after a second
    assert figures["duration"] > 0.95
    capsys.readouterr()
    content = compare(program, [*words[:3], *words[4:], "--open-saturation", "4"], tmp_path, monkeypatch)
    (gap,) = content["rows"]
    (figures,) = gap["figures"]["ours"]
    assert gap["ours"] == figures["p99_itl_ms"] / 1e3
    found = re.search(r"answers (\S+) requests/s", capsys.readouterr().out)
    assert found and figures["rate"] == pytest.approx(0.8 * float(found[1]), rel=0.01)


def test_the_null_device_as_the_peer(
    program: types.ModuleType, tiny_dir: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same server with a plug-in, for the rows that have a target against it."""
    words = ["--tiny-model", tiny_dir, "--peer", "null", "--tiny-input-len", "40", "--tiny-concurrency", "3"]
    words += ["--ours-args=--enable-chunked-prefill --max-num-batched-tokens 16 --max-num-seqs 16"]
    content = compare(program, words, tmp_path, monkeypatch)
    (tiny,) = content["rows"]
    assert (tiny["name"], tiny["target"]) == ("tiny", {"ratio_at_least": 0.6})
    for side in ("ours", "peer"):
        (figures,) = tiny["figures"][side]
        assert (figures["completed"], figures["total_output_tokens"]) == (3, 18)
        # so that prompts are cut
        assert figures["total_input_tokens"] > 3 * 16
    peer = content["programs"]["peer"]
    assert peer["name"] == "null device" and "PYTHONPATH=null_device" in peer["commands"]["tiny"]
    assert peer["commands"]["tiny"].endswith("--max-num-seqs 16 --distributed-executor-backend null")


def test_loading_from_the_disk(
    program: types.ModuleType, tiny_dir: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", tiny_dir, "--rows", "load", "--peer", "none"]
    (load,) = compare(program, words, tmp_path, monkeypatch)["rows"]
    (figures,) = load["figures"]["ours"]
    assert 0 < load["ours"] < figures["start_s"]
    # before and after
    assert len(load["limit_readings"]) == 2 and min(load["limit_readings"]) > 0
    assert figures["swapped_mb"] == 0 < figures["weights_mb"] < figures["resident_mb"]


_BUSY_UNTIL_TOLD = """
import pathlib, subprocess, sys, time
if len(sys.argv) > 1:
    # several, so that they get CPU time on a busy machine too
    for process in [subprocess.Popen([sys.executable, __file__]) for _ in range(4)]:
        process.wait()
while not pathlib.Path(__file__).with_name("rest").exists():
    pass
time.sleep(600)
"""


def test_a_server_that_keeps_a_core_is_waited_for(program: types.ModuleType, tmp_path: pathlib.Path) -> None:
    """The CPU time of its children counts."""
    script = tmp_path / "server.py"
    script.write_text(_BUSY_UNTIL_TOLD)
    with program.servers.Server(
        program.servers.Program("busy", (sys.executable, str(script))), "model", []
    ) as server:
        deadline = time.monotonic() + 60
        while server._cpu_s() < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not server.wait_idle(timeout_s=0.1)
        (tmp_path / "rest").touch()
        assert server.wait_idle()
    assert server.wait_idle(timeout_s=10), "its processes are gone"


def test_medians_and_targets(program: types.ModuleType) -> None:
    rows = {row.name: row for row in program.ROWS}
    start, c8 = (program.report.RowResult(rows[name]) for name in ("start", "c8"))
    for result in (start, c8):
        for side, values in (("ours", [2.0, 9.0, 3.0]), ("peer", [40.0, 20.0, 30.0])):
            for value in values:
                result.add(side, value, {})
    assert start.median("ours") == 3.0 and start.ratio == c8.ratio == 0.1
    assert start.as_dict()["target"] == {"ratio_at_most": 0.1} and start.as_dict()["meets_target"]
    assert c8.as_dict()["target"] == {"ratio_at_least": 1.7} and not c8.as_dict()["meets_target"]
    logs = [math.log(ratio) for ratio in (2 / 40, 9 / 20, 3 / 30)]
    mean = math.exp(sum(logs) / 3)
    assert start.pairs == pytest.approx((mean, mean * statistics.stdev(logs) / math.sqrt(3)))
    memory = program.report.RowResult(rows["memory"])
    for value, peer, meets in ((316.0, 3000.0, True), (401.0, 3000.0, False), (316.0, 600.0, False)):
        memory.readings = {"ours": [value], "peer": [peer]}
        assert memory.as_dict()["target"] == {"ratio_at_most": 0.5, "at_most": 400.0}
        assert memory.as_dict()["meets_target"] is meets
    memory.readings = {"ours": [401.0]}
    assert memory.as_dict()["meets_target"] is False, "it needs no peer"
    assert memory.pairs is None
    memory.readings = {"ours": [0.0, 401.0], "peer": [3000.0, 600.0]}
    assert memory.pairs is None
    assert "<= 0.5, 400" in "\n".join(program.report.lines([memory], None))
    assert start.share is None
    start.allowed = c8.allowed = [1.0, 5.0, 4.0]
    assert start.share == pytest.approx(4 / 3) and c8.share == pytest.approx(3 / 4)
    assert statistics.median(start.allowed) == start.limit
    for row, shares in ((start, (1 / 2, 5 / 9, 4 / 3)), (c8, (2 / 1, 9 / 5, 3 / 4))):
        mean = math.exp(sum(map(math.log, shares)) / 3)
        error = mean * statistics.stdev(map(math.log, shares)) / math.sqrt(3)
        assert row.share_of_rounds == pytest.approx((mean, error))
    assert f"{start.share_of_rounds[0]:.3f} ± " in "\n".join(program.report.lines([start], None))


def test_what_the_machine_allows(program: types.ModuleType) -> None:
    """Qwen2-0.5B's shape on a machine with 40 GB/s and 920 GFLOP/s, by hand."""
    matrices, head, layers = 896 * (1152 + 896 + 9728) + 4864 * 896, 896 * 151936, 24
    facts = program.ModelFacts(2 * (layers * matrices + head), 0, layers * matrices, head, layers * 896, 12288)
    limits = program.Reading(40.0, 460.0, 920.0)
    assert facts.step_s(limits, 1, 0) == pytest.approx(facts.weight_bytes / 40e9) == pytest.approx(0.0247, rel=0.01)
    assert facts.step_s(limits, 32, 0) == pytest.approx(64 * (layers * matrices + head) / 920e9)
    # with no tokens before, attention is only within the prompt
    attention = 4 * (1024 * 1025 / 2) * layers * 896
    flops = 2 * 1024 * layers * matrices + 2 * head + attention
    assert facts.prefill_s(limits, 1, 1024) == pytest.approx(flops / 920e9)
    assert facts.prefill_s(limits, 1, 1024, cached=1023) == pytest.approx(facts.weight_bytes / 40e9)
    alone = facts.output_tok_s(limits, 1, 128, 64)
    assert alone == pytest.approx(64 / (facts.prefill_s(limits, 1, 128) + 63 * facts.step_s(limits, 1, 160)))
    assert 36 < alone < 40 and 340 < facts.output_tok_s(limits, 32, 128, 64) < 380
    # without bf16 instructions the float32 peak counts
    assert facts.prefill_s(program.Reading(40.0, 460.0, 0.0), 1, 1024) == pytest.approx(flops / 460e9)


def test_tokens_read_their_own_experts(program: types.ModuleType) -> None:
    """Two of eight experts each: with many tokens all experts are read, but a token is multiplied with two."""
    facts = program.ModelFacts(100e6, 0, 50e6, 10e6, 0, 0, 800e6, 400e6, 0.25)
    assert facts.read_bytes(1) == pytest.approx(300e6)
    assert facts.read_bytes(2) == pytest.approx(100e6 + 800e6 * (1 - 0.75**2))
    assert facts.read_bytes(100) == pytest.approx(900e6)
    limits = program.Reading(40.0, 460.0, 920.0)
    assert facts.step_s(limits, 1, 0) == pytest.approx(300e6 / 40e9)
    assert facts.prefill_s(limits, 1, 4096) == pytest.approx((2 * 150e6 * 4096 + 2 * 10e6) / 920e9)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--w4-model", "m", "--tiny-model", "m"], "tiny w4-c1 w4-c8 w4-c32"),
        (["--tiny-model", "m", "--w4-model", "m", "--peer", "null"], "tiny"),
        (["--moe-model", "m", "--rows", "moe-c8"], "moe-c8"),
    ],
)
def test_rows_of_the_given_models(
    program: types.ModuleType, words: list[str], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_servers.py", *words])
    assert program._parse_args().rows == names.split()
    monkeypatch.setattr("sys.argv", ["compare_servers.py", "--model", "m"])
    assert (
        {"c8", "open-gap", "long8k-mixed"}
        <= set(program._parse_args().rows)
        <= {row.name for row in program.ROWS if row.setup not in ("cold", *program.OTHER_MODELS)}
    )


def test_facts_of_a_model(program: types.ModuleType, tiny_dir: str) -> None:
    config = json.loads((pathlib.Path(tiny_dir) / "config.json").read_text())
    facts = program.ModelFacts.of(tiny_dir)
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    assert facts.head_elements == hidden * vocab
    kv_width = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    per_layer = hidden * (2 * hidden + 2 * kv_width + 3 * config["intermediate_size"])
    assert facts.matrix_elements == layers * per_layer
    assert facts.kv_bytes_per_token == 2 * 2 * layers * kv_width


def test_facts_of_quantized_weights(program: types.ModuleType, tmp_path: pathlib.Path) -> None:
    """As many products as unquantized ones have, of fewer bytes."""
    head = {
        "model.embed_tokens.weight": {"dtype": "BF16", "shape": [50, 256], "data_offsets": [0, 25600]},
        "a_proj.weight_packed": {"dtype": "I32", "shape": [64, 32], "data_offsets": [25600, 33792]},
        "a_proj.weight_scale": {"dtype": "BF16", "shape": [64, 2], "data_offsets": [33792, 34048]},
        "a_proj.weight_shape": {"dtype": "I64", "shape": [2], "data_offsets": [34048, 34064]},
        "b_proj.weight": {"dtype": "I8", "shape": [64, 256], "data_offsets": [34064, 50448]},
        "b_proj.weight_scale": {"dtype": "F32", "shape": [64, 1], "data_offsets": [50448, 50704]},
    }
    text = json.dumps(head).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    config = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    facts = program.ModelFacts.of(str(tmp_path))
    assert facts.matrix_elements == 2 * 64 * 256 and facts.head_elements == 50 * 256
    assert facts.weight_bytes == facts.file_bytes == 50704
    # a float32 scale takes the two bytes that it is kept in
    assert facts.resident_bytes == 50704 - 2 * 64


def test_facts_of_latent_attention(program: types.ModuleType) -> None:
    """DeepSeek-V2-Lite's shape, small: a row of 32 + 8 numbers in three layers, 3 of 8 experts in two of them."""
    facts = program.ModelFacts.of(tiny_model("deepseek-v2-lite"))
    assert facts.kv_bytes_per_token == 3 * 2 * (32 + 8)
    # four heads: keys of 24 + 8 and values of 16, or latents
    assert (facts.attention_width, facts.decode_width) == (3 * 4 * (32 + 16) // 2, 3 * 4 * (40 + 32) // 2)
    attention = 64 * (4 * 32 + 40 + 4 * 16) + 32 * 4 * (24 + 16)
    assert facts.expert_elements == 2 * 8 * 3 * 64 * 24
    others = 3 * attention + 3 * 64 * 112 + 2 * (64 * 8 + 3 * 64 * 2 * 24)
    assert facts.token_elements == others + facts.expert_elements * 3 / 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "c1"], "--model: name the directory of a model"),
        (["--rows", "tiny"], "--tiny-model: name the directory of a tiny model"),
        (["--model", "m", "--rows", "moe-c8"], "--moe-model: name the directory of a mixture of experts, or leave"),
        (["--model", "m", "--rows", "open-gap", "--open-rate", "0"], "--open-rate must be above 0, got 0.0"),
        ([], "--model: name the directory of a model"),
        (["--model", "m", "--rows", "c1", "--peer", "null"], "--peer null is not compared in the rows c1"),
        (["--model", "m", "--rows", "c1", "--peer-variables", "A=1 B"], "each is NAME=VALUE, got B"),
        (["--rows", "tiny", "--tiny-model", "m", "--waves", "0"], "--waves must be at least 1, got 0"),
        (["--rows", "tiny", "--tiny-model", "m", "--peer-program", "/no/vllm"], "There is no program '/no/vllm'"),
        (
            ["--rows", "tiny", "--tiny-model", "m", "--peer-program", sys.executable, "--tcmalloc", "/no"],
            "--tcmalloc /no: there is no such file.",
        ),
    ],
)
def test_wrong_options(
    program: types.ModuleType,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_servers.py", "--gib", "0.01", *words])
    with pytest.raises(SystemExit) as caught:
        program.main()
    assert message in str(caught.value) + capsys.readouterr().err
