"""Checkpoints of compressed-tensors, as llm-compressor writes them.

Of each matrix [N, K] there are:

- ``pack-quantized`` (4 or 8 bits, inputs in 16): ``weight_packed`` int32 [N, K · bits / 32], ``weight_scale`` [N, G],
  perhaps ``weight_zero_point`` int32 [N · bits / 32, G] and ``weight_g_idx`` int32 [K]. Codes and zero points are
  little-endian streams of bits, and stored without a sign;
- ``int-quantized`` (8 bits): ``weight`` int8, ``weight_scale`` [N, 1] or [1]; ``input_scale`` and
  ``input_zero_point``, if inputs were measured;
- ``float-quantized``: ``weight`` of 8-bit floats, ``weight_scale`` [1], [N, 1] or one per block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, LinearOutput, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.fp8 import Fp8Format
from ascend_vllm.layers.quantization.int8 import Int8Format, Int8Linear, Int8Matrix, StaticScale, byte_parts
from ascend_vllm.layers.quantization.tensor_parts import (
    TensorPart,
    is_quantized,
    number_part,
    packed_range,
    packed_size,
    rows_part,
    same,
    stated_name,
    to_rows,
    unpack_words,
)
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.quantization.weight_only import CodedMatrix, MatrixFormat, WeightOnlyLinear, plain_groups

_REGEX = "re:"
# formats whose tensors are not packed
_UNPACKED = ("int-quantized", "float-quantized", "naive-quantized")


class CompressedTensorsScheme(QuantScheme):
    """Quantizes each layer as the group of config.json says whose targets it is among."""

    # what is the same in every checkpoint, or describes what is not served: scales of the KV cache
    ignored_weights = (
        r".*\.(weight_shape|weight_zero_point|input_scale|input_zero_point|output_scale|[qkv]_scale|[qkv]_zero_point)",
    )

    def __init__(self, config: QuantizationConfig) -> None:
        parameters = config.parameters
        groups = parameters.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise ModelLoadError("Cannot find the config file for compressed-tensors: it has no config_groups")
        self._groups = [_Group(group, parameters.get("format")) for group in groups.values()]
        self._ignored = [_pattern(entry) for entry in parameters.get("ignore") or ()]

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        if layer.kind not in (LayerKind.LINEAR, LayerKind.ROUTER, LayerKind.LM_HEAD):
            return UnquantizedScheme().method_for(layer)
        groups = [self._group_of(stated_name(layer, output)) for output in layer.outputs]
        quantized = is_quantized(layer, ".weight_scale")
        if quantized is None:
            quantized = groups[0] is not None and layer.kind is not LayerKind.ROUTER
        if not quantized:
            return UnquantizedScheme().method_for(layer)
        # a family of models may have other names than its checkpoints
        found = [group or self._groups[0] for group in groups]
        if not same([(group.stored, group.weights, group.inputs) for group in found]):
            raise ModelLoadError(f"config_groups has different rules for the matrices of {layer.prefix}")
        return _method(found[0])

    def _group_of(self, name: str) -> _Group | None:
        """The group that a matrix belongs to; None: it is not quantized."""
        if any(pattern.match(name) for pattern in self._ignored):
            return None
        named = [group for group in self._groups if any(target.match(name) for target in group.targets)]
        of_class = [group for group in self._groups if group.has_all]
        return next(iter(named or of_class), None)


def _pattern(entry: str) -> re.Pattern[str]:
    """An entry of `ignore` or `targets`: a name, or an expression for its beginning."""
    is_regex = entry.startswith(_REGEX)
    return re.compile(entry.removeprefix(_REGEX) if is_regex else rf"{re.escape(entry)}\Z")


class _Group:
    """One of `config_groups`.

    Args:
        group: of config.json.
        stored: how all groups are stored that do not say it themselves.

    Attributes:
        targets: the names of its matrices.
        has_all: it has all matrices that no other group names.
        stored: name of the format.
        weights: what is said of weights, with whole numbers for `group_size` and `block_structure`.
        inputs: what is said of inputs; None: they are not rounded.
    """

    def __init__(self, group: Mapping[str, Any], stored: str | None) -> None:
        targets: list[str] = list(group["targets"])
        self.targets = [_pattern(target) for target in targets]
        self.has_all = "Linear" in targets
        self.stored = group.get("format") or stored
        self.weights: dict[str, Any] = dict(group.get("weights") or {})
        size, block = self.weights.get("group_size"), self.weights.get("block_structure")
        self.weights["group_size"] = -1 if size is None else int(size)
        if block is not None:
            rows, columns = block.split("x") if isinstance(block, str) else block
            self.weights["block_structure"] = int(rows), int(columns)
        inputs = group.get("input_activations")
        self.inputs: dict[str, Any] | None = None if inputs is None else dict(inputs)


def _method(group: _Group) -> QuantMethod:
    """The method for a group.

    Raises:
        ModelLoadError: there is none.
    """
    weights, inputs, stored = group.weights, group.inputs, group.stored
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    if kind == "int" and bits in (4, 8) and stored == "pack-quantized" and inputs is None:
        return WeightOnlyLinear(_PackedFormat(weights))
    if kind == "int" and bits == 8 and stored in _UNPACKED and weights.get("strategy") in ("tensor", "channel"):
        if inputs is None:
            return WeightOnlyLinear(_ByteFormat(weights))
        if _are_bytes(inputs, "int") and weights.get("symmetric", True):
            return Int8Linear(_ByteInputsFormat(inputs))
    if kind == "float" and bits == 8 and stored in _UNPACKED and (inputs is None or _are_bytes(inputs, "float")):
        return WeightOnlyLinear(Fp8Format("weight_scale", _fp8_block(weights)))
    raise ModelLoadError(
        f"compressed-tensors: {stored} with {bits}-bit {kind} weights and {_described(inputs)} inputs is not "
        "supported; see docs/quantization.md"
    )


def _are_bytes(inputs: Mapping[str, Any], kind: str) -> bool:
    """Whether inputs have 8 bits, with a scale for each token or one for all."""
    is_dynamic = bool(inputs.get("dynamic"))
    # floats are not rounded here, whatever their groups
    has_strategy = kind == "float" or inputs.get("strategy") == ("token" if is_dynamic else "tensor")
    return inputs.get("num_bits") == 8 and inputs.get("type", "int") == kind and has_strategy


def _fp8_block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Outputs and inputs that share a scale; None: all of a matrix or of an output."""
    if weights.get("strategy") == "block":
        return weights.get("block_structure") or (128, 128)
    return (1, weights["group_size"]) if weights.get("strategy") == "group" else None


