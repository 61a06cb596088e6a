"""Weights in the model's own dtype."""

from __future__ import annotations

import torch

from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, QuantMethod, QuantScheme
from ascend_vllm.ops.embedding import gather_rows
from ascend_vllm.ops.gemm import PackedLinear, PackedRows, has_kernel
from ascend_vllm.platforms.host_memory import weight_memory


def _slot(layer: LinearLayer, index: int, target: torch.Tensor | PackedRows) -> WeightSlot:
    """The slot of one of the layer's matrices."""
    output = layer.outputs[index]
    shape = (output.total, layer.total_in_features)
    return WeightSlot(f"{output.name}.weight", shape, target, (output.shard.start, layer.in_shard.start))


class Unquantized(QuantMethod):
    """Loads [out, in] matrices into one weight, packed for the device's GEMM."""

    def __init__(self) -> None:
        self._loading: PackedLinear | None = None
        self._packed: PackedLinear | None = None

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """One weight for all outputs of the layer; a slot per output."""
        self._loading = PackedLinear(layer.out_features, layer.in_features, layer.dtype, layer.device)
        slots = []
        row = 0
        for index, output in enumerate(layer.outputs):
            slots.append(_slot(layer, index, self._loading.target(row, output.shard.size)))
            row += output.shard.size
        return slots

    def after_load(self, layer: LinearLayer) -> None:  # noqa: ARG002 - the weight is kept here
        """Packs the weight."""
        if self._loading is not None:
            self._loading.finish()
            self._packed, self._loading = self._loading, None

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return self._weight(layer)(x, layer.bias)

    def apply_gated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2], without storing the product if the device has a kernel for that."""
        return self._weight(layer).gated(x, layer.bias, activation)

    def look_up(self, layer: LinearLayer, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] → [T, in]; only for weights in panels."""
        return self._weight(layer).rows(indices)

    def _weight(self, layer: LinearLayer) -> PackedLinear:
        if self._packed is None:
            raise RuntimeError(f"{layer.prefix} is used before its weights are loaded")
        return self._packed


class UnquantizedTable(QuantMethod):
    """Loads an embedding in the layout of the checkpoint; a tied one has a packed copy for products."""

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        # [out, in] in the model's dtype
        self._table = weight_memory((layer.out_features, layer.in_features), layer.dtype, layer.device)
        self._look_up = gather_rows if has_kernel(layer.dtype, layer.device) else torch.embedding
        self._packed: PackedLinear | None = None
        return [_slot(layer, 0, self._table)]

    def after_load(self, layer: LinearLayer) -> None:
        """Packs a tied table for products."""
        if layer.kind is LayerKind.TIED_EMBEDDING:
            self._packed = PackedLinear.of(self._table)

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            raise RuntimeError("the tied LM head is used before the embedding is loaded")
        return self._packed(x, layer.bias)

    def look_up(self, layer: LinearLayer, indices: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - the table is kept here
        return self._look_up(self._table, indices)


class UnquantizedScheme(QuantScheme):
    """Every layer is unquantized."""

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        """Makes a method that stores weights for products or look-ups."""
        if layer.kind is LayerKind.EMBEDDING:
            return UnquantizedTable()
        # look-ups can read panels, too, so that a tied table is stored once
        if layer.kind is LayerKind.TIED_EMBEDDING and not has_kernel(layer.dtype, layer.device):
            return UnquantizedTable()
        return Unquantized()
