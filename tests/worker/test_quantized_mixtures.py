"""Mixtures of experts and latent attention in each format compute what transformers does with the weights meant."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.config.model import LoadConfig
from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.loader import load_model
from tests import quantized_checkpoints as formats
from tests.combinations import combinations
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import PagedDriver, TransformersModel, load, make_model_config, random_tokens
from tests.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
MODELS = ("mixtral", "qwen2-moe", "deepseek-v3")
PROMPT = random_tokens(24, VOCAB_SIZE, seed=22)
TOLERANCE = {"atol": 5e-4, "rtol": 0.0}

_GROUPS = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
_BYTES = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True}
# name → writer, and quantization_config
FORMATS: dict[str, tuple[formats.Writer, dict[str, Any]]] = {
    "awq": (formats.awq(32), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}),
    "gptq": (formats.gptq(4, 64, symmetric=True), _GPTQ | {"bits": 4, "group_size": 64}),
    "gptq 8 bits": (formats.gptq(8, -1, symmetric=False), _GPTQ | {"bits": 8, "group_size": -1, "sym": False}),
    "gptq act-order": (
        formats.gptq(4, 32, symmetric=False, order="act"),
        _GPTQ | {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    ),
    # gates and ups in 4 bits, downs in 8
    "gptq dynamic": (
        lambda name, weight: formats.gptq(8 if name.endswith(("down_proj", "w2")) else 4, 32, symmetric=True)(
            name, weight
        ),
        _GPTQ | {"bits": 4, "group_size": 32, "dynamic": {r".*\.(mlp.*down_proj|w2)": {"bits": 8}}},
    ),
    "W4A16": (
        formats.packed(4, 32, symmetric=True),
        formats.compressed_tensors("pack-quantized", _GROUPS | {"num_bits": 4}, ignore=["lm_head", "re:.*gate$"]),
    ),
    "FP8": (
        formats.fp8("channel"),
        formats.compressed_tensors(
            "float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        ),
    ),
    "fp8": (formats.fp8("tensor"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 blocks": (
        formats.fp8("block", "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 64]},
    ),
}


def made(name: str, base: str, directory: pathlib.Path) -> tuple[str, str]:
    writer, declared = FORMATS[name]
    return formats.write(directory, writer, declared, base=base)


@pytest.mark.parametrize(("name", "base"), combinations(list(FORMATS), MODELS))
def test_weights_are_those_that_the_checkpoint_means(name: str, base: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = made(name, base, tmp_path)
    found = PagedDriver(make_model_config(quantized)).step({0: PROMPT})[0]
    torch.testing.assert_close(found, TransformersModel(meant).log_probs(PROMPT), **TOLERANCE)
    unquantized = PagedDriver(make_model_config(formats.float_model(base))).step({0: PROMPT})[0]
    assert (found - unquantized).abs().max() > 0.005


@pytest.mark.parametrize(
    ("name", "base", "whole_experts"),
    [
        ("awq", "qwen2-moe", False),
        ("gptq act-order", "mixtral", True),
        ("gptq 8 bits", "deepseek-v3", True),
        ("fp8 blocks", "deepseek-v3", False),
    ],
)
def test_ranks_share_quantized_experts(name: str, base: str, whole_experts: bool, tmp_path: pathlib.Path) -> None:
    quantized, meant = made(name, base, tmp_path)
    config = make_model_config(quantized)

    def run(context: BuildContext) -> torch.Tensor:
        parallel = ParallelContext(context.parallel.tp_rank, 2, expert_parallel=whole_experts)
        context = dataclasses.replace(context, parallel=parallel)
        return PagedDriver(config, model=load_model(config, LoadConfig(use_tqdm=False), context)).step({0: PROMPT})[0]

    expected = TransformersModel(meant).log_probs(PROMPT)
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected, **TOLERANCE)


# ---- inputs in 8 bits ------------------------------------------------------------------------------------------

Rounding = Callable[[torch.Tensor], torch.Tensor]
TOKENS = random_tokens(12, VOCAB_SIZE, seed=23)
_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": False}
_MEASURED = {"input_scale": torch.tensor([0.06]), "input_zero_point": torch.tensor([-7], dtype=torch.int8)}


def per_token(x: torch.Tensor) -> torch.Tensor:
    """x as symmetric 8 bits with a scale per token."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def measured(x: torch.Tensor) -> torch.Tensor:
    """x as 8 bits of a given scale and zero."""
    return (((x / 0.06).round() - 7).clamp(-128, 127) + 7) * 0.06


