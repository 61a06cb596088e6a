"""Quantized checkpoints behind a server with two workers, over HTTP."""

from __future__ import annotations

import pathlib
from typing import Any

import httpx
import pytest

from tests import quantized_checkpoints as formats
from tests.models.paged_driver import TransformersModel, random_tokens
from tests.server import OPENAI_SERVER, running
from tests.tiny_models import VOCAB_SIZE

PROMPTS = [random_tokens(count, VOCAB_SIZE, seed=24 + count) for count in (5, 21)]
MAX_TOKENS = 8
FLAGS = [
    "--tensor-parallel-size",
    "2",
    "--max-model-len",
    "96",
    "--kv-cache-memory-bytes",
    "8M",
    "--dtype",
    "float32",
]
# base → writer, quantization_config, further flags
CASES: dict[str, tuple[formats.Writer, dict[str, Any], list[str]]] = {
    "qwen2": (
        formats.gptq(4, 32, symmetric=False, order="act"),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        [],
    ),
    "deepseek-v3": (
        formats.fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]},
        ["--enable-expert-parallel"],
    ),
}


def greedy(directory: str, prompt: list[int]) -> list[int]:
    """What transformers generates."""
    model = TransformersModel(directory)
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        tokens.append(int(model.log_probs(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("base", ["qwen2", pytest.param("deepseek-v3", marks=pytest.mark.exhaustive)])
def test_tokens_of_two_workers(base: str, tmp_path: pathlib.Path) -> None:
    writer, declared, flags = CASES[base]
    quantized, meant = formats.write(tmp_path, writer, declared, base=base)
    with running(OPENAI_SERVER, ["--model", quantized, *FLAGS, *flags]) as server:
        body = {"model": quantized, "prompt": PROMPTS, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [
        greedy(meant, prompt) for prompt in PROMPTS
    ]
