"""Linear layers. They differ in the dimension that is split over ranks and in the checkpoint tensors that they
consist of; their `QuantMethod` stores and multiplies the weights.

Letters: T tokens, N query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_vllm.distributed.collectives import SingleRank
from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.quantization.base import (
    Activation,
    ActivationQuant,
    LayerKind,
    LinearOutput,
    QuantMethod,
)


class Linear(Layer):
    """y = x Wᵀ + b over one or several matrices of a checkpoint that share their input.

    Use one of the subclasses, which split the layer. Inputs [T, in] are in the model's dtype, or results of a norm
    with the layer's `activation_quant`.

    Args:
        prefix: name of the layer, by which its quantization is chosen.
        outputs: matrices, in the order of their outputs.
        in_features: columns of the matrices in the checkpoint.
        bias: whether there is a bias per matrix.
        in_shard: the input columns this rank holds; None: all.
    """

    kind: LayerKind = LayerKind.LINEAR

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        outputs: Sequence[LinearOutput],
        in_features: int,
        *,
        bias: bool,
        in_shard: Shard | None = None,
    ) -> None:
        self.prefix = prefix
        self.dtype = context.dtype
        self.device = context.device
        self.outputs = tuple(outputs)
        self.total_in_features = in_features
        self.in_shard = in_shard or Shard(0, in_features)
        self.in_features = self.in_shard.size
        self.output_sizes = [output.shard.size for output in self.outputs]
        self.out_features = sum(self.output_sizes)
        self.checkpoint_shapes = context.checkpoint_shapes
        self.checkpoint_dtypes = context.checkpoint_dtypes
        self.checkpoint_names = context.checkpoint_names
        self.has_bias = bias
        # [out] in the model's dtype, or None
        self.bias: torch.Tensor | None = None
        self._method = context.quant.method_for(self)
        self._slots = self._method.create_weights(self)
        if self.has_bias:
            self._slots += self._create_bias()

    def _create_bias(self) -> list[WeightSlot]:
        self.bias = torch.empty(self.out_features, dtype=self.dtype, device=self.device)
        slots = []
        row = 0
        for output in self.outputs:
            target = self.bias[row : row + output.shard.size]
            slots.append(WeightSlot(f"{output.name}.bias", (output.total,), target, (output.shard.start,)))
            row += output.shard.size
        return slots

    @property
    def method(self) -> QuantMethod:
        """How the weight is stored and multiplied."""
        return self._method

    @property
    def activation_quant(self) -> ActivationQuant | None:
        """How the norm before this layer has to quantize its result; None: not at all."""
        return self._method.activation_quant

    @property
    def product_kinds(self) -> frozenset[str]:
        """See `Layer.product_kinds`."""
        return self._method.product_kinds

    def slots(self) -> list[WeightSlot]:
        """Per matrix a weight, or the tensors of its quantization format, and perhaps a bias."""
        return self._slots

    def after_load(self) -> None:
        """Packs the weights, and frees the loaded form."""
        self._slots = []
        self._method.after_load(self)

    def forward(self, x: Activation) -> torch.Tensor:
        """x [T, in] → [T, out], the outputs of the matrices side by side."""
        return self._method.apply(self, x)


class ColumnParallelLinear(Linear):
    """One matrix, its outputs split over ranks."""

    def __init__(
        self, context: BuildContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        shard = context.parallel.shard(out_features, f"outputs of {prefix}")
        super().__init__(context, prefix, [LinearOutput(prefix, out_features, shard)], in_features, bias=bias)


class MergedColumnParallelLinear(Linear):
    """Several matrices with the same input in one GEMM, the outputs of each split over ranks (gate and up).

    Args:
        prefix: name of the module that holds the matrices.
        names: the matrices' names in that module.
        in_features: their columns.
        out_features: rows of each.
        merged_name: name of the layer made of them.
        bias: whether each has a bias.
        is_fused: the checkpoint has one matrix of them, of the name `merged_name`.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        *,
        merged_name: str,
        bias: bool = False,
        is_fused: bool = False,
    ) -> None:
        outputs, start = [], 0
        for name, size in zip(names, out_features, strict=True):
            shard = context.parallel.shard(size, f"outputs of {prefix}.{name}")
            if is_fused:
                fused = Shard(start + shard.start, shard.size)
                outputs.append(LinearOutput(f"{prefix}.{merged_name}", sum(out_features), fused))
            else:
                outputs.append(LinearOutput(f"{prefix}.{name}", size, shard))
            start += size
        super().__init__(context, f"{prefix}.{merged_name}", outputs, in_features, bias=bias)

    def forward_gated(self, x: Activation, activation: str) -> torch.Tensor:
        """x [T, in] → [T, out/2]: the activation of the first of two matrices' outputs, times the second's."""
        return self._method.apply_gated(self, x, activation)


