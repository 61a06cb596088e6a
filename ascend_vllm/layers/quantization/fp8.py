"""Weights in 8-bit floats (E4M3), with a scale per matrix, per output or per block; inputs are not rounded.

Of each matrix [N, K] there are ``weight`` and ``weight_scale`` of one value or [N, 1], or ``weight_scale_inv``
[N / 128, K / 128], by which weights are multiplied despite its name (DeepSeek-V3).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, LinearOutput, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.online import OnlineFormat
from ascend_vllm.layers.quantization.parameters import first_of
from ascend_vllm.layers.quantization.tensor_parts import TensorPart, is_quantized, rows_part, to_rows
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.quantization.weight_only import CodedMatrix, MatrixFormat, WeightOnlyLinear, plain_groups


class Fp8Scheme(QuantScheme):
    """Quantizes all linear layers, except those that the checkpoint has unquantized.

    Those of an unquantized checkpoint are rounded while they are loaded.
    """

    # scales of inputs, which are not rounded, and of the KV cache
    ignored_weights = (r".*\.(input_scale|activation_scale|output_scale|[qkv]_scale|kv_scale)",)

    def __init__(self, config: QuantizationConfig) -> None:
        parameters = config.parameters
        self._is_online = not parameters
        if parameters.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise ModelLoadError(f"fp8 weights in {parameters['fmt']!r} are not supported; supported is e4m3")
        block = parameters.get("weight_block_size")
        rows, columns = (0, 0) if block is None else block
        self._block = None if block is None else (int(rows), int(columns))
        self._excluded: list[str] = list(first_of(parameters, "ignored_layers", "modules_to_not_convert", default=()))

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        if self._is_online and layer.kind is LayerKind.LINEAR:
            return WeightOnlyLinear(OnlineFormat(Fp8Format.code))
        suffix = "weight_scale" if self._block is None else "weight_scale_inv"
        quantized = is_quantized(layer, f".{suffix}")
        if quantized is None:
            quantized = layer.kind is LayerKind.LINEAR and layer.prefix not in self._excluded
        if not quantized:
            return UnquantizedScheme().method_for(layer)
        return WeightOnlyLinear(Fp8Format(suffix, self._block))


class Fp8Format(MatrixFormat):
    """8-bit floats.

    Args:
        suffix: of the names of scales.
        block: outputs and inputs that share a scale; None: all of an output, or of a matrix.
    """

    code = "float8_e4m3"

    def __init__(self, suffix: str, block: tuple[int, int] | None) -> None:
        self._suffix = suffix
        self._block = block

    def group_size(self, in_features: int) -> int:
        return in_features if self._block is None else self._block[1]

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        name, total, count = output.name, output.total, layer.total_in_features
        ranges = (output.shard, layer.in_shard)
        parts = {"weight": TensorPart(f"{name}.weight", (total, count), torch.float8_e4m3fn, ranges)}
        if self._block is None:
            return parts | {"scales": rows_part(layer, output, self._suffix, (total, 1))}
        shape = (-(-total // self._block[0]), -(-count // self._block[1]))
        return parts | {"scales": TensorPart(f"{name}.{self._suffix}", shape, torch.float32)}

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        if self._block is None:
            groups = torch.zeros(layer.in_features, dtype=torch.int64)
            return CodedMatrix(tensors["weight"], to_rows(tensors["scales"], output), None, groups)
        rows = plain_groups(output.shard, self._block[0])
        groups = plain_groups(layer.in_shard, self._block[1])
        return CodedMatrix(tensors["weight"], tensors["scales"][rows], None, groups)
