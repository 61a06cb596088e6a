"""The seam between layers and the formats their weights come in.

Letters: T tokens, H width that a norm normalises.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from typing import Any, Protocol, TypeAlias

import torch

from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.ops.elementwise import fused_add_rms_norm, layer_norm, rms_norm
from ascend_vllm.ops.gemm import GATED_ACTIVATIONS

# What norms hand to linear layers: a tensor [T, H] in the model's dtype, or what the `ActivationQuant` of the linear
# layer's method makes of it. Nobody but that method looks inside.
Activation: TypeAlias = Any


class LayerKind(enum.Enum):
    """What a layer's weight is for; formats leave some kinds as they are."""

    LINEAR = "linear"
    LM_HEAD = "lm_head"
    # rows of a table are looked up
    EMBEDDING = "embedding"
    # the same, and the table is the LM head's weight
    TIED_EMBEDDING = "tied_embedding"


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
    """What a scheme and a method know of a layer. A table of vectors is a matrix with a row for each vector.

    Attributes:
        prefix: name of the layer.
        kind: what its weight is for.
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
    kind: LayerKind
    dtype: torch.dtype
    device: torch.device
    outputs: tuple[LinearOutput, ...]
    total_in_features: int
    in_shard: Shard
    in_features: int
    out_features: int
    bias: torch.Tensor | None


class ActivationQuant(abc.ABC):
    """The form in which a method takes its inputs, made by the norm in front of the layer.

    Formats with a kernel for norm and quantization in one override the norms here.
    """

    @abc.abstractmethod
    def quantize(self, x: torch.Tensor) -> Activation:
        """x [T, H] in the model's dtype → what the method multiplies."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> Activation:
        """See `ops.elementwise.rms_norm`."""
        return self.quantize(rms_norm(x, weight, epsilon))

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> Activation:
        """See `ops.elementwise.fused_add_rms_norm`: residual is updated in place, x is overwritten."""
        fused_add_rms_norm(x, residual, weight, epsilon)
        return self.quantize(x)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
    ) -> Activation:
        """See `ops.elementwise.layer_norm`."""
        return self.quantize(layer_norm(x, weight, bias, epsilon))


class QuantMethod(abc.ABC):
    """How one layer keeps its weights and multiplies with them. Each layer gets its own object.

    Attributes:
        activation_quant: the form in which it takes what a norm gives; None: in the model's dtype. It is set when
            `create_weights` returns. Inputs from elsewhere than a norm are in the model's dtype all the same.
    """

    activation_quant: ActivationQuant | None = None

    @abc.abstractmethod
    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """Allocates the layer's weights; returns the checkpoint tensors that fill them (not the bias)."""

    @abc.abstractmethod
    def after_load(self, layer: LinearLayer) -> None:
        """Turns the loaded weights into the form `apply` reads; what was loaded may be freed."""

    @abc.abstractmethod
    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        """x [T, in] → [T, out] with the layer's bias added."""

    def apply_gated(self, layer: LinearLayer, x: Activation, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2]: one of GATED_ACTIVATIONS of what `apply` returns."""
        return GATED_ACTIVATIONS[activation](self.apply(layer, x))

    def look_up(self, layer: LinearLayer, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] int64, each below `out_features` → those rows of the weight, [T, in] in the model's dtype.

        Only embeddings are looked up in; formats that quantize them override this.
        """
        raise NotImplementedError(f"{layer.prefix}: {type(self).__name__} keeps no table to look up in")


class QuantScheme(abc.ABC):
    """Chooses the method of each layer.

    A class in the table of formats (config/quantization.py) is called with the checkpoint's `QuantizationConfig`. It
    raises `ModelLoadError`, then or in `method_for`, for parameters that it cannot serve.
    """

    @abc.abstractmethod
    def method_for(self, layer: LinearLayer) -> QuantMethod:
        """A new method for a layer, by its names and kind. Its bias is not there yet."""
