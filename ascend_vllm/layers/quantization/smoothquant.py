"""AutoSmoothQuant's checkpoints: weights and inputs in 8 bits (Xiao et al., 2023).

Of each matrix there are ``weight`` int8 and ``dequant_scale``, which is the scale of the weight where inputs are
rounded per token. Otherwise it contains the scale of the inputs: that of ``out`` and ``fc2`` is ``quant_scale``, and
those of ``qkv`` and ``fc1`` are divided by theirs in the norm before. quant_config.json says which are rounded how.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, LinearOutput, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.int8 import Int8Format, Int8Linear, Int8Matrix, StaticScale, byte_parts
from ascend_vllm.layers.quantization.tensor_parts import TensorPart, is_quantized, number_part, to_rows
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme

# key of quant_config.json → last parts of the names of its layers
_LAYERS = {
    "qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "out": ("o_proj", "out_proj"),
    "fc1": ("gate_proj", "up_proj", "gate_up_proj", "fc1"),
    "fc2": ("down_proj", "fc2"),
}
_KINDS = ["per-tensor", "per-token"]


class SmoothQuantScheme(QuantScheme):
    """Quantizes the projections of attention and MLPs."""

    def __init__(self, config: QuantizationConfig) -> None:
        kinds = {key: config.parameters.get(key) for key in _LAYERS}
        if not any(kinds.values()):
            raise ModelLoadError(f"Cannot find the config file for {config.method}: quant_config.json")
        if config.parameters.get("type", "int8") != "int8" or not all(kind in _KINDS for kind in kinds.values()):
            stated = {key: value for key, value in config.parameters.items() if key in (*_LAYERS, "type")}
            raise ModelLoadError(
                f"quant_config.json: {stated} is not supported; supported are int8, {', '.join(_KINDS)}"
            )
        self._kinds = {name: (key, kinds[key]) for key, names in _LAYERS.items() for name in names}

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        name = layer.outputs[0].name.rpartition(".")[2]
        quantized = layer.kind is LayerKind.LINEAR and name in self._kinds
        if quantized and layer.checkpoint_shapes:
            quantized = bool(is_quantized(layer, ".dequant_scale") or is_quantized(layer, ".q_dequant_scale"))
        if not quantized:
            return UnquantizedScheme().method_for(layer)
        key, kind = self._kinds[name]
        is_static = kind == "per-tensor"
        return Int8Linear(_SmoothQuantFormat(is_static, has_scale=is_static and key in ("out", "fc2")))


class _SmoothQuantFormat(Int8Format):
    """How one kind of layer is stored.

    Args:
        is_static: inputs have one scale.
        has_scale: which is in the checkpoint.
    """

    def __init__(self, is_static: bool, *, has_scale: bool) -> None:
        self._is_static = is_static
        self._has_scale = has_scale

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        scale = "dequant_scale"
        # query, key and value of a fused matrix have a scale each
        if f"{output.name}.q_{scale}" in layer.checkpoint_shapes:
            scale = f"{'qkv'[layer.outputs.index(output)]}_{scale}"
        parts = byte_parts(layer, output, scale)
        if self._has_scale:
            parts["input_scale"] = number_part(layer, output, "quant_scale", torch.float32)
        return parts

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> Int8Matrix:  # noqa: ARG002
        scales = to_rows(tensors["scales"], output)[:, 0].float()
        if not self._is_static:
            return Int8Matrix(tensors["weight"], scales)
        scale = tensors["input_scale"].item() if self._has_scale else 1.0
        return Int8Matrix(tensors["weight"], scales / scale, StaticScale(scale))
