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
from ascend_vllm.ops.quantized_gemm import Int8Panels
from ascend_vllm.ops.quantized_weights import INT8_FORMS, InputRounding, Int8Weight, PanelInt8Weight


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
        bias: [N] int32, what the checkpoint adds to sums of products in the place of a bias; None: it has none.
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
        weight: of the products; set when it is loaded.
    """

    weight: Int8Weight | None = None

    def quantize(self, x: torch.Tensor) -> Activation:
        """x [T, K] → a tuple, see `Int8Weight.quantize`."""
        if self.weight is None:
            raise RuntimeError("a weight is used before it is loaded")
        return self.weight.quantize(x)


class Int8Linear(QuantMethod):
    """8-bit weights with a scale per output, and inputs in 8 bits with a scale per token or for all.

    Args:
        matrix_format: of the matrices that the layer consists of.
    """

    def __init__(self, matrix_format: Int8Format) -> None:
        self._format = matrix_format
        self._quant = _Rounding()
        self._rounding = InputRounding(has_offsets=matrix_format.has_offsets)
        self._loading: list[dict[str, KeptPart]] = []

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """Slots of each output's tensors.

        Raises:
            ModelLoadError: the device is not supported, or there are too many inputs.
        """
        form = INT8_FORMS.get(layer.device.type)
        if form is None:
            raise ModelLoadError(
                f"quantized weights do not run on {layer.device.type}; serve the unquantized checkpoint"
            )
        if layer.in_features > form.most_inputs:
            raise ModelLoadError(
                f"{layer.prefix}: 8-bit inputs may be {form.most_inputs} at most, not {layer.in_features}"
            )
        self.activation_quant = self._quant
        if self._format.replaces_bias:
            layer.has_bias = False
        for output in layer.outputs:
            self._loading.append({key: KeptPart(part) for key, part in self._format.parts(layer, output).items()})
        slots = [part.slot for parts in self._loading for part in parts.values()]
        return slots + (unread_bias_slots(layer) if self._format.replaces_bias else stray_bias_slots(layer))

    def after_load(self, layer: LinearLayer) -> None:
        """Converts the matrices to the form of the device."""
        if not self._loading:
            return
        matrices = [
            self._format.matrix(layer, output, {key: part.take() for key, part in parts.items()})
            for output, parts in zip(layer.outputs, self._loading, strict=True)
        ]
        self._loading = []
        statics = [matrix.inputs for matrix in matrices if matrix.inputs is not None]
        if statics:
            subtracts = matrices[0].subtracts_offset
            static = joined_scale(layer.prefix, statics, subtracts_offset=subtracts)
            self._rounding = InputRounding(static.scale, static.offset, subtracts_offset=subtracts)
        parts = [(matrix.values, matrix.scales) for matrix in matrices]
        weight = INT8_FORMS[layer.device.type](parts, self._rounding, layer.dtype, layer.device)
        self._quant.weight = weight
        if isinstance(weight, PanelInt8Weight):
            self.product_kinds = frozenset({weight.panels.product_kind})
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        if biases:
            layer.bias = weight.bias_of_sums(torch.cat(biases))
        elif layer.bias is not None:
            layer.bias = layer.bias.to(weight.bias_dtype or layer.dtype)

    @property
    def panels(self) -> Int8Panels:
        """The loaded weight of a layer on the CPU.

        Raises:
            RuntimeError: it is not loaded.
        """
        if not isinstance(self._quant.weight, PanelInt8Weight):
            raise RuntimeError("a weight is used before it is loaded")
        return self._quant.weight.panels

    @property
    def uses_offsets(self) -> bool:
        """Whether products subtract the offsets of inputs; known when the weight is loaded."""
        return self._rounding.uses_offsets

    @property
    def rounding(self) -> InputRounding:
        """How inputs are rounded; known when the weight is loaded."""
        return self._rounding

    @property
    def static(self) -> StaticScale | None:
        """How inputs are rounded, if the checkpoint says it; known when the weight is loaded."""
        rounding = self._rounding
        return None if rounding.scale is None else StaticScale(rounding.scale, rounding.offset)

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        return self._weight.product(self._rounded(x), layer.bias)

    def apply_gated(self, layer: LinearLayer, x: Activation, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2], without storing the product if the device has a kernel for that."""
        return self._weight.gated_product(self._rounded(x), layer.bias, activation)

    @property
    def _weight(self) -> Int8Weight:
        if self._quant.weight is None:
            raise RuntimeError("a weight is used before it is loaded")
        return self._quant.weight

    def _rounded(self, x: Activation) -> tuple[torch.Tensor, ...]:
        return x if isinstance(x, tuple) else self._weight.quantize(x)


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
