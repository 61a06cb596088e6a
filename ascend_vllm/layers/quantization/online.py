"""8-bit weights that are made of an unquantized checkpoint while it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, LinearOutput, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.tensor_parts import TensorPart
from ascend_vllm.layers.quantization.unquantized import Unquantized, UnquantizedScheme, UnquantizedTable
from ascend_vllm.layers.quantization.weight_only import (
    CodedMatrix,
    MatrixFormat,
    WeightOnlyLinear,
    pack_matrices,
    product_kinds,
)

# largest number in E4M3
_MOST_FP8 = 448.0
_ROWS_AT_ONCE = 4096


class OnlineFormat(MatrixFormat):
    """Matrices of an unquantized checkpoint, rounded with a scale per output.

    Args:
        code: "uint8" or "float8_e4m3".
    """

    is_online = True

    def __init__(self, code: str) -> None:
        self.code = code

    def group_size(self, in_features: int) -> int:
        return in_features

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        shape = (output.total, layer.total_in_features)
        # the whole row, so that its scale does not depend on the number of ranks
        return {"weight": TensorPart(f"{output.name}.weight", shape, torch.float32, (output.shard,))}

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:  # noqa: ARG002
        return round_rows(tensors["weight"], self.code, layer.in_shard)


def round_rows(weight: torch.Tensor, code: str, inputs: Shard) -> CodedMatrix:
    """Rounds a weight [N, K] of floats with a scale per output, and keeps some of its inputs."""
    most = _MOST_FP8 if code == "float8_e4m3" else 127.0
    # rows of zeros stay zero
    scales = weight.abs().amax(1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / most
    codes = torch.empty(len(weight), inputs.size, dtype=torch.float8_e4m3fn if code == "float8_e4m3" else torch.uint8)
    # in parts, since float32 takes four times the memory
    for start in range(0, len(weight), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        values = weight[rows, inputs.start : inputs.start + inputs.size] / scales[rows]
        codes[rows] = values.to(codes.dtype) if code == "float8_e4m3" else values.round_().add_(128).to(codes.dtype)
    return CodedMatrix(codes, scales, None, torch.zeros(inputs.size, dtype=torch.int64))


class OnlineScheme(QuantScheme):
    """Quantizes all linear layers to 8-bit integers."""

    def __init__(self, config: QuantizationConfig) -> None:
        if config.parameters:
            raise ModelLoadError(
                f"--quantization {config.method} makes 8-bit weights of an unquantized checkpoint, but this one is "
                "quantized"
            )

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        if layer.kind is not LayerKind.LINEAR:
            return UnquantizedScheme().method_for(layer)
        return WeightOnlyLinear(OnlineFormat("uint8"))


class QuantizedHeadScheme(QuantScheme):
    """Quantizes the LM head, if the format of the checkpoint does not, and everything else as the format does.

    Args:
        scheme: of the format.
    """

    def __init__(self, scheme: QuantScheme) -> None:
        self._scheme = scheme
        self.ignored_weights = scheme.ignored_weights

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        method = self._scheme.method_for(layer)
        if not isinstance(method, Unquantized | UnquantizedTable):
            return method
        if layer.kind is LayerKind.LM_HEAD:
            return WeightOnlyLinear(OnlineFormat("uint8"))
        return _TiedTable() if layer.kind is LayerKind.TIED_EMBEDDING else method


class RoundedInputsScheme(QuantScheme):
    """Lets products with weights in codes of 4 and 8 bits round their inputs to 8 bits.

    Args:
        scheme: chooses the methods.
    """

    def __init__(self, scheme: QuantScheme) -> None:
        self._scheme = scheme
        self.ignored_weights = scheme.ignored_weights

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        method = self._scheme.method_for(layer)
        method.rounds_inputs = True
        return method


class _TiedTable(UnquantizedTable):
    """An embedding as it is in the checkpoint, and 8-bit weights of it for products."""

    def after_load(self, layer: LinearLayer) -> None:
        """Makes the weights."""
        matrix = round_rows(self._table.cpu(), "uint8", layer.in_shard)
        self._rounded = pack_matrices([matrix], "uint8", layer, self.rounds_inputs)
        self.product_kinds = product_kinds([self._rounded])

    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        return self._rounded(x, layer.bias)
