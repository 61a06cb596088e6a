"""Normalisation layers. Letters: T tokens, H width that is normalised."""

from __future__ import annotations

import torch

from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.ops.elementwise import fused_add_rms_norm, layer_norm, rms_norm


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + epsilon) · weight (Zhang and Sennrich, 2019).

    Args:
        context: surroundings.
        prefix: name in the checkpoint, without ".weight".
        width: H.
        epsilon: added to the mean square.
    """

    def __init__(self, context: BuildContext, prefix: str, width: int, epsilon: float) -> None:
        self.prefix = prefix
        self.epsilon = epsilon
        # [H] in the model's dtype
        self.weight = torch.empty(width, dtype=context.dtype, device=context.device)

    def slots(self) -> list[WeightSlot]:
        """The weight."""
        return [WeightSlot(f"{self.prefix}.weight", tuple(self.weight.shape), self.weight)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] → [..., H], contiguous."""
        result: torch.Tensor = rms_norm(x, self.weight, self.epsilon)
        return result

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """residual += x, then x = norm(residual); both [T, H], in place."""
        fused_add_rms_norm(x, residual, self.weight, self.epsilon)


class LayerNorm(Layer):
    """(x - mean(x)) / sqrt(var(x) + epsilon) · weight + bias (Ba et al., 2016).

    Args:
        context: surroundings.
        prefix: name in the checkpoint, without ".weight".
        width: H.
        epsilon: added to the variance.
        affine: whether there are a weight and a bias.
    """

    def __init__(
        self, context: BuildContext, prefix: str, width: int, epsilon: float = 1e-5, *, affine: bool = True
    ) -> None:
        self.prefix = prefix
        self.epsilon = epsilon
        # [H] in the model's dtype, or None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if affine:
            self.weight = torch.empty(width, dtype=context.dtype, device=context.device)
            self.bias = torch.empty(width, dtype=context.dtype, device=context.device)

    def slots(self) -> list[WeightSlot]:
        """Weight and bias, if affine."""
        named = (("weight", self.weight), ("bias", self.bias))
        return [
            WeightSlot(f"{self.prefix}.{name}", tuple(tensor.shape), tensor)
            for name, tensor in named
            if tensor is not None
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] → [T, H]."""
        result: torch.Tensor = layer_norm(x, self.weight, self.bias, self.epsilon)
        return result
