"""Checkpoints in each format of quantized weights on a simulated NPU: what they mean, as CPUs compute it in float32.

An NPU in 16 bits rounds more than that. So much is allowed as twice what it is off with the unquantized model of the
same weights.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ascend_vllm.attention.ascend import AscendAttention
from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import Linear
from ascend_vllm.layers.quantization.base import ActivationQuant, LinearOutput
from ascend_vllm.models.loader import load_model
from ascend_vllm.ops import ascend as _ascend_ops  # noqa: F401 - registers the operators
from ascend_vllm.ops import ascend_quantized
from ascend_vllm.ops.quantized_weights import InputRounding
from tests import quantized_checkpoints as formats
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import make_model_config
from tests.npu.launches import launched_by
from tests.tiny_models import tiny_model
from tests.worker import test_quantized_formats as on_cpu

NPU = torch.device("npu:0")
BLOCK_SIZE = 64
TOKENS = on_cpu.TOKENS


@pytest.fixture(autouse=True)
def weights_in_tiles() -> None:
    """As the platform allows them."""
    torch.npu.config.allow_internal_format = True  # type: ignore[attr-defined]


def one_token_each(config: ModelConfig, context: BuildContext | None = None, **load: Any) -> torch.Tensor:
    """Log-probabilities [T, V] of prompts of one token each, in one batch on the device."""
    context = context or BuildContext(getattr(torch, config.dtype), NPU)
    model = load_model(config, LoadConfig(use_tqdm=False, **load), context)
    backend, count = AscendAttention(BLOCK_SIZE), len(TOKENS)
    caches = [
        torch.zeros(
            backend.kv_cache_shape(count + 1, layer.kv_cache_spec(BLOCK_SIZE)), dtype=context.dtype, device=NPU
        )
        for layer in model.attention_layers
    ]
    backend.bind([layer.spec for layer in model.attention_layers], caches, count)
    places, ones = torch.arange(count), np.ones(count, np.int32)
    batch = ForwardBatch(
        input_ids=torch.tensor(TOKENS).to(NPU),
        positions=torch.zeros(count, dtype=torch.int64, device=NPU),
        slot_mapping=places.to(NPU) * BLOCK_SIZE,
        query_start=torch.arange(count + 1, dtype=torch.int32, device=NPU),
        seq_lens=torch.ones(count, dtype=torch.int32, device=NPU),
        block_table=places.int().to(NPU)[:, None],
        logits_indices=places.to(NPU),
        query_start_np=np.arange(count + 1, dtype=np.int32),
        seq_lens_np=ones,
        max_query_len=1,
        max_seq_len=1,
    )
    hidden = model.forward(batch, caches, backend, backend.prepare(batch))
    return model.compute_logits(hidden).float().log_softmax(-1).cpu()


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """By how much, on the average."""
    return (found - expected).abs().mean().item()


def assert_close(found: torch.Tensor, expected: torch.Tensor, plain: torch.Tensor, part: float = 2.0) -> None:
    """See above; and the weights of another format would be off by far more."""
    assert off(found, expected) <= part * off(plain, expected)


# ---- inputs that are not rounded -----------------------------------------------------------------------------------

WEIGHT_ONLY = {
    "awq": "float16",
    "awq per channel": "bfloat16",
    "gptq with a head": "bfloat16",
    "gptq 2 bits": "float16",
    "gptq 3 bits": "float16",
    "gptq 8 bits": "float16",
    "gptq 8 bits v2": "bfloat16",
    "gptq act-order": "float16",
    "gptq dynamic": "float16",
    "W4A16 asymmetric": "float16",
    "W4A16 act-order": "bfloat16",
    "W8A16 unpacked": "bfloat16",
    "FP8 per tensor": "float16",
    "fp8 blocks": "bfloat16",
}


@pytest.mark.parametrize("name", WEIGHT_ONLY)
def test_weights_are_those_that_the_checkpoint_means(name: str, tmp_path: pathlib.Path) -> None:
    quantized, meant = on_cpu.made(name, tmp_path)
    dtype = WEIGHT_ONLY[name]
    found, launched = launched_by(lambda: one_token_each(make_model_config(quantized, dtype)))
    plain = one_token_each(make_model_config(meant, dtype))
    expected = on_cpu.expected_with_inputs(meant, lambda x: x)
    # scales are rounded to bfloat16, too
    assert_close(found, expected, plain, 4.0 if dtype == "bfloat16" else 2.0)
    assert ("aclnnWeightQuantBatchMatmulV2" in launched) == ("fp8" not in name.lower())


def test_groups_of_16_are_filled_up(tmp_path: pathlib.Path) -> None:
    """With inputs that are there twice, and weights of zero."""
    quantized, meant = formats.write(tmp_path, formats.awq(16), on_cpu.AWQ | {"group_size": 16})
    found = one_token_each(make_model_config(quantized, "float16"))
    expected = on_cpu.expected_with_inputs(meant, lambda x: x)
    assert_close(found, expected, one_token_each(make_model_config(meant, "float16")))


def test_ranks_share_quantized_matrices(tmp_path: pathlib.Path) -> None:
    """With act-order, a rank's inputs are in parts of groups."""
    quantized, meant = on_cpu.made("gptq act-order", tmp_path)
    config, expected = make_model_config(quantized, "float16"), on_cpu.expected_with_inputs(meant, lambda x: x)
    plain = one_token_each(make_model_config(meant, "float16"))
    for found in on_ranks(2, lambda context: one_token_each(config, context), torch.float16, "npu"):
        assert_close(found, expected, plain)