def _described(inputs: Mapping[str, Any] | None) -> str:
    return "unquantized" if inputs is None else f"{inputs.get('num_bits')}-bit {inputs.get('type', 'int')}"


def _group_size(weights: Mapping[str, Any], in_features: int) -> int:
    """Inputs with the same scale."""
    size: int = weights["group_size"]
    return size if weights.get("strategy", "group") == "group" and size > 0 else in_features


class _PackedFormat(MatrixFormat):
    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._weights = weights
        self._bits: int = weights["num_bits"]
        self._has_zeros = not weights.get("symmetric", True)
        # "weight" and "static" change the rounding only
        self._has_order = weights.get("actorder") in ("group", True)
        self.code = f"uint{self._bits}"

    def group_size(self, in_features: int) -> int:
        return 1 if self._has_order else _group_size(self._weights, in_features)

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        name, total, count, bits = output.name, output.total, layer.total_in_features, self._bits
        inputs, _ = packed_range(layer.in_shard, bits, count)
        groups = -(-count // _group_size(self._weights, count))
        parts = {
            "codes": TensorPart(
                f"{name}.weight_packed", (total, packed_size(count, bits)), torch.int32, (output.shard, inputs)
            ),
            "scales": rows_part(layer, output, "weight_scale", (total, groups)),
        }
        if self._has_zeros:
            words, _ = packed_range(output.shard, bits, total)
            shape = (packed_size(total, bits), groups)
            parts["zeros"] = TensorPart(f"{name}.weight_zero_point", shape, torch.int32, (words,))
        if self._has_order:
            parts["groups"] = TensorPart(f"{name}.weight_g_idx", (count,), torch.int32, (layer.in_shard,))
        return parts

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        bits, inputs = self._bits, layer.in_shard
        _, skipped = packed_range(inputs, bits, layer.total_in_features)
        codes = unpack_words(tensors["codes"], bits)[:, skipped : skipped + inputs.size]
        zeros = None
        if self._has_zeros:
            _, skipped = packed_range(output.shard, bits, output.total)
            zeros = unpack_words(tensors["zeros"].T, bits).T[skipped : skipped + output.shard.size]
        groups = plain_groups(inputs, _group_size(self._weights, layer.total_in_features))
        if self._has_order:
            groups = tensors["groups"].long()
        return CodedMatrix(codes, to_rows(tensors["scales"], output), zeros, groups)


class _ByteFormat(MatrixFormat):
    """8-bit integers with a scale per output."""

    code = "uint8"

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self._has_zeros = not weights.get("symmetric", True)

    def group_size(self, in_features: int) -> int:
        return in_features

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        parts = byte_parts(layer, output)
        if self._has_zeros:
            parts["zeros"] = rows_part(layer, output, "weight_zero_point", (output.total, 1), torch.int8)
        return parts

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        zeros = to_rows(tensors["zeros"], output).view(torch.uint8) ^ 128 if self._has_zeros else None
        codes = tensors["weight"].view(torch.uint8) ^ 128
        groups = torch.zeros(layer.in_features, dtype=torch.int64)
        return CodedMatrix(codes, to_rows(tensors["scales"], output), zeros, groups)


class _ByteInputsFormat(Int8Format):
    """The same, and inputs in 8 bits."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.has_offsets = not inputs.get("symmetric", True)
        self._is_static = not inputs.get("dynamic")

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        parts = byte_parts(layer, output)
        if self._is_static:
            parts["input_scale"] = number_part(layer, output, "input_scale", torch.float32)
            if self.has_offsets:
                parts["input_offset"] = number_part(layer, output, "input_zero_point", torch.int8)
        return parts

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> Int8Matrix:  # noqa: ARG002
        inputs = None
        if self._is_static:
            offset = int(tensors["input_offset"].item()) if self.has_offsets else 0
            inputs = StaticScale(tensors["input_scale"].item(), offset)
        return Int8Matrix(tensors["weight"], to_rows(tensors["scales"], output)[:, 0].float(), inputs)
