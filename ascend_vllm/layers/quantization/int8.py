"""Products of weights and inputs that are both in 8 bits, with sums that are exact in 32.

Letters: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.layers.quantization.base import Activation, ActivationQuant, LinearLayer, LinearOutput, QuantMethod
from ascend_vllm.layers.quantization.tensor_parts import (
    KeptPart,
    TensorPart,
    rows_part,
    stray_bias_slots,
    unread_bias_slots,
)
from ascend_vllm.layers.quantization.weight_only import check_device
from ascend_vllm.ops.quantized_gemm import Int8Panels, quantize_static, quantize_tokens

# most inputs whose products can be added in 32 bits
_MOST_INPUTS = 1 << 16


@dataclasses.dataclass(frozen=True)
class StaticScale:
    """How inputs are rounded that were measured before: x is about (q - offset) · scale.

    Attributes:
        scale: of all inputs.
        offset: of all inputs, -128 … 127.
    """

    scale: float
    offset: int = 0


@dataclasses.dataclass(frozen=True)
class Int8Matrix:
    """A rank's part of a matrix: w[n, k] = values[n, k] · scales[n].

    Attributes:
        values: [N, K] int8.
        scales: [N] float32.
        inputs: how its inputs are rounded; None: each token by its own largest value.
        bias: [N] float32, what the checkpoint has in the place of a bias; None: it has none.
        subtracts_offset: whether `inputs.offset` has to be subtracted; otherwise it is in the bias.
    """

    values: torch.Tensor
    scales: torch.Tensor
    inputs: StaticScale | None = None
    bias: torch.Tensor | None = None
    subtracts_offset: bool = True


class Int8Format(abc.ABC):
    """How a checkpoint stores a matrix of a layer and the scales of its inputs.

    Attributes:
        has_offsets: tokens have an offset besides their scale, if they have their own.
        replaces_bias: the matrices bring their biases in a form of their own.
    """

    has_offsets: bool = False
    replaces_bias: bool = False

    @abc.abstractmethod
    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        """The tensors of one matrix, under keys of the format's own."""

    @abc.abstractmethod
    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> Int8Matrix:
        """What they say."""


def byte_parts(layer: LinearLayer, output: LinearOutput, scale: str = "weight_scale") -> dict[str, TensorPart]:
    """An 8-bit ``weight``, and ``scales`` per output or for all of them.

    Args:
        layer: the layer.
        output: the matrix.
        scale: suffix of the name of its scales.
    """
    shape = (output.total, layer.total_in_features)
    return {
        "weight": TensorPart(f"{output.name}.weight", shape, torch.int8, (output.shard, layer.in_shard)),
        "scales": rows_part(layer, output, scale, (output.total, 1)),
    }


class _Rounding(ActivationQuant):
    """Rounds inputs to 8 bits.

    Attributes:
        static: how, if the checkpoint says it; set when it is loaded.
    """

    def __init__(self, has_offsets: bool) -> None:
        self._has_offsets = has_offsets
        self.static: StaticScale | None = None

    def quantize(self, x: torch.Tensor) -> Activation:
        """x [T, K] → q [T, K] int8, scales [T] float32, offsets [T] int32."""
        if self.static is not None:
            return quantize_static(x, self.static.scale, self.static.offset)
        return quantize_tokens(x, self._has_offsets)


class Int8Linear(QuantMethod):
    """8-bit weights with a scale per output, and inputs in 8 bits with a scale per token or for all.

    Args:
        matrix_format: of the matrices that the layer consists of.
    """

    def __init__(self, matrix_format: Int8Format) -> None:
        self._format = matrix_format
        self._rounding = _Rounding(matrix_format.has_offsets)
        # whether products subtract the offsets of inputs
        self.uses_offsets = matrix_format.has_offsets
        self._loading: list[dict[str, KeptPart]] = []
        self._panels: Int8Panels | None = None

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """Slots of each output's tensors.

        Raises:
            ModelLoadError: the device is not supported, or there are too many inputs.
        """
        check_device(layer)
        if layer.in_features > _MOST_INPUTS:
            raise ModelLoadError(
                f"{layer.prefix}: 8-bit inputs may be {_MOST_INPUTS} at most, not {layer.in_features}"
            )
        self.activation_quant = self._rounding
        if self._format.replaces_bias:
            layer.has_bias = False
        for output in layer.outputs:
            self._loading.append({key: KeptPart(part) for key, part in self._format.parts(layer, output).items()})
        slots = [part.slot for parts in self._loading for part in parts.values()]
        return slots + (unread_bias_slots(layer) if self._format.replaces_bias else stray_bias_slots(layer))

    def after_load(self, layer: LinearLayer) -> None:
        """Packs the matrices."""
        if not self._loading:
            return
        matrices = [
            self._format.matrix(layer, output, {key: part.take() for key, part in parts.items()})
            for output, parts in zip(layer.outputs, self._loading, strict=True)
        ]
        self._loading = []
        panels = Int8Panels(layer.out_features, layer.in_features)
        row = 0
        for matrix in matrices:
            panels.pack_int8_rows(row, matrix.values, matrix.scales)
            row += len(matrix.values)
        self._panels = panels
        statics = [matrix.inputs for matrix in matrices if matrix.inputs is not None]
        if statics:
            subtracts = matrices[0].subtracts_offset
            self._rounding.static = joined_scale(layer.prefix, statics, subtracts_offset=subtracts)
            self.uses_offsets = self._rounding.static.offset != 0 and subtracts
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        if biases:
            layer.bias = torch.cat(biases)
        elif layer.bias is not None:
            layer.bias = layer.bias.float()

    @property
    def panels(self) -> Int8Panels:
        """The loaded weight.

        Raises:
            RuntimeError: it is not loaded.
        """
        if self._panels is None:
            raise RuntimeError("a weight is used before it is loaded")
        return self._panels

    @property
    def static(self) -> StaticScale | None:
        """How inputs are rounded, if the checkpoint says it; known when the weight is loaded."""
        return self._rounding.static

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        q, scales, offsets = self._rounded(x)
        return self.panels.product(q, scales, offsets, layer.bias, layer.dtype)

    def apply_gated(self, layer: LinearLayer, x: Activation, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2] without storing the product."""
        q, scales, offsets = self._rounded(x)
        return self.panels.gated_product(q, scales, offsets, layer.bias, layer.dtype, activation)

    def _rounded(self, x: Activation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q, scales, offsets = x if isinstance(x, tuple) else self._rounding.quantize(x)
        return q, scales, offsets if self.uses_offsets else None


def joined_scale(prefix: str, statics: Sequence[StaticScale], *, subtracts_offset: bool) -> StaticScale:
    """One scale for inputs that several matrices read: of the range that all of theirs span.

    Raises:
        ModelLoadError: they differ, and biases have been made for them.
    """
    if all(static == statics[0] for static in statics):
        return statics[0]
    if not subtracts_offset:
        raise ModelLoadError(f"the matrices of {prefix} have different scales for the same inputs")
    if all(static.offset == 0 for static in statics):
        return StaticScale(max(static.scale for static in statics))
    low = min((-128 - static.offset) * static.scale for static in statics)
    high = max((127 - static.offset) * static.scale for static in statics)
    scale = (high - low) / 255
    return StaticScale(scale, round(-128 - low / scale))
