"""The seam between linear layers and the formats their weights come in."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol

import torch

from ascend_vllm.ops.gemm import GATED_ACTIVATIONS

if TYPE_CHECKING:
    from ascend_vllm.layers.base import WeightSlot
    from ascend_vllm.layers.linear import Linear


class QuantMethod(abc.ABC):
    """How one linear layer keeps its weights and multiplies with them. Each layer gets its own object."""

    @abc.abstractmethod
    def create_weights(self, layer: Linear) -> list[WeightSlot]:
        """Allocates the layer's weights; returns the checkpoint tensors that fill them (not the bias)."""

    @abc.abstractmethod
    def after_load(self, layer: Linear) -> None:
        """Turns the loaded weights into the form `apply` reads; what was loaded may be freed."""

    @abc.abstractmethod
    def apply(self, layer: Linear, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] → [T, out] with the layer's bias added."""

    def apply_gated(self, layer: Linear, x: torch.Tensor, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2]: one of GATED_ACTIVATIONS of what `apply` returns."""
        return GATED_ACTIVATIONS[activation](self.apply(layer, x))


class QuantScheme(Protocol):
    """Chooses the method of each linear layer, by the name of the layer in the checkpoint."""

    def method_for(self, layer_name: str) -> QuantMethod:
        """A new method for the layer, e.g. of "model.layers.0.self_attn.qkv_proj"."""