def expected_with_inputs(meant: str, rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Log-probabilities [T, V] of prompts of one token, with rounded inputs of what is quantized.

    Inputs of kv_b_proj are not: attention multiplies queries by it.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        meant, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    exact = {
        parameter.data_ptr()
        for name, parameter in model.named_parameters()
        if name.endswith(("lm_head.weight", ".gate.weight", "shared_expert_gate.weight", "kv_b_proj.weight"))
    }
    plain = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # the router of DeepSeek is converted before
        is_exact = weight.data_ptr() in exact or weight.shape[0] == 8
        return plain(x if is_exact or len(x) == 0 else rounding(x), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    with torch.inference_mode():
        return model(torch.tensor(TOKENS)[:, None]).logits[:, 0].log_softmax(-1)


def one_token_each(driver: PagedDriver) -> torch.Tensor:
    """Log-probabilities [T, V] of prompts of one token each, in one batch."""
    rows = driver.step({row: [token] for row, token in enumerate(TOKENS)})
    return torch.cat([rows[row] for row in range(len(TOKENS))])


@pytest.mark.parametrize(
    ("base", "name"),
    combinations(MODELS, ("W8A8", "W8A8 static", "ascend")),
)
def test_inputs_are_rounded(base: str, name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "ascend":
        writer, options = formats.modelslim("W8A8_DYNAMIC", base=base)
        quantized, meant = formats.write(tmp_path, writer, None, base=base, **options)
    else:
        is_static = name == "W8A8 static"
        writer = formats.int8(more=_MEASURED if is_static else None)
        declared = formats.compressed_tensors("int-quantized", _BYTES, _STATIC if is_static else _TOKEN)
        quantized, meant = formats.write(tmp_path, writer, declared, base=base)
    found = one_token_each(PagedDriver(make_model_config(quantized), max_rows=len(TOKENS)))
    rounding = measured if name == "W8A8 static" else per_token
    expected = expected_with_inputs(meant, rounding, monkeypatch)
    # a rounding that goes the other way changes one token much; that may happen, rarely
    assert (found - expected).abs().amax(-1).sort().values[-3] < 5e-4
    exact = TransformersModel(meant).log_probs(TOKENS[:1])
    assert (found[:1] - exact).abs().max() > 0.01


# ---- made while loading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "base", "size", "is_stacked"),
    [("weight_only_int8", "qwen2-moe", 2, True), ("fp8", "deepseek-v3", 1, False), ("fp8", "mixtral", 2, False)],
)
def test_experts_are_rounded_while_loading(
    method: str, base: str, size: int, is_stacked: bool, tmp_path: pathlib.Path
) -> None:
    """The router and the shared expert's gate stay as they are."""
    writer = formats.fp8("channel") if method == "fp8" else formats.int8()
    _, meant = formats.write(tmp_path, writer, None, base=base)
    directory = formats.float_model(base)
    if is_stacked:
        directory = _stacked(tmp_path / "stacked", directory)
    config = make_model_config(directory)
    config = msgspec.structs.replace(
        config, arch=msgspec.structs.replace(config.arch, quantization=QuantizationConfig(method))
    )

    def run(context: BuildContext) -> torch.Tensor:
        return PagedDriver(config, model=load_model(config, LoadConfig(use_tqdm=False), context)).step({0: PROMPT})[0]

    expected = TransformersModel(meant).log_probs(PROMPT)
    for found in on_ranks(size, run):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def _stacked(directory: pathlib.Path, source: pathlib.Path) -> pathlib.Path:
    """The checkpoint with the matrices of all experts in one tensor."""
    directory.mkdir()
    for path in source.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    prefix = "model.layers.0.mlp.experts"

    def stack(matrix: str) -> torch.Tensor:
        return torch.stack([weights.pop(f"{prefix}.{index}.{matrix}.weight") for index in range(6)])

    weights[f"{prefix}.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
    weights[f"{prefix}.down_proj"] = stack("down_proj")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


# ---- an engine -------------------------------------------------------------------------------------------------


def tokens(directory: str, **options: Any) -> list[tuple[int, ...]]:
    llm = LLM(directory, max_model_len=96, kv_cache_memory_bytes="8M", block_size=16, **options)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": PROMPT[:n]} for n in (5, 9, 24)], sampling, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_tokens_of_an_engine(tmp_path: pathlib.Path) -> None:
    """Decoding is replayed from tapes."""
    quantized, meant = made("awq", "deepseek-v3", tmp_path)
    assert tokens(quantized, dtype="float32") == tokens(meant, dtype="float32")


# ---- what is not quantized, or not alike -----------------------------------------------------------------------


def test_projections_of_latents_in_different_formats(tmp_path: pathlib.Path) -> None:
    writer, declared = FORMATS["awq"]
    declared = declared | {"modules_to_not_convert": ["self_attn.kv_a_proj_with_mqa"]}
    quantized, meant = formats.write(
        tmp_path, writer, declared, base="deepseek-v3", only=lambda name: "kv_a_proj" not in name
    )
    found = PagedDriver(make_model_config(quantized)).step({0: PROMPT})[0]
    torch.testing.assert_close(found, TransformersModel(meant).log_probs(PROMPT), **TOLERANCE)


def test_experts_that_are_not_quantized_beside_layers_that_are(tmp_path: pathlib.Path) -> None:
    writer, declared = FORMATS["gptq"]
    quantized, meant = formats.write(
        tmp_path, writer, declared, base="qwen2-moe", only=lambda name: ".experts." not in name
    )
    found = PagedDriver(make_model_config(quantized)).step({0: PROMPT})[0]
    torch.testing.assert_close(found, TransformersModel(meant).log_probs(PROMPT), **TOLERANCE)


def test_experts_that_are_not_quantized_alike(tmp_path: pathlib.Path) -> None:
    writer, declared = FORMATS["gptq"]
    (tmp_path / "a").mkdir()
    quantized, _ = formats.write(
        tmp_path / "a", writer, declared, base="mixtral", only=lambda name: ".experts.3." not in name
    )
    with pytest.raises(ModelLoadError, match=r"mlp\.experts\.3\.gate_proj is quantized in another way"):
        load(make_model_config(quantized))

    def mixed(name: str, weight: torch.Tensor) -> formats.Written:
        return formats.gptq(8 if ".experts.3." in name else 4, 64, symmetric=True)(name, weight)

    (tmp_path / "b").mkdir()
    dynamic = {"dynamic": {r".*\.experts\.3\..*": {"bits": 8}}}
    quantized, _ = formats.write(tmp_path / "b", mixed, declared | dynamic, base="mixtral")
    with pytest.raises(ModelLoadError, match=r"mlp\.experts: the experts of a layer must be quantized alike"):
        load(make_model_config(quantized))


def test_experts_with_biases_of_measured_scales(tmp_path: pathlib.Path) -> None:
    writer, options = formats.modelslim("W8A8", base="mixtral")
    quantized, _ = formats.write(tmp_path, writer, None, base="mixtral", **options)
    with pytest.raises(ModelLoadError, match=r"gate_proj: a bias, as ModelSlim's W8A8 has it, is not supported here"):
        load(make_model_config(quantized))