def test_modelslim_without_rounded_inputs(tmp_path: pathlib.Path) -> None:
    writer, options = formats.modelslim("W8A16")
    quantized, meant = formats.write(tmp_path, writer, None, **options)
    expected = on_cpu.expected_with_inputs(meant, lambda x: x)
    plain = one_token_each(make_model_config(meant, "float16"))
    assert_close(one_token_each(make_model_config(quantized, "float16")), expected, plain)


def _rounded_while_loading(method: str) -> ModelConfig:
    config = make_model_config(formats.float_model(), "float16")
    return msgspec.structs.replace(
        config, arch=msgspec.structs.replace(config.arch, quantization=QuantizationConfig(method))
    )


def test_weights_are_rounded_while_loading(tmp_path: pathlib.Path) -> None:
    found = one_token_each(_rounded_while_loading("weight_only_int8"), quantize_lm_head=True)
    meant = on_cpu.rounded_weights(tmp_path, "weight_only_int8", head=True)
    expected = on_cpu.expected_with_inputs(meant, lambda x: x)
    assert_close(found, expected, one_token_each(make_model_config(meant, "float16")))


def test_rounding_to_what_is_widened_again_is_refused() -> None:
    with pytest.raises(
        ModelLoadError, match=r"cannot be rounded to float8_e4m3 for --device npu, .* weight_only_int8"
    ):
        one_token_each(_rounded_while_loading("fp8"))


def test_a_tied_head_is_rounded_and_its_embedding_is_not() -> None:
    config = make_model_config(tiny_model("qwen2-tied"), "float16")
    models = [
        load_model(config, LoadConfig(use_tqdm=False, quantize_lm_head=head), BuildContext(torch.float16, NPU))
        for head in (False, True)
    ]
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half().to(NPU)
    expected, found = (model.compute_logits(hidden).cpu() for model in models)
    assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert models[1].compute_logits(hidden[:0]).shape == (0, expected.shape[1])


# ---- inputs in 8 bits ----------------------------------------------------------------------------------------------
# Layer by layer: a model in 16 bits soon rounds an input the other way than one in float32, by a whole step.

# what a result may be off by, of the largest one: its rounding, and that of scales
ROUNDING_ERRORS = {"float16": 2**-9, "bfloat16": 2**-7}
Rounding = Callable[[torch.Tensor], torch.Tensor]


def assert_layers_round(config: ModelConfig, meant: str, rounding: Rounding, size: int = 1) -> set[str]:
    """Compares each layer's results with those of rounded inputs and the weights that the checkpoint means.

    Returns:
        The operators that computed them.
    """
    weights = load_file(pathlib.Path(meant) / "model.safetensors")
    dtype = getattr(torch, config.dtype)

    def run(context: BuildContext) -> int:
        model = load_model(config, LoadConfig(use_tqdm=False), context)
        layers = [layer for layer in model.layers() if isinstance(layer, Linear)]
        layers = [layer for layer in layers if isinstance(layer.activation_quant, ActivationQuant)]
        for layer in layers:
            shard, is_split = layer.in_shard, layer.in_features < layer.total_in_features
            x = torch.randn(9, layer.total_in_features, generator=torch.Generator().manual_seed(2)).to(dtype)
            expected = torch.cat([_product(rounding(x.float()), weights, output) for output in layer.outputs], dim=1)
            given = x[:, shard.start : shard.start + shard.size].to(NPU)
            found = layer.forward(given).float().cpu()
            bound = ROUNDING_ERRORS[config.dtype] * expected.abs().max() * (2 if is_split else 1)
            assert (found - expected).abs().max() < bound, layer.prefix
            # inputs that are not rounded give something else
            plain = torch.cat([_product(x.float(), weights, output) for output in layer.outputs], dim=1)
            assert off(found, expected) < 0.5 * off(plain, expected), layer.prefix
            assert layer.forward(given[:0]).shape == (0, layer.out_features)
        return len(layers)

    counts, launched = launched_by(lambda: on_ranks(size, run, dtype, "npu"))
    assert counts == [4] * size
    return launched


