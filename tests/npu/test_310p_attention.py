"""What Atlas inference cards (Ascend310P) take of attention and refuse, in a process that simulates one, and that the
engine refuses them.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest

from tests.npu.processes import last_line, run
from tests.npu.test_runtime_processes import SIM_RUN


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("310p") / "trace"


@pytest.fixture(scope="module")
def outcomes(trace: pathlib.Path) -> dict[str, str]:
    """The error of each call, empty where there was none."""
    program = [sys.executable, "-m", "tests.npu.calls_on_310p"]
    done = run(*SIM_RUN, "--soc", "Ascend310P3", "--trace", str(trace), "--", *program, timeout=300)
    result: dict[str, str] = json.loads(last_line(done))
    return result


@pytest.mark.parametrize("call", ["prompt", "incremental", "incremental, precise", "incremental, heads apart"])
def test_taken(call: str, outcomes: dict[str, str]) -> None:
    assert outcomes[call] == ""


@pytest.mark.parametrize(
    ("call", "operator", "argument"),
    [
        ("prompt in bfloat16", "aclnnPromptFlashAttentionV3", "query"),
        ("prompt with key heads", "aclnnPromptFlashAttentionV3", "num_key_value_heads"),
        ("prompt with lengths", "aclnnPromptFlashAttentionV3", "actual_seq_lengths"),
        ("prompt with a compressed mask", "aclnnPromptFlashAttentionV3", "sparse_mode"),
        ("prompt with a window", "aclnnPromptFlashAttentionV3", "pre_tokens"),
        ("incremental in bfloat16", "aclnnIncreFlashAttentionV4", "query"),
        ("incremental with key heads", "aclnnIncreFlashAttentionV4", "num_key_value_heads"),
        ("incremental, fractal cache", "aclnnIncreFlashAttentionV4", "key"),
        ("scatter", "aclnnScatterPaKvCache", "key"),
        ("fused", "aclnnFusedInferAttentionScoreV3", "query"),
        ("norm in bfloat16", "aclnnRmsNorm", "x"),
    ],
)
def test_refused(call: str, operator: str, argument: str, outcomes: dict[str, str]) -> None:
    assert outcomes[call].startswith("RuntimeError")
    assert f"{operator}: {argument}: " in outcomes[call]


@pytest.mark.parametrize("call", ["worker", "engine"])
def test_models_are_refused(call: str, outcomes: dict[str, str]) -> None:
    """The error names the missing feature, before the model's directory is looked for."""
    assert outcomes[call].startswith("ConfigError: --device npu: attention on Ascend310P3 is not possible")
    assert "(npu_fused_infer_attention_score, npu_scatter_pa_kv_cache)" in outcomes[call]
    assert "Use --device cpu" in outcomes[call]


def test_the_trace_shows_the_precision_of_each_call(outcomes: dict[str, str], trace: pathlib.Path) -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in trace.read_text().splitlines()]
    incremental = [line["args"] for line in lines if line["op"] == "aclnnIncreFlashAttentionV4"]
    assert [args["inner_precise"] for args in incremental] == [1, 0, 1]
    assert [args["block_size"] for args in incremental] == [128] * 3
    assert incremental[0]["key"][0] == {"shape": [6, 128, 256], "dtype": "float16"}
    assert [line["args"]["inner_precise"] for line in lines if line["op"] == "aclnnPromptFlashAttentionV3"] == [1]
