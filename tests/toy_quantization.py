"""A quantization format that lives in tests only: 8-bit weights with a scale per row, of all layers and embeddings.

Its ops have no kernels, and tapes record them all the same. `checkpoints` makes a quantized model, and the same model
with its weights rounded as the format rounds them.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.layers.quantization.base import (
    Activation,
    ActivationQuant,
    LayerKind,
    LinearLayer,
    QuantMethod,
    QuantScheme,
)
from ascend_vllm.ops.embedding import gather_rows
from ascend_vllm.ops.gemm import PackedLinear
from ascend_vllm.ops.registry import define_op
from tests.tiny_models import tiny_model

METHOD = "toy"
TARGET = f"{__name__}:ToyScheme"
# values of the parameter "computes"
IN_APPLY, BY_KERNELS, WITH_ACTIVATIONS = "in_apply", "by_kernels", "with_activations"


# the largest level: so few that rounding changes every text
LARGEST = 15


def round_rows(x: torch.Tensor, largest: int = LARGEST) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., C] → levels [..., C] int8 and scales [..., 1] float32; their product is near x."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / largest
    return (x / scales).round().to(torch.int8), scales


def restore(levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What was rounded, [R, C]."""
    return (levels.float() * scales).to(dtype)


def _x_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    yield (torch.linspace(-2, 2, 32, dtype=dtype).view(4, 8),)


def _weight_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    yield *round_rows(torch.linspace(-1, 1, 24).view(3, 8)), dtype


def _rows_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for arguments in _weight_inputs(dtype):
        yield torch.tensor([2, 0]), *arguments


def _linear_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for (x,), (levels, scales, _) in zip(_x_inputs(dtype), _weight_inputs(dtype), strict=True):
        yield x, levels, scales, torch.ones(3, dtype=dtype)


@define_op(inputs=_x_inputs, dtypes=(torch.float32,), devices=(), recordable=True)
def toy_round(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `round_rows`."""
    return round_rows(x)


@define_op(inputs=_weight_inputs, dtypes=(torch.float32,), devices=(), recordable=True)
def toy_restore(levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `restore`."""
    return restore(levels, scales, dtype)


@define_op(inputs=_rows_inputs, dtypes=(torch.float32,), devices=(), recordable=True)
def toy_rows(indices: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Some rows of a weight."""
    return restore(levels.index_select(0, indices), scales.index_select(0, indices), dtype)


@define_op(inputs=_linear_inputs, dtypes=(torch.float32,), devices=(), recordable=True)
def toy_linear(
    x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, in] → [T, out]."""
    weight = restore(levels, scales, x.dtype)
    return PackedLinear.of(weight)(x, bias) if x.device.type == "cpu" else torch.nn.functional.linear(x, weight, bias)


class Dequantizing(QuantMethod):
    """Makes the weight in the model's dtype in each call."""

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        self.levels = torch.empty(layer.out_features, layer.in_features, dtype=torch.int8, device=layer.device)
        self.scales = torch.empty(layer.out_features, 1, dtype=torch.float32, device=layer.device)
        slots, row = [], 0
        for output in layer.outputs:
            rows, start = slice(row, row + output.shard.size), output.shard.start
            shape = (output.total, layer.total_in_features)
            slots.append(
                WeightSlot(f"{output.name}.qweight", shape, self.levels[rows], (start, layer.in_shard.start))
            )
            slots.append(WeightSlot(f"{output.name}.scales", (output.total, 1), self.scales[rows], (start,)))
            row += output.shard.size
        return slots

    def after_load(self, layer: LinearLayer) -> None:
        pass

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        result: torch.Tensor = toy_linear(x, self.levels, self.scales, layer.bias)
        return result

    def look_up(self, layer: LinearLayer, indices: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = toy_rows(indices, self.levels, self.scales, layer.dtype)
        return rows


class OnlyKernels(Dequantizing):
    """Multiplies with the levels, then with the scales as a diagonal matrix: by ops that have kernels."""

    def after_load(self, layer: LinearLayer) -> None:
        self.table = restore(self.levels, self.scales, layer.dtype)
        self.multiply = PackedLinear.of(self.levels.to(layer.dtype))
        self.scale = PackedLinear.of(self.scales[:, 0].to(layer.dtype).diag())

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        return self.scale(self.multiply(x, None), layer.bias)

    def look_up(self, layer: LinearLayer, indices: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return gather_rows(self.table, indices)


class PerToken(ActivationQuant):
    """8-bit activations with a scale per token."""

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded: tuple[torch.Tensor, torch.Tensor] = toy_round(x)
        return rounded


class QuantizedInputs(Dequantizing):
    """Takes such activations where a norm gives them."""

    activation_quant = PerToken()

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        return super().apply(layer, toy_restore(*x, layer.dtype) if isinstance(x, tuple) else x)


METHODS: dict[str, type[QuantMethod]] = {
    IN_APPLY: Dequantizing,
    BY_KERNELS: OnlyKernels,
    WITH_ACTIVATIONS: QuantizedInputs,
}


class ToyScheme(QuantScheme):
    """Quantizes every layer of every kind."""

    def __init__(self, config: QuantizationConfig) -> None:
        computes = config.parameters.get("computes", IN_APPLY)
        if computes not in METHODS:
            raise ModelLoadError(f"config.json: quantization_config says computes {computes!r}")
        self._method = METHODS[computes]

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        assert layer.kind in LayerKind
        return self._method()


def checkpoints(
    directory: pathlib.Path, name: str, dtype: str = "float32", computes: str = IN_APPLY
) -> tuple[str, str]:
    """Directories of a quantized tiny model, and of the model without quantization whose weights are as coarse."""
    quantized, rounded = directory / "quantized", directory / "rounded"
    for path in (quantized, rounded):
        shutil.copytree(tiny_model(name, dtype), path)
    weights = load_file(rounded / "model.safetensors")
    levels_and_scales = {}
    for weight_name, weight in weights.items():
        if weight.dim() != 2 or "embed_positions" in weight_name:
            levels_and_scales[weight_name] = weight
            continue
        levels, scales = round_rows(weight)
        stem = weight_name.removesuffix(".weight")
        levels_and_scales |= {f"{stem}.qweight": levels, f"{stem}.scales": scales}
        weights[weight_name] = restore(levels, scales, weight.dtype)
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    save_file(levels_and_scales, quantized / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": METHOD, "computes": computes}
    (quantized / "config.json").write_text(json.dumps(config))
    return str(quantized), str(rounded)
