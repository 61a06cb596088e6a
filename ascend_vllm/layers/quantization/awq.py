"""AutoAWQ's checkpoints: 4 bits with a scale and a zero point per group of inputs (Lin et al., 2023).

Of each matrix [N, K] there are ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [G, N / 8] and ``scales`` [G, N]. A
word holds eight outputs, not in their order; a zero point is stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, LinearOutput, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.parameters import check_group_size, first_of, required_of
from ascend_vllm.layers.quantization.tensor_parts import (
    TensorPart,
    is_quantized,
    packed_range,
    packed_size,
    unpack_words,
)
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.quantization.weight_only import CodedMatrix, MatrixFormat, WeightOnlyLinear, plain_groups

_BITS = 4
# place in a word of each of its eight outputs
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqScheme(QuantScheme):
    """Quantizes all linear layers, except those that the checkpoint has unquantized."""

    def __init__(self, config: QuantizationConfig) -> None:
        parameters = config.parameters
        bits = required_of(config, "w_bit", "bits")
        if bits != _BITS:
            raise ModelLoadError(
                f"Currently, only 4-bit weight quantization is supported for AWQ, but got {bits} bits."
            )
        self._group_size = check_group_size(required_of(config, "q_group_size", "group_size"))
        self._excluded: tuple[str, ...] = tuple(parameters.get("modules_to_not_convert") or ())
        version = str(parameters.get("version", "gemm")).lower()
        if version != "gemm" or parameters.get("backend") == "llm-awq":
            layout = "llm-awq" if version == "gemm" else version
            raise ModelLoadError(
                f"AWQ weights in the layout {layout!r} are not supported; convert the checkpoint to AutoAWQ's 'gemm'"
            )
        if not first_of(parameters, "zero_point", default=True):
            raise ModelLoadError("AWQ without zero points (zero_point false) is not supported")

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        quantized = is_quantized(layer, ".qweight")
        if quantized is None:
            quantized = layer.kind is LayerKind.LINEAR and not any(name in layer.prefix for name in self._excluded)
        if not quantized:
            return UnquantizedScheme().method_for(layer)
        return WeightOnlyLinear(_AwqFormat(self._group_size))


class _AwqFormat(MatrixFormat):
    code = "uint4"

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def group_size(self, in_features: int) -> int:
        return in_features if self._group_size == -1 else self._group_size

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        words, _ = packed_range(output.shard, _BITS, output.total)
        count = layer.total_in_features
        groups = -(-count // self.group_size(count))
        width, every = packed_size(output.total, _BITS), Shard(0, groups)
        name = output.name
        return {
            "codes": TensorPart(f"{name}.qweight", (count, width), torch.int32, (layer.in_shard, words)),
            "zeros": TensorPart(f"{name}.qzeros", (groups, width), torch.int32, (every, words)),
            "scales": TensorPart(f"{name}.scales", (groups, output.total), torch.float32, (every, output.shard)),
        }

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        _, skipped = packed_range(output.shard, _BITS, output.total)
        rows = slice(skipped, skipped + output.shard.size)
        codes, zeros = (_unpack(tensors[key])[rows] for key in ("codes", "zeros"))
        groups = plain_groups(layer.in_shard, self.group_size(layer.total_in_features))
        return CodedMatrix(codes, tensors["scales"].T, zeros, groups)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """words [R, N / 8] int32 → [N, R] uint8."""
    nibbles = unpack_words(words, _BITS).view(len(words), -1, len(_PLACES))
    return nibbles[:, :, list(_PLACES)].flatten(1).T
