"""The seam between linear layers and the formats their weights come in."""

from __future__ import annotations

import abc
import dataclasses
from typing import Protocol

import torch

from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.ops.gemm import GATED_ACTIVATIONS


@dataclasses.dataclass(frozen=True)
class LinearOutput:
    """One matrix of the checkpoint that is part of a linear layer, or rows of one that is fused there.

    Attributes:
        name: its name there, without ".weight"; several outputs may have the same.
        total: its rows there.
        shard: the rows of it that this rank computes as this output.
    """

    name: str
    total: int
    shard: Shard


class LinearLayer(Protocol):
    """What a method knows of its layer.

    Attributes:
        prefix: name of the layer.
        dtype: of its inputs and outputs.
        device: where it computes.
        outputs: the matrices that it is made of, in the order of their outputs.
        total_in_features: columns of the matrices in the checkpoint.
        in_shard: those of them that this rank holds.
        in_features: their number.
        out_features: rows of all outputs that this rank holds.
        bias: [out_features] in `dtype`, or None.
    """

    prefix: str
    dtype: torch.dtype
    device: torch.device
    outputs: tuple[LinearOutput, ...]
    total_in_features: int
    in_shard: Shard
    in_features: int
    out_features: int
    bias: torch.Tensor | None


class QuantMethod(abc.ABC):
    """How one linear layer keeps its weights and multiplies with them. Each layer gets its own object."""

    @abc.abstractmethod
    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """Allocates the layer's weights; returns the checkpoint tensors that fill them (not the bias)."""

    @abc.abstractmethod
    def after_load(self, layer: LinearLayer) -> None:
        """Turns the loaded weights into the form `apply` reads; what was loaded may be freed."""

    @abc.abstractmethod
    def apply(self, layer: LinearLayer, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] → [T, out] with the layer's bias added."""

    def apply_gated(self, layer: LinearLayer, x: torch.Tensor, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2]: one of GATED_ACTIVATIONS of what `apply` returns."""
        return GATED_ACTIVATIONS[activation](self.apply(layer, x))


class QuantScheme(Protocol):
    """Chooses the method of each linear layer, by the name of the layer in the checkpoint."""

    def method_for(self, layer_name: str) -> QuantMethod:
        """A new method for the layer, e.g. of "model.layers.0.self_attn.qkv_proj"."""
