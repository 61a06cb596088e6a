"""Each row of the table of formats, through `LLM` and by two ranks: what the checkpoint means, token for token."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.loader import load_model
from tests import quantized_checkpoints as formats
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, TransformersModel, make_model_config
from tests.worker.test_quantized_formats import (
    PROMPT,
    ROUNDING_INPUTS,
    TOKENS,
    WEIGHT_ONLY,
    Rounding,
    assert_rounded_alike,
    one_token_each,
    per_token,
    static,
)

NUM_TOKENS = 8
# directories of a checkpoint and of the weights that it means, and flags
Made = tuple[str, str, dict[str, Any]]
Maker = Callable[[pathlib.Path], Made]


def of_table(name: str) -> Maker:
    """A checkpoint of `WEIGHT_ONLY` or `ROUNDING_INPUTS`."""

    def make(directory: pathlib.Path) -> Made:
        if name in WEIGHT_ONLY:
            writer, declared, options = WEIGHT_ONLY[name]
            return *formats.write(directory, writer, declared, **options), {}
        return *formats.write(directory, *ROUNDING_INPUTS[name][:2]), {}

    return make


def smoothquant(kind: str, flag: str) -> Maker:
    def make(directory: pathlib.Path) -> Made:
        writer, options = formats.smoothquant(kind, kind, kind, kind, 0.04)
        return *formats.write(directory, writer, None, **options), {"quantization": flag}

    return make


def modelslim(kind: str) -> Maker:
    def make(directory: pathlib.Path) -> Made:
        writer, options = formats.modelslim(kind)
        return *formats.write(directory, writer, None, **options), {"quantization": "ascend"}

    return make


def while_loading(method: str, writer: formats.Writer) -> Maker:
    def make(directory: pathlib.Path) -> Made:
        _, meant = formats.write(directory, writer, None)
        return str(formats.float_model()), meant, {"quantization": method}

    return make


# row → its checkpoint, and how inputs are rounded; None: not at all
ROWS: dict[str, tuple[Maker, Rounding | None]] = {
    **{name: (of_table(name), None) for name in ("awq", "gptq act-order", "gptq 3 bits", "gptq 8 bits v2")},
    **{name: (of_table(name), None) for name in ("W4A16 asymmetric", "W8A16 unpacked", "FP8 dynamic", "fp8 blocks")},
    **{name: (of_table(name), row[2]) for name, row in ROUNDING_INPUTS.items()},
    "smoothquant per tensor": (smoothquant("per-tensor", "smoothquant"), static(0.04, 0)),
    "smoothquant per token": (smoothquant("per-token", "smooth_quant"), per_token),
    "modelslim W8A8": (modelslim("W8A8"), static(0.04, -20)),
    "modelslim W8A8_DYNAMIC": (modelslim("W8A8_DYNAMIC"), per_token),
    "modelslim W8A16": (modelslim("W8A16"), None),
    "weight_only_int8": (while_loading("weight_only_int8", formats.int8()), None),
    "fp8 while loading": (while_loading("fp8", formats.fp8("channel")), None),
}


def expected(meant: str, rounding: Rounding, num_ranks: int = 1) -> torch.Tensor:
    """Log-probabilities [T, V] of prompts of one token; ranks round their shares of inputs by themselves."""

    def hook(is_split: bool) -> Callable[..., tuple[torch.Tensor]]:
        def rounded(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
            parts = inputs[0].chunk(num_ranks if is_split else 1, dim=-1)
            return (torch.cat([rounding(part) for part in parts], dim=-1),)

        return rounded

    model = TransformersModel(meant).model
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(hook(name.endswith(("o_proj", "down_proj"))))
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)[:, None]).logits[:, 0].log_softmax(-1)


def greedy(meant: str, prompt: list[int]) -> tuple[int, ...]:
    """What transformers generates."""
    model, tokens = TransformersModel(meant), list(prompt)
    for _ in range(NUM_TOKENS):
        tokens.append(int(model.log_probs(tokens)[-1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("row", ROWS)
def test_an_engine_computes_what_the_checkpoint_means(row: str, tmp_path: pathlib.Path) -> None:
    """Prompts of one token where inputs are rounded: a rounding that goes the other way changes all that follows."""
    make, rounding = ROWS[row]
    quantized, meant, flags = make(tmp_path)
    prompts = [[token] for token in TOKENS] if rounding else [PROMPT[:5], PROMPT]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=20)
    llm = LLM(quantized, dtype="float32", max_model_len=64, kv_cache_memory_bytes="8M", **flags)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    llm.shutdown()
    if rounding is None:
        assert [tuple(output.outputs[0].token_ids) for output in outputs] == [greedy(meant, one) for one in prompts]
        return
    log_probs = expected(meant, rounding)
    found = log_probs.clone()
    for index, output in enumerate(outputs):
        assert output.outputs[0].logprobs is not None
        for token, logprob in output.outputs[0].logprobs[0].items():
            found[index, token] = logprob.logprob
    assert_rounded_alike(found, log_probs)
    # what is not rounded is something else
    assert (found - expected(meant, lambda x: x)).abs().max() > 0.01


@pytest.mark.parametrize("row", [row for row, (_, rounding) in ROWS.items() if rounding is not None])
def test_two_ranks_round_inputs_by_themselves(row: str, tmp_path: pathlib.Path) -> None:
    make, rounding = ROWS[row]
    assert rounding is not None
    quantized, meant, _ = make(tmp_path)
    config = make_model_config(quantized)

    def run(context: BuildContext) -> torch.Tensor:
        model = load_model(config, LoadConfig(use_tqdm=False), context)
        return one_token_each(PagedDriver(config, max_rows=len(TOKENS), model=model))

    log_probs = expected(meant, rounding, num_ranks=2)
    for found in on_ranks(2, run):
        assert_rounded_alike(found, log_probs)