class QKVParallelLinear(Linear):
    """Query, key and value projections in one GEMM, split over ranks by heads.

    Args:
        prefix: name of the attention module, which holds q_proj, k_proj and v_proj, or qkv_proj.
        hidden_size: width of the input.
        head_size: D.
        num_heads: query heads of the whole model.
        num_kv_heads: KV heads of the whole model; with fewer heads than ranks, several ranks have the same one.
        bias: whether each projection has a bias.
        layout: of the checkpoint, see `ArchConfig.qkv_layout`.

    Attributes:
        heads: this rank's query heads.
        num_heads: how many these are.
        num_kv_heads: this rank's KV heads.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
        layout: str = "split",
    ) -> None:
        query = context.parallel.shard(num_heads, "attention heads")
        kv = context.parallel.shard_or_replicate(num_kv_heads, "KV heads")
        self.heads = query
        self.num_heads = query.size
        self.num_kv_heads = kv.size
        self._widths = [heads.size * head_size for heads in (query, kv, kv)]
        # name of the matrix, its heads, and ranges of them, in the order of this layer's outputs
        parts: list[tuple[str, int, list[Shard]]]
        total = num_heads + 2 * num_kv_heads
        if layout == "split":
            parts = [("q_proj", num_heads, [query]), ("k_proj", num_kv_heads, [kv]), ("v_proj", num_kv_heads, [kv])]
        elif layout == "fused":
            starts = (query.start, num_heads + kv.start, num_heads + num_kv_heads + kv.start)
            ranges = [Shard(start, part.size) for start, part in zip(starts, (query, kv, kv), strict=True)]
            parts = [("qkv_proj", total, ranges)]
        else:
            parts = [("qkv_proj", total, _grouped_heads(query, kv, num_heads // num_kv_heads))]
        outputs = [
            LinearOutput(
                f"{prefix}.{name}", count * head_size, Shard(heads.start * head_size, heads.size * head_size)
            )
            for name, count, ranges in parts
            for heads in ranges
        ]
        super().__init__(context, f"{prefix}.qkv_proj", outputs, hidden_size, bias=bias)

    def project(self, x: Activation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, H] → query [T, N*D], key and value [T, K*D]: views of one tensor, so their rows are strided."""
        query, key, value = self.forward(x).split_with_sizes(self._widths, dim=-1)
        return query, key, value


def _grouped_heads(query: Shard, kv: Shard, group: int) -> list[Shard]:
    """Ranges of heads in a matrix that has, for each KV head, its `group` queries, its key and its value."""
    queries = []
    for kv_head in range(query.start // group, -(-(query.start + query.size) // group)):
        first = max(query.start, kv_head * group)
        last = min(query.start + query.size, (kv_head + 1) * group)
        # two more heads for each KV head before
        queries.append(Shard(first + 2 * kv_head, last - first))
    return queries + [
        Shard(kv_head * (group + 2) + group + offset, 1)
        for offset in (0, 1)
        for kv_head in range(kv.start, kv.start + kv.size)
    ]


class RowParallelLinear(Linear):
    """One matrix, its inputs split over ranks; the ranks' results are added.

    Args:
        prefix: name of the matrix.
        in_features: its columns.
        out_features: its rows.
        bias: whether there is one.
        adds_ranks: otherwise the caller adds the ranks' results.
    """

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        adds_ranks: bool = True,
    ) -> None:
        output = LinearOutput(prefix, out_features, Shard(0, out_features))
        in_shard = context.parallel.shard(in_features, f"inputs of {prefix}")
        super().__init__(context, prefix, [output], in_features, bias=bias, in_shard=in_shard)
        self._collectives = context.collectives if adds_ranks else SingleRank()
        # only one rank adds the bias, since the ranks' results are added
        self._adds_bias = context.parallel.tp_rank == 0

    def after_load(self) -> None:
        super().after_load()
        if not self._adds_bias:
            self.bias = None

    def forward(self, x: Activation) -> torch.Tensor:
        """x [T, in], this rank's inputs → [T, out], complete on every rank if it `adds_ranks`."""
        return self._collectives.all_reduce(self._method.apply(self, x))


class ReplicatedLinear(Linear):
    """One matrix, whole on every rank.

    Args:
        prefix: name in the checkpoint.
        bias: whether there is one.
    """

    def __init__(
        self, context: BuildContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        output = LinearOutput(prefix, out_features, Shard(0, out_features))
        super().__init__(context, prefix, [output], in_features, bias=bias)


class Router(ReplicatedLinear):
    """The scores of experts, or the gate of what all tokens use."""

    kind = LayerKind.ROUTER
