"""Checkpoints in each format of quantized weights compute what transformers does with the weights that they mean."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.errors import ConfigError, ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.quantization.weight_only import arrange_groups
from ascend_vllm.models.loader import load_model
from tests import quantized_checkpoints as formats
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, TransformersModel, load, make_model_config, random_tokens
from tests.tiny_models import VOCAB_SIZE

PROMPT = random_tokens(24, VOCAB_SIZE, seed=20)
TOLERANCE = {"atol": 2e-4, "rtol": 0.0}

AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True}
# name → writer, quantization_config, and how it is written
WEIGHT_ONLY: dict[str, tuple[formats.Writer, dict[str, Any], dict[str, Any]]] = {
    "awq": (formats.awq(64), AWQ | {"group_size": 64}, {}),
    "awq per channel": (formats.awq(-1), AWQ | {"group_size": -1}, {}),
    "awq in part": (
        formats.awq(32),
        AWQ | {"group_size": 32, "modules_to_not_convert": ["layers.1.mlp"]},
        {"only": lambda name: "layers.1.mlp" not in name},
    ),
    "gptq": (formats.gptq(4, 32, symmetric=True, order="plain"), GPTQ | {"bits": 4, "group_size": 32}, {}),
    "gptq with a head": (
        formats.gptq(4, 64, symmetric=False),
        GPTQ | {"bits": 4, "group_size": 64, "sym": False, "lm_head": True},
        {"head": True},
    ),
    "gptq 2 bits": (formats.gptq(2, 32, symmetric=False), GPTQ | {"bits": 2, "group_size": 32, "sym": False}, {}),
    "gptq 3 bits": (formats.gptq(3, 64, symmetric=True), GPTQ | {"bits": 3, "group_size": 64}, {}),
    "gptq 8 bits": (formats.gptq(8, -1, symmetric=True), GPTQ | {"bits": 8, "group_size": -1}, {}),
    "gptq 8 bits v2": (
        formats.gptq(8, 64, symmetric=False, is_v2=True),
        GPTQ | {"bits": 8, "group_size": 64, "sym": False, "checkpoint_format": "gptq_v2"},
        {},
    ),
    "gptq act-order": (
        formats.gptq(4, 32, symmetric=False, order="act"),
        GPTQ | {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        {},
    ),
    "gptq static groups": (
        formats.gptq(4, 32, symmetric=True, order="plain"),
        GPTQ | {"bits": 4, "group_size": 32, "desc_act": True, "static_groups": True},
        {},
    ),
    "gptq dynamic": (
        lambda name, weight: formats.gptq(8 if "mlp" in name else 4, 32, symmetric=True)(name, weight),
        GPTQ
        | {
            "bits": 4,
            "group_size": 32,
            "dynamic": {r"-:.*layers\.1\.self_attn.*": {}, r"+:.*\.mlp\..*": {"bits": 8}},
        },
        {"only": lambda name: "layers.1.self_attn" not in name},
    ),
    "gptq with biases of zeros": (
        formats.gptq(4, 32, symmetric=True),
        GPTQ | {"bits": 4, "group_size": 32},
        {"more": {"model.layers.0.self_attn.o_proj.bias": torch.zeros(formats.HIDDEN)}},
    ),
}


@functools.cache
def original() -> torch.Tensor:
    """Log-probabilities of the model that was quantized."""
    return PagedDriver(make_model_config(formats.float_model())).step({0: PROMPT})[0]


def made(name: str, directory: pathlib.Path) -> tuple[str, str]:
    writer, declared, options = WEIGHT_ONLY[name]
    return formats.write(directory, writer, declared, **options)


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_are_those_that_the_checkpoint_means(name: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = made(name, tmp_path)
    found = PagedDriver(make_model_config(quantized)).step({0: PROMPT})[0]
    torch.testing.assert_close(found, TransformersModel(meant).log_probs(PROMPT), **TOLERANCE)
    assert (found - original()).abs().max() > 0.005


@pytest.mark.parametrize("name", ["awq", "gptq 3 bits", "gptq act-order", "gptq with a head", "gptq dynamic"])
def test_ranks_share_quantized_matrices(name: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = made(name, tmp_path)
    config = make_model_config(quantized)

    def run(context: BuildContext) -> torch.Tensor:
        return PagedDriver(config, model=load_model(config, LoadConfig(use_tqdm=False), context)).step({0: PROMPT})[0]

    expected = TransformersModel(meant).log_probs(PROMPT)
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_groups_that_ranks_cannot_split(tmp_path: pathlib.Path) -> None:
    quantized, _ = formats.write(tmp_path, formats.awq(64), AWQ | {"group_size": 64})
    config = make_model_config(quantized, num_attention_heads=8, num_key_value_heads=8)

    def run(context: BuildContext) -> None:
        load_model(config, LoadConfig(use_tqdm=False), context)

    with pytest.raises(ConfigError) as caught:
        on_ranks(8, run)
    assert str(caught.value) == (
        "--tensor-parallel-size 8 cannot split the 192 inputs of model.layers.0.mlp.down_proj, which are quantized "
        "in groups of 64; possible are 1, 2, 3, 4, 6, 12, 24, 48"
    )


def _dtype_texts(directory: str, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM(directory, max_model_len=96, kv_cache_memory_bytes="8M", block_size=16, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": PROMPT[:n]} for n in (5, 9, 24)], sampling, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_tokens_of_an_engine(tmp_path: pathlib.Path) -> None:
    """Decoding is replayed from tapes; act-order gathers inputs."""
    quantized, meant = made("gptq act-order", tmp_path)
    assert _dtype_texts(quantized, dtype="float32") == _dtype_texts(meant, dtype="float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_dtype(dtype: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = made("awq", tmp_path)
    found = PagedDriver(make_model_config(quantized, dtype)).step({0: PROMPT})[0]
    expected = TransformersModel(meant).log_probs(PROMPT)
    assert (found - expected).abs().max() < {"float16": 0.05, "bfloat16": 0.4}[dtype]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"quant_method": "awq"}, "w_bit or bits must be a whole number"),
        (AWQ | {"group_size": 64, "bits": 8}, "only 4-bit weight quantization is supported for AWQ, but got 8 bits"),
        (AWQ | {"group_size": 64, "version": "GEMV"}, "layout 'gemv' are not supported; convert the checkpoint"),
        (AWQ | {"group_size": 64, "backend": "llm-awq"}, "layout 'llm-awq' are not supported"),
        (AWQ | {"group_size": 64, "zero_point": False}, "without zero points"),
        (AWQ | {"group_size": 24}, "groups of 24 inputs are not supported; they must have a multiple of 16"),
        (
            GPTQ | {"bits": 5, "group_size": 64},
            "only 2/3/4/8-bit weight quantization is supported for GPTQ, but got 5",
        ),
        (GPTQ | {"bits": 4, "group_size": 64, "checkpoint_format": "gptq_p"}, "layout 'gptq_p'"),
        (GPTQ | {"bits": 4, "group_size": 64, "is_marlin_format": True}, "layout 'marlin'"),
        (
            GPTQ | {"bits": 4, "group_size": 64, "dynamic": {".*q_proj": {"bits": 8}}},
            "different rules for the matrices",
        ),
    ],
)
def test_what_is_refused(declared: dict[str, Any], words: str) -> None:
    config = make_model_config(formats.float_model(), quantization_config=declared)
    with pytest.raises(ModelLoadError, match=words):
        load(config, "dummy")


def test_flags_need_a_checkpoint_of_the_format() -> None:
    for method in ("awq", "gptq"):
        with pytest.raises(ModelLoadError, match=f"Cannot find the config file for {method}"):
            LLM(str(formats.float_model()), quantization=method, max_model_len=64, kv_cache_memory_bytes="8M")


def test_layers_quantized_in_part(tmp_path: pathlib.Path) -> None:
    writer = formats.awq(64)
    quantized, _ = formats.write(
        tmp_path, writer, AWQ | {"group_size": 64}, only=lambda name: not name.endswith("k_proj")
    )
    with pytest.raises(ModelLoadError) as caught:
        load(make_model_config(quantized))
    assert str(caught.value) == (
        "Detected some but not all shards of model.layers.0.self_attn.qkv_proj are quantized. All shards of fused "
        "layers to have the same precision."
    )


def test_biases_that_are_not_zero(tmp_path: pathlib.Path) -> None:
    writer, declared, _ = WEIGHT_ONLY["gptq with biases of zeros"]
    more = {"model.layers.0.self_attn.o_proj.bias": torch.ones(formats.HIDDEN)}
    quantized, _ = formats.write(tmp_path, writer, declared, more=more)
    with pytest.raises(ModelLoadError, match=r"o_proj\.bias is not zero, but config\.json says"):
        load(make_model_config(quantized))


@pytest.mark.parametrize(
    "groups",
    [
        lambda: torch.arange(96) // 32,
        lambda: torch.arange(40, 136) // 40,
        lambda: (torch.arange(96) // 32)[torch.randperm(96)],
        lambda: torch.randint(5, (70,)),
        lambda: torch.tensor([3]),
    ],
)
def test_groups_in_order(groups: Callable[[], torch.Tensor]) -> None:
    torch.manual_seed(0)
    found = groups()
    arranged = arrange_groups(found)
    size = arranged.group_size
    order = torch.arange(len(found)) if arranged.order is None else arranged.order
    assert size % 16 == 0 or len(arranged.columns) == 1
    assert [int(arranged.columns[place // size]) for place in range(len(order))] == found[order].tolist()
    kept = [index for place, index in enumerate(order.tolist()) if place not in arranged.padding.tolist()]
    assert sorted(kept) == list(range(len(found)))
