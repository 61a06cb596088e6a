"""AutoGPTQ's and GPTQModel's checkpoints: 2, 3, 4 or 8 bits per weight, a scale and a zero point per group of inputs.

Of each matrix [N, K] there are ``qweight`` int32 [K · bits / 32, N], ``qzeros`` int32 [G, N · bits / 32], ``scales``
[G, N], and ``g_idx`` int32 [K], the group of each input. Both packed axes are little-endian streams of bits. Stored
zero points are one less than their values, unless ``checkpoint_format`` is "gptq_v2" (Frantar et al., 2022).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from ascend_vllm.config.quantization import QuantizationConfig
from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.base import LayerKind, LinearLayer, LinearOutput, QuantMethod, QuantScheme
from ascend_vllm.layers.quantization.parameters import check_group_size, required_of
from ascend_vllm.layers.quantization.tensor_parts import (
    TensorPart,
    is_quantized,
    packed_range,
    packed_size,
    same,
    stated_name,
    unpack_words,
)
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.quantization.weight_only import CodedMatrix, MatrixFormat, WeightOnlyLinear, plain_groups

_BITS = (2, 3, 4, 8)


class GptqScheme(QuantScheme):
    """Quantizes what the checkpoint has quantized, the LM head perhaps too."""

    def __init__(self, config: QuantizationConfig) -> None:
        self._parameters: dict[str, Any] = config.parameters | {
            "bits": required_of(config, "bits"),
            "group_size": required_of(config, "group_size"),
        }
        _check(self._parameters)
        # what fits a name, and what it says; None: the matrix is not quantized
        self._dynamic = [
            (
                re.compile(rule.removeprefix("-:").removeprefix("+:")),
                None if rule.startswith("-:") else dict(values or {}),
            )
            for rule, values in (config.parameters.get("dynamic") or {}).items()
        ]

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        overrides = [self._overrides(stated_name(layer, output)) for output in layer.outputs]
        if not same(overrides):
            raise ModelLoadError(f"GPTQ's `dynamic` has different rules for the matrices of {layer.prefix}")
        quantized = is_quantized(layer, ".qweight")
        if quantized is None:
            is_head = layer.kind is LayerKind.LM_HEAD and bool(self._parameters.get("lm_head"))
            quantized = overrides[0] is not None and (is_head or layer.kind is LayerKind.LINEAR)
        if not quantized:
            return UnquantizedScheme().method_for(layer)
        parameters = self._parameters | (overrides[0] or {})
        _check(parameters)
        return WeightOnlyLinear(_GptqFormat(parameters))

    def _overrides(self, name: str) -> dict[str, Any] | None:
        """What `dynamic` says of a matrix; None: that it is not quantized. The first rule that fits counts."""
        return next((values for pattern, values in self._dynamic if pattern.match(name)), {})


def _check(parameters: Mapping[str, Any]) -> None:
    """Checks the bits and the layout.

    Raises:
        ModelLoadError: they are not supported.
    """
    bits = parameters["bits"]
    check_group_size(parameters["group_size"])
    if bits not in _BITS:
        raise ModelLoadError(
            f"Currently, only 2/3/4/8-bit weight quantization is supported for GPTQ, but got {bits} bits."
        )
    layout = "marlin" if parameters.get("is_marlin_format") else parameters.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or parameters.get("pack_dtype", "int32") != "int32":
        raise ModelLoadError(
            f"GPTQ weights in the layout {layout!r} ({parameters.get('pack_dtype', 'int32')}) are not supported; "
            "convert the checkpoint to 'gptq' or 'gptq_v2' with int32"
        )


class _GptqFormat(MatrixFormat):
    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._bits: int = parameters["bits"]
        # codes of fewer bits are moved to the middle of 4
        self.code = "uint8" if self._bits == 8 else "uint4"
        self._is_v2 = parameters.get("checkpoint_format") == "gptq_v2"
        self._stated_size = int(parameters["group_size"])
        # without groups the order has no effect
        self._has_order = bool(parameters.get("desc_act")) and self._stated_size != -1
        self._is_free = self._has_order and not parameters.get("static_groups")

    def group_size(self, in_features: int) -> int:
        return 1 if self._is_free else self._size(in_features)

    def _size(self, in_features: int) -> int:
        """Inputs of a group."""
        return in_features if self._stated_size == -1 else self._stated_size

    def parts(self, layer: LinearLayer, output: LinearOutput) -> Mapping[str, TensorPart]:
        name, total, bits = output.name, output.total, self._bits
        inputs, _ = packed_range(layer.in_shard, bits, layer.total_in_features)
        words, _ = packed_range(output.shard, bits, total)
        groups = -(-layer.total_in_features // self._size(layer.total_in_features))
        every, count = Shard(0, groups), layer.total_in_features
        parts = {
            "codes": TensorPart(
                f"{name}.qweight", (packed_size(count, bits), total), torch.int32, (inputs, output.shard)
            ),
            "zeros": TensorPart(f"{name}.qzeros", (groups, packed_size(total, bits)), torch.int32, (every, words)),
            "scales": TensorPart(f"{name}.scales", (groups, total), torch.float32, (every, output.shard)),
        }
        if self._has_order or f"{name}.g_idx" in layer.checkpoint_shapes:
            parts["groups"] = TensorPart(f"{name}.g_idx", (count,), torch.int32, (layer.in_shard,))
        return parts

    def matrix(self, layer: LinearLayer, output: LinearOutput, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        bits, inputs = self._bits, layer.in_shard
        _, skipped = packed_range(inputs, bits, layer.total_in_features)
        codes = unpack_words(tensors["codes"].T, bits)[:, skipped : skipped + inputs.size]
        _, skipped = packed_range(output.shard, bits, output.total)
        # [N, G]
        zeros = unpack_words(tensors["zeros"], bits)[:, skipped : skipped + output.shard.size].T
        if not self._is_v2:
            zeros = zeros + 1 & 2**bits - 1
        groups = plain_groups(inputs, self._size(layer.total_in_features))
        if self._has_order:
            groups = tensors["groups"].long()
            if bool((groups < 0).any()) or bool((groups >= zeros.shape[1]).any()):
                raise ModelLoadError(f"tensor {output.name}.g_idx names groups that are not there")
        middle = 2 ** (bits - 1)
        if bool((zeros == middle).all()):
            return CodedMatrix(codes + (8 - middle if bits < 8 else 0), tensors["scales"].T, None, groups)
        return CodedMatrix(codes, tensors["scales"].T, zeros, groups)