def _product(x: torch.Tensor, weights: dict[str, torch.Tensor], output: LinearOutput) -> torch.Tensor:
    """x [T, K] → a rank's outputs of a matrix [N, K]."""
    rows = slice(output.shard.start, output.shard.start + output.shard.size)
    bias = weights.get(f"{output.name}.bias")
    return torch.nn.functional.linear(x, weights[f"{output.name}.weight"][rows], None if bias is None else bias[rows])


def _static(scale: float, zero: int, dtype: str) -> Rounding:
    """By the scale whose reciprocal is a number of the dtype."""
    reciprocal = torch.tensor(1 / scale).to(getattr(torch, dtype)).float()
    return on_cpu.static((1 / reciprocal).item(), zero)


DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", on_cpu.ROUNDING_INPUTS)
def test_inputs_are_rounded(name: str, dtype: str, tmp_path: pathlib.Path) -> None:
    writer, declared, rounding = on_cpu.ROUNDING_INPUTS[name]
    quantized, meant = formats.write(tmp_path, writer, declared)
    is_static, is_asymmetric = "static" in name, "asymmetric" in name
    if is_static:
        rounding = _static(0.04, -20 if is_asymmetric else 0, dtype)
    launched = assert_layers_round(make_model_config(quantized, dtype), meant, rounding, 2 if is_static else 1)
    assert "aclnnQuantMatmulWeightNz" in launched
    assert ("aclnnAscendQuantV3" in launched) == is_static
    assert ("aclnnTransQuantParamV3" in launched) == (is_static and dtype == "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["per-tensor", "per-token"])
def test_smoothquant(kind: str, dtype: str, tmp_path: pathlib.Path) -> None:
    writer, options = formats.smoothquant(kind, kind, kind, kind, 1.0)
    quantized, meant = formats.write(tmp_path, writer, None, **options, architectures=["QuantizedQwen2ForCausalLM"])
    rounding = on_cpu.static(1.0, 0) if kind == "per-tensor" else on_cpu.per_token
    assert_layers_round(make_model_config(quantized, dtype), meant, rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "size"), [("W8A8", 2), ("W8A8_DYNAMIC", 1)])
def test_modelslim(kind: str, size: int, dtype: str, tmp_path: pathlib.Path) -> None:
    """The first of the ranks that share the inputs of a matrix adds the bias that contains what offsets add."""
    # float16 models have the bits of their scales
    writer, options = formats.modelslim(kind, has_bits=dtype == "float16")
    quantized, meant = formats.write(tmp_path, writer, None, **options)
    rounding = _static(0.04, -20, dtype) if kind == "W8A8" else on_cpu.per_token
    assert_layers_round(make_model_config(quantized, dtype), meant, rounding, size)


def test_weights_in_the_plain_layout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")
    writer, declared, rounding = on_cpu.ROUNDING_INPUTS["W8A8"]
    quantized, meant = formats.write(tmp_path, writer, declared)
    launched = assert_layers_round(make_model_config(quantized, "float16"), meant, rounding)
    assert "aclnnQuantMatmulV5" in launched and "aclnnQuantMatmulWeightNz" not in launched


# ---- weights that the operators do not take whole ------------------------------------------------------------------


def test_outputs_beyond_what_operators_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces; and 4 bits of outputs that are not packed are kept in 8."""
    monkeypatch.setattr(ascend_quantized, "MOST_ELEMENTS", 50)
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn(3, 32, generator=generator).half(), torch.randn(131, generator=generator).half()
    codes = torch.randint(16, (131, 32), generator=generator, dtype=torch.uint8)
    scales, zeros = torch.rand(131, 1, generator=generator) / 100, torch.randint(16, (131, 1), generator=generator)
    weight = ascend_quantized.make_coded_weight(
        131, 32, 32, "uint4", has_zeros=True, scale_dtype=torch.float32, dtype=torch.float16, device=NPU
    )
    weight.pack_rows(0, codes, scales, zeros.to(torch.uint8))
    weight.finish()
    expected = torch.nn.functional.linear(x.float(), (codes - zeros) * scales, bias.float())
    torch.testing.assert_close(weight(x.to(NPU), bias.to(NPU)).float().cpu(), expected, atol=2e-3, rtol=2e-3)
    values, rounding = codes.to(torch.int8) - 8, InputRounding()
    int8 = ascend_quantized.NpuInt8Weight([(values, scales[:, 0])], rounding, torch.float16, NPU)
    expected = torch.nn.functional.linear(on_cpu.per_token(x.float()), values * scales, bias.float())
    found = int8.product(int8.quantize(x.to(NPU)), bias.to(NPU))
    torch.testing.assert_close(found.float().cpu(), expected, atol=2e-3, rtol=2e-3)


def test_too_many_inputs_are_refused() -> None:
    with pytest.raises(
        ModelLoadError, match="no products of quantized weights with 65536 inputs, but of 65535 at most"
    ):
        ascend_quantized.make_coded_weight(
            8, 65536, 128, "uint8", has_zeros=False, scale_dtype=torch.float32, dtype=torch.float16, device=NPU
        )
