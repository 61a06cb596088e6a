"""The interface between layers and the formats of their weights.

Letters: T tokens, H width that a norm normalises.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch

from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.layers.base import WeightSlot
from ascend_vllm.ops.elementwise import fused_add_rms_norm, layer_norm, rms_norm
from ascend_vllm.ops.gemm import GATED_ACTIVATIONS

# Input of linear layers from norms: a tensor [T, H] in the model's dtype, or the result of the `ActivationQuant` of
# the linear layer's method, which only that method accesses.
Activation: TypeAlias = Any


class LayerKind(enum.Enum):
    """Use of a layer's weight; formats do not quantize some kinds."""

    LINEAR = "linear"
    # the choice of experts, which a format must name to quantize it
    ROUTER = "router"
    LM_HEAD = "lm_head"
    # a table whose rows are looked up
    EMBEDDING = "embedding"
    # the same, and the table is also the LM head's weight
    TIED_EMBEDDING = "tied_embedding"


@dataclasses.dataclass(frozen=True)
class LinearOutput:
    """One matrix of the checkpoint that is part of a linear layer, or rows of a fused matrix.

    Attributes:
        name: of the matrix in the checkpoint, without ".weight"; several outputs may have the same.
        total: rows of the matrix in the checkpoint.
        shard: the rows that this rank computes as this output.
    """

    name: str
    total: int
    shard: Shard


class LinearLayer(Protocol):
    """A layer as schemes and methods see it. An embedding table is a matrix with a row for each vector.

    Attributes:
        prefix: name of the layer.
        kind: use of its weight.
        dtype: of its inputs and outputs.
        device: of the layer.
        outputs: the matrices that it consists of, in the order of their outputs.
        total_in_features: columns of the matrices in the checkpoint.
        in_shard: the columns that this rank holds.
        in_features: number of the columns that this rank holds.
        out_features: rows of all outputs that this rank holds.
        has_bias: whether the checkpoint has a bias of the usual form. A method whose format has another one sets it
            to False in `create_weights`, and `bias` in `after_load`. Of ranks that split inputs the first adds it.
        bias: [out_features] in `dtype`, or None.
        checkpoint_shapes: of the checkpoint's tensors, see `BuildContext`.
        checkpoint_dtypes: their dtypes.
        checkpoint_names: their names in the checkpoint.
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
    has_bias: bool
    bias: torch.Tensor | None
    checkpoint_shapes: Mapping[str, tuple[int, ...]]
    checkpoint_dtypes: Mapping[str, torch.dtype]
    checkpoint_names: Mapping[str, str]


class ActivationQuant(abc.ABC):
    """Quantizes the inputs of a method in the norm before the layer.

    Formats with a fused kernel for norm and quantization override the norms.
    """

    @abc.abstractmethod
    def quantize(self, x: torch.Tensor) -> Activation:
        """x [T, H] in the model's dtype → input of the method."""

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
    """Stores the weights of one layer and multiplies with them. Each layer gets its own object.

    Attributes:
        activation_quant: quantizes results of norms for this method; None: they are in the model's dtype. Set when
            `create_weights` returns. Inputs that are not from a norm are always in the model's dtype.
        rounds_inputs: whether products with weights in codes of 4 or 8 bits may round their inputs to 8 bits, see
            `ops.quantized_gemm.quantized_linear`; other methods ignore it. Set before weights are loaded.
        product_kinds: of `ops.native.QUANTIZED_PRODUCTS`, those that the CPU computes for the layer. Set when weights
            are loaded.
    """

    activation_quant: ActivationQuant | None = None
    rounds_inputs: bool = False
    product_kinds: frozenset[str] = frozenset()

    @abc.abstractmethod
    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """Allocates the layer's weights; returns the checkpoint tensors that fill them (not the bias)."""

    @abc.abstractmethod
    def after_load(self, layer: LinearLayer) -> None:
        """Converts the loaded weights to the form that `apply` reads; may free the loaded form."""

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

    def finish_vectors(self, indices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Puts in what is not in an embedding's table: vectors [T, H], complete on every rank, of indices [T]."""
        return vectors

    def finish_logits(self, x: Activation, logits: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Adds what is not in a head's weight: logits [S, V] of x [S, H] → [S, V or more], on every rank."""
        return logits


class QuantScheme(abc.ABC):
    """Chooses the method of each layer.

    A class in the table of formats (config/quantization.py) is called with the checkpoint's `QuantizationConfig`. It
    raises `ModelLoadError`, then or in `method_for`, for unsupported parameters.

    Attributes:
        ignored_weights: tensors of the format that no layer needs, as regular expressions over whole names.
    """

    ignored_weights: tuple[str, ...] = ()

    @abc.abstractmethod
    def method_for(self, layer: LinearLayer) -> QuantMethod:
        """Makes the method of a layer by its names and kind. The layer's bias does not exist yet."""
