"""A KV cache in 8 bits that ranks or stages share: the tokens and beams of one worker, with preemption too."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch

from ascend_vllm import LLM, BeamSearchParams, SamplingParams
from tests.distributed.conftest import (
    OPTIONS,
    PROMPTS,
    SYSTEM,
    assert_greedy_tokens_are_equal,
    generate,
    ids_of,
)

# a cache that the prompts of `pressed` outgrow together
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 24, "swap_space": 0.01}
SAMPLED = SamplingParams(temperature=0.8, top_k=40, seed=5, n=2, max_tokens=20)


def beams(llm: LLM) -> list[list[list[int]]]:
    """Tokens of the three best sequences of each prompt."""
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    found = llm.beam_search([{"prompt": prompt} for prompt in PROMPTS], params)
    return [[sequence.tokens for sequence in output.sequences] for output in found]


def pressed(llm: LLM) -> list[list[list[int]]]:
    prompts = [f"{number} {SYSTEM}" for number in range(8)]
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=60, ignore_eos=True)
    return ids_of(generate(llm, params, prompts))


@pytest.mark.parametrize(
    ("flag", "kv_cache", "mode"),
    [
        ("tensor_parallel_size", "int8", "recompute"),
        ("pipeline_parallel_size", "int8", "swap"),
        pytest.param("tensor_parallel_size", "fp8", "swap", marks=pytest.mark.exhaustive),
        pytest.param("pipeline_parallel_size", "fp8", "recompute", marks=pytest.mark.exhaustive),
    ],
)
def test_a_group_generates_what_one_worker_does(odd_model: str, flag: str, kv_cache: str, mode: str) -> None:
    # stages make steps one at a time
    num_steps = 1 if flag == "pipeline_parallel_size" else 3
    options = OPTIONS | {"kv_cache_dtype": kv_cache, "num_scheduler_steps": num_steps}
    alone = LLM(odd_model, **options)
    group = LLM(odd_model, preemption_mode=mode, **options | TIGHT | {flag: 2})
    try:
        assert_greedy_tokens_are_equal(alone, group)
        assert ids_of(generate(group, SAMPLED)) == ids_of(generate(alone, SAMPLED))
        assert beams(group) == beams(alone)
        before = group.llm_engine.core.stats()["num_preemptions"]
        assert pressed(group) == pressed(alone)
        assert group.llm_engine.core.stats()["num_preemptions"] > before
        assert group.llm_engine.core.audit()["violations"] == []
    finally:
        group.shutdown()
        alone.shutdown()


def test_ranks_have_their_channels(odd_model: str, tmp_path: pathlib.Path) -> None:
    """Scales of channels, as ModelSlim measures them, are divided like the heads."""
    directory = tmp_path / "model"
    shutil.copytree(odd_model, directory)
    (file,) = directory.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    for layer, part in itertools.product(range(2), "kv"):
        # 2 KV heads of 16
        scales = torch.linspace(0.01, 0.09, 32) if part == "k" else torch.linspace(0.08, 0.02, 32)
        tensors[f"model.layers.{layer}.self_attn.{part}_proj.kv_cache_scale"] = scales
        tensors[f"model.layers.{layer}.self_attn.{part}_proj.kv_cache_offset"] = torch.arange(-16.0, 16.0)
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    (directory / "quant_model_description.json").write_text(json.dumps(dict.fromkeys(tensors, "FLOAT")))
    options = OPTIONS | {"kv_cache_dtype": "int8"}
    alone, group = LLM(str(directory), **options), LLM(str(directory), tensor_parallel_size=2, **options)
    own = LLM(odd_model, **options)
    try:
        assert ids_of(generate(group)) == ids_of(generate(alone)) != ids_of(generate(own))
    finally:
        for llm in (group, alone, own):
            llm.shutdown()
