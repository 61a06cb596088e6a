"""Normalisation layers. Letters: T tokens, H width that is normalised.

A norm before linear layers may have to quantize its result, as the format of their weights needs. It is then built
with their `activation_quant`, and only they can read its result.
"""

from __future__ import annotations

import torch

from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.quantization.base import Activation, ActivationQuant
from ascend_vllm.ops.elementwise import fused_add_rms_norm, layer_norm, rms_norm


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + epsilon) · weight (Zhang and Sennrich, 2019).

    Args:
        prefix: name in the checkpoint, without ".weight".
        width: H.
        epsilon: added to the mean square.
        activation_quant: of the linear layers that read the result; None: they take the model's dtype.
        offset: added to the checkpoint's weight, which is then rounded to the model's dtype.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        width: int,
        epsilon: float,
        activation_quant: ActivationQuant | None = None,
        offset: float = 0.0,
    ) -> None:
        self.prefix = prefix
        self.epsilon = epsilon
        self._offset = offset
        self._quant = activation_quant
        # [H] in the model's dtype
        self.weight = torch.empty(width, dtype=context.dtype, device=context.device)

    def slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", tuple(self.weight.shape), self.weight)]

    def after_load(self) -> None:
        """Adds the offset."""
        if self._offset:
            self.weight += self._offset

    def forward(self, x: torch.Tensor) -> Activation:
        """x [..., H] → [..., H], contiguous."""
        if self._quant is not None:
            return self._quant.rms_norm(x, self.weight, self.epsilon)
        return rms_norm(x, self.weight, self.epsilon)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> Activation:
        """residual += x, in place; returns norm(residual). Both are [T, H], and x is overwritten."""
        if self._quant is not None:
            return self._quant.add_rms_norm(x, residual, self.weight, self.epsilon)
        fused_add_rms_norm(x, residual, self.weight, self.epsilon)
        return x


class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(var(x) + epsilon) · weight + bias (Ba et al., 2016).

    Args:
        prefix: name in the checkpoint, without ".weight".
        width: H.
        epsilon: added to the variance.
        affine: whether there are a weight and a bias.
        activation_quant: of the linear layers that read the result; None: they take the model's dtype.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        width: int,
        epsilon: float = 1e-5,
        *,
        affine: bool = True,
        activation_quant: ActivationQuant | None = None,
    ) -> None:
        self.prefix = prefix
        self.epsilon = epsilon
        self._quant = activation_quant
        # [H] in the model's dtype, or None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if affine:
            self.weight = torch.empty(width, dtype=context.dtype, device=context.device)
            self.bias = torch.empty(width, dtype=context.dtype, device=context.device)

    def slots(self) -> list[WeightSlot]:
        named = (("weight", self.weight), ("bias", self.bias))
        return [
            WeightSlot(f"{self.prefix}.{name}", tuple(tensor.shape), tensor)
            for name, tensor in named
            if tensor is not None
        ]

    def forward(self, x: torch.Tensor) -> Activation:
        """x [T, H] → [T, H]."""
        if self._quant is not None:
            return self._quant.layer_norm(x, self.weight, self.bias, self.epsilon)
        return layer_norm(x, self.weight, self.bias, self.epsilon)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> Activation:
        """residual += x, in place; returns norm(residual). Both are [T, H]."""
        return self.forward(residual.add_(x))
