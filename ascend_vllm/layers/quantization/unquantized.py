"""Weights in the model's own dtype."""

from __future__ import annotations

import torch

from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.layers.quantization.base import LinearLayer, QuantMethod
from ascend_vllm.ops.gemm import PackedLinear


class Unquantized(QuantMethod):
    """Loads [out, in] matrices one below another, packed for the device's GEMM."""

    def __init__(self) -> None:
        self._loading: PackedLinear | None = None
        self._packed: PackedLinear | None = None

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """One weight for all outputs of the layer; a slot per output."""
        self._loading = PackedLinear(layer.out_features, layer.in_features, layer.dtype, layer.device)
        slots = []
        row = 0
        for output in layer.outputs:
            slots.append(
                WeightSlot(
                    f"{output.name}.weight",
                    (output.total, layer.total_in_features),
                    self._loading.target(row, output.shard.size),
                    (output.shard.start, layer.in_shard.start),
                )
            )
            row += output.shard.size
        return slots

    def after_load(self, layer: LinearLayer) -> None:  # noqa: ARG002 - the weight is kept here
        """The weight is complete."""
        if self._loading is not None:
            self._loading.finish()
            self._packed, self._loading = self._loading, None

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] → [T, out]."""
        return self._weight(layer)(x, layer.bias)

    def apply_gated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2], without the product in memory where the device has a kernel for that."""
        return self._weight(layer).gated(x, layer.bias, activation)

    def _weight(self, layer: LinearLayer) -> PackedLinear:
        if self._packed is None:
            raise RuntimeError(f"{layer.prefix} is used before its weights are loaded")
        return self._packed


class UnquantizedScheme:
    """Every layer is `Unquantized`."""

    def method_for(self, layer_name: str) -> QuantMethod:  # noqa: ARG002 - all layers are alike
        """A new `Unquantized`, whatever the layer."""
        return Unquantized()
