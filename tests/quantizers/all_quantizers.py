"""Checkpoints written by other people's tools give the tokens of the weights that these tools read themselves.

Not among the ordinary tests, whose files begin with test_: the environments take gigabytes. `make test-quantizers`.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from ascend_vllm import LLM, SamplingParams
from tests import quantized_checkpoints as formats
from tests.models.paged_driver import random_tokens
from tests.tiny_models import VOCAB_SIZE

PROGRAM = pathlib.Path(__file__).parent / "programs.py"
PROMPTS = [random_tokens(count, VOCAB_SIZE, seed=30 + count) for count in (6, 24, 40)]


def run(environment: str, *arguments: str) -> None:
    """Runs the program in the environment of a tool."""
    python = pathlib.Path(sys.prefix) / "quantizers" / environment / "bin" / "python"
    further = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    command = [str(python), str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | further, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def answers(directory: str) -> tuple[list[list[int]], list[float]]:
    """Tokens, and log-probabilities of the prompts' tokens, in float32."""
    llm = LLM(directory, max_model_len=128, kv_cache_memory_bytes="8M", dtype="float32")
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    llm.shutdown()
    scores = [
        logprobs[token].logprob
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for token, logprobs in zip(prompt, output.prompt_logprobs or [], strict=True)
        if logprobs is not None
    ]
    return [list(output.outputs[0].token_ids) for output in outputs], scores


@pytest.mark.parametrize(
    ("tool", "base"),
    [
        ("gptqmodel:4", "qwen2"),
        ("gptqmodel:4-act", "qwen2-moe"),
        ("gptqmodel:8-asym", "qwen2"),
        ("auto-round:auto_gptq", "qwen2"),
        ("auto-round:auto_awq", "qwen2"),
        ("llm-compressor:W4A16", "deepseek-v3"),
        ("llm-compressor:W8A16-asym", "qwen2"),
        ("llm-compressor:FP8_DYNAMIC", "qwen2-moe"),
        ("llm-compressor:FP8_BLOCK", "qwen2"),
    ],
)
def test_tokens_are_those_of_the_weights_meant(tool: str, base: str, tmp_path: pathlib.Path) -> None:
    source, written, meant = str(formats.float_model(base)), tmp_path / "written", tmp_path / "meant"
    run("gptqmodel" if tool.startswith("gptqmodel") else "llm_compressor", "write", tool, source, str(written))
    # AutoRound makes a directory in it
    (config,) = written.glob("**/config.json")
    run("llm_compressor" if tool.startswith("llm-") else "gptqmodel", "read", str(config.parent), source, str(meant))
    tokens, scores = answers(str(config.parent))
    expected_tokens, expected_scores = answers(str(meant))
    assert tokens == expected_tokens
    assert scores == pytest.approx(expected_scores, abs=1e-4)
    assert scores != pytest.approx(answers(source)[1], abs=1e-3)
