"""A quantization format that lives in tests only: 8-bit weights with a scale per row, of all layers and embeddings.

`checkpoints` makes a quantized model, and the same model with its weights rounded as the format rounds them.
"""

from __future__ import annotations

import json
import pathlib
import shutil

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
        weight = restore(self.levels, self.scales, layer.dtype)
        if x.device.type == "cpu":
            return PackedLinear.of(weight)(x, layer.bias)
        return torch.nn.functional.linear(x, weight, layer.bias)

    def look_up(self, layer: LinearLayer, indices: torch.Tensor) -> torch.Tensor:
        return restore(self.levels.index_select(0, indices), self.scales.index_select(0, indices), layer.dtype)


class OnlyKernels(Dequantizing):
    """Multiplies with the levels, then with the scales as a diagonal matrix: by ops that tapes can record."""

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
        return round_rows(x)


class QuantizedInputs(Dequantizing):
    """Takes such activations where a norm gives them."""

    activation_quant = PerToken()

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        return super().apply(layer, restore(*x, layer.dtype) if isinstance(x, tuple) else x)


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
