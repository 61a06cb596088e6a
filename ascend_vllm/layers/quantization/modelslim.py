"""ModelSlim's checkpoints for Ascend: weights in 8 bits, with inputs in 8 or 16.

``quant_model_description*.json`` says of each tensor what it is. Of a matrix [N, K] there are ``weight`` int8 and:

- W8A8_DYNAMIC and W8A16: ``weight_scale`` and ``weight_offset`` [N, 1];
- W8A8: ``input_scale`` and ``input_offset`` of one value; ``deq_scale`` [N], the product of the scales of inputs and
  weight, float32, or its bits in an int64; ``quant_bias`` [N] int32, in units of it, which contains the bias and what
  the offset adds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, LinearOutput, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.int8 import Int8Format, Int8Linear, Int8Matrix, StaticScale, byte_parts
from ascend_vllm.layers.quantization.tensor_parts import TensorPart, number_part, rows_part, stated_name, to_rows
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.quantization.weight_only import CodedMatrix, MatrixFormat, WeightOnlyLinear

_FLOAT = "FLOAT"


class ModelSlimScheme(QuantScheme):
    """Quantizes what the description says."""

    # scales of the KV cache; the tool writes scales of weights beside deq_scale, which contains them
    ignored_weights = (r".*\.fa_[qkv]\.(scale|offset)", r".*\.weight_(scale|offset)")

    def __init__(self, config: QuantizationConfig) -> None:
        description = config.parameters.get("description")
        if not isinstance(description, dict):
            raise ModelLoadError(
                "Cannot find the config file for ascend: there is no quant_model_description.json; --quantization "
                "ascend is for checkpoints of ModelSlim"
            )
        self._description: dict[str, str] = description

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        kinds = {self._description.get(f"{stated_name(layer, output)}.weight", _FLOAT) for output in layer.outputs}
        if len(kinds) > 1:
            raise ModelLoadError(
                f"Detected some but not all shards of {layer.prefix} are quantized. All shards of fused layers to "
                "have the same precision."
            )
        kind = kinds.pop()
        if kind == _FLOAT or layer.kind not in (LayerKind.LINEAR, LayerKind.LM_HEAD):
            return UnquantizedScheme().method_for(layer)
        if kind == "W8A8":
            return Int8Linear(_StaticFormat())
        if kind == "W8A8_DYNAMIC":
            return Int8Linear(_DynamicFormat())
        if kind == "W8A16":
            return WeightOnlyLinear(_WeightFormat())
        raise ModelLoadError(f"{layer.prefix} is quantized as {kind}; supported are W8A8, W8A8_DYNAMIC and W8A16")


def _offset_parts(layer: LinearLayer, output: LinearOutput) -> dict[str, TensorPart]:
    return byte_parts(layer, output) | {"offsets": rows_part(layer, output, "weight_offset", (output.total, 1))}


class _DynamicFormat(Int8Format):
    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        return _offset_parts(layer, output)

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> Int8Matrix:  # noqa: ARG002
        if bool(tensors["offsets"].any()):
            raise ModelLoadError(f"tensor {output.name}.weight_offset is not zero, which W8A8_DYNAMIC does not allow")
        return Int8Matrix(tensors["weight"], to_rows(tensors["scales"], output)[:, 0].float())


class _WeightFormat(MatrixFormat):
    code = "uint8"

    def group_size(self, in_features: int) -> int:
        return in_features

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        return _offset_parts(layer, output)

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        offsets = to_rows(tensors["offsets"], output)
        zeros = (128 - offsets).round().to(torch.uint8) if bool(offsets.any()) else None
        codes = tensors["weight"].view(torch.uint8) ^ 128
        groups = torch.zeros(layer.in_features, dtype=torch.int64)
        return CodedMatrix(codes, to_rows(tensors["scales"], output), zeros, groups)


class _StaticFormat(Int8Format):
    replaces_bias = True

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        name, total = output.name, output.total
        dtype = layer.checkpoint_dtypes.get(f"{name}.deq_scale", torch.float32)
        if dtype.is_floating_point:
            dtype = torch.float32
        shape = (total, layer.total_in_features)
        return {
            "weight": TensorPart(f"{name}.weight", shape, torch.int8, (output.shard, layer.in_shard)),
            "scales": TensorPart(f"{name}.deq_scale", (total,), dtype, (output.shard,)),
            "bias": TensorPart(f"{name}.quant_bias", (total,), torch.int32, (output.shard,)),
            "input_scale": number_part(layer, output, "input_scale", torch.float32),
            "input_offset": number_part(layer, output, "input_offset", torch.float32),
        }

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> Int8Matrix:  # noqa: ARG002
        scales = tensors["scales"]
        if scales.dtype == torch.int64:
            scales = scales.to(torch.int32).view(torch.float32)
        inputs = StaticScale(tensors["input_scale"].item(), round(tensors["input_offset"].item()))
        return Int8Matrix(
            tensors["weight"], scales.float() / inputs.scale, inputs, tensors["bias"], subtracts_offset=False
        )
