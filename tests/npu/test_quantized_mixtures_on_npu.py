"""Experts in formats of quantized weights on a simulated NPU: what they mean, or a refusal."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ascend_vllm.config.model import LoadConfig, ModelConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.experts import Experts
from ascend_vllm.models.loader import load_model
from ascend_vllm.ops import ascend as _ascend_ops  # noqa: F401 - registers the operators
from tests import quantized_checkpoints as formats
from tests.distributed.thread_ranks import on_ranks
from tests.models.paged_driver import make_model_config
from tests.npu.launches import launched_by
from tests.worker import test_quantized_formats as linear
from tests.worker import test_quantized_mixtures as on_cpu

NPU = torch.device("npu:0")
# what results may be off by on the average, in parts of theirs: their rounding, that of scales, and that of what is
# between two products
ROUNDING_ERRORS = {torch.float16: 2**-8, torch.bfloat16: 2**-6}


@pytest.fixture(autouse=True)
def weights_in_tiles() -> None:
    """As the platform allows them."""
    torch.npu.config.allow_internal_format = True  # type: ignore[attr-defined]


def assert_experts_compute(
    config: ModelConfig, meant: str, rounding: linear.Rounding = lambda x: x, size: int = 1, *, whole: bool = False
) -> set[str]:
    """Compares the experts of a layer with the weights that the checkpoint means; returns what they launch."""
    weights = load_file(pathlib.Path(meant) / "model.safetensors")
    dtype = getattr(torch, config.dtype)

    def run(context: BuildContext) -> None:
        parallel = dataclasses.replace(context.parallel, expert_parallel=whole)
        model = load_model(config, LoadConfig(use_tqdm=False), dataclasses.replace(context, parallel=parallel))
        experts = next(layer for layer in model.layers() if isinstance(layer, Experts))
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(9, formats.HIDDEN, generator=generator).to(dtype)
        logits = torch.randn(9, 6, generator=generator)
        found = experts.forward(x.to(NPU), logits.to(dtype).to(NPU)).float().cpu()
        # renormalised, as Mixtral does
        chosen, ids = logits.to(dtype).float().softmax(-1).topk(2)
        expected = torch.zeros(9, formats.HIDDEN)
        for token in range(9):
            for weight, expert in zip(chosen[token] / chosen[token].sum(), ids[token].tolist(), strict=True):
                prefix = f"model.layers.0.block_sparse_moe.experts.{expert}"
                gate, down, up = (weights[f"{prefix}.w{number}.weight"] for number in (1, 2, 3))
                row = rounding(x[token : token + 1].float())
                inner = torch.nn.functional.silu(row @ gate.T) * (row @ up.T)
                expected[token] += weight * (rounding(inner) @ down.T)[0]
        error = (found - expected).abs()
        assert error.mean() < ROUNDING_ERRORS[dtype] * expected.abs().mean()
        # what is between two products may be rounded to 8 bits the other way
        assert error.max() < 4 * ROUNDING_ERRORS[dtype] * expected.abs().max()
        assert experts.forward(x[:0].to(NPU), logits[:0].to(dtype).to(NPU)).shape == (0, formats.HIDDEN)

    _, launched = launched_by(lambda: on_ranks(size, run, dtype, "npu"))
    assert launched >= {"aclnnMoeInitRoutingV3", "aclnnMoeTokenUnpermute"}
    return launched


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "size", "whole"),
    [("awq", 1, False), ("gptq", 2, True), ("W4A16", 2, False), ("gptq 8 bits", 1, False), ("fp8 blocks", 1, False)],
)
def test_weights_are_those_that_the_checkpoint_means(
    name: str, size: int, whole: bool, dtype: str, tmp_path: pathlib.Path
) -> None:
    quantized, meant = on_cpu.made(name, "mixtral", tmp_path)
    assert_experts_compute(make_model_config(quantized, dtype), meant, size=size, whole=whole)


_W8A8 = formats.compressed_tensors("int-quantized", on_cpu._BYTES, on_cpu._TOKEN, ignore=["lm_head", "re:.*gate$"])


@pytest.mark.parametrize("nz", ["0", "1"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_are_rounded(dtype: str, nz: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", nz)
    quantized, meant = formats.write(tmp_path, formats.int8(), _W8A8, base="mixtral")
    config = make_model_config(quantized, dtype)
    launched = assert_experts_compute(config, meant, linear.per_token)
    assert ("aclnnGroupedMatmulWeightNz" in launched) == (nz == "1")
    assert_experts_compute(config, meant, linear.per_token, 2, whole=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gptq act-order", "experts with act-order"),
        ("gptq dynamic", "experts with groups of inputs in 8 bits"),
    ],
)
def test_what_is_refused(name: str, words: str, tmp_path: pathlib.Path) -> None:
    quantized, _ = on_cpu.made(name, "mixtral", tmp_path)
    with pytest.raises(ModelLoadError, match=f"layers.0.mlp.experts: an NPU has no products of {words}; use W8A8"):
        load_model(make_model_config(quantized, "float16"), LoadConfig(use_tqdm=False), BuildContext(torch.half, NPU))


@pytest.mark.parametrize(
    ("inputs", "more", "words"),
    [(on_cpu._STATIC, on_cpu._MEASURED, "measured scales"), (on_cpu._TOKEN | {"symmetric": False}, {}, "asymmetric")],
)
def test_inputs_that_are_refused(
    inputs: dict[str, Any], more: dict[str, torch.Tensor], words: str, tmp_path: pathlib.Path
) -> None:
    declared = formats.compressed_tensors("int-quantized", on_cpu._BYTES, inputs, ignore=["lm_head", "re:.*gate$"])
    quantized, _ = formats.write(tmp_path, formats.int8(more=more), declared, base="mixtral")
    with pytest.raises(ModelLoadError, match=f"an NPU has no products of experts with {words}"):
        load_model(make_model_config(quantized, "float16"), LoadConfig(use_tqdm=False), BuildContext(torch.half, NPU))
