"""Token and position embeddings, and the LM head.

Letters: T tokens, S sampling rows, H hidden, V vocabulary, W entries of it in a rank's part.
"""

from __future__ import annotations

import torch

from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import Linear
from ascend_vllm.layers.quantization.base import LinearOutput
from ascend_vllm.ops.embedding import gather_rows
from ascend_vllm.ops.gemm import PackedLinear, has_kernel
from ascend_vllm.platforms.host_memory import weight_memory


def _table(context: BuildContext, num_rows: int, width: int) -> torch.Tensor:
    """Room for num_rows vectors [width] in the model's dtype."""
    if context.device.type == "cpu":
        return weight_memory((num_rows, width), context.dtype)
    return torch.empty(num_rows, width, dtype=context.dtype, device=context.device)


class Embedding(Layer):
    """A table of vectors, whole on every rank.

    Args:
        context: surroundings.
        prefix: name of the table in the checkpoint, without ".weight".
        num_embeddings: rows.
        width: columns.
        offset: added to every index; OPT's positions start at row 2.
    """

    def __init__(
        self, context: BuildContext, prefix: str, num_embeddings: int, width: int, *, offset: int = 0
    ) -> None:
        self.prefix = prefix
        self._offset = offset
        # [V, H] in the model's dtype
        self.weight = _table(context, num_embeddings, width)

    def slots(self) -> list[WeightSlot]:
        """The table."""
        return [WeightSlot(f"{self.prefix}.weight", tuple(self.weight.shape), self.weight)]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] int64 → [T, H]."""
        if self._offset:
            indices = indices + self._offset
        return torch.embedding(self.weight, indices)


class VocabParallelEmbedding(Layer):
    """The vectors of the vocabulary's tokens, split over ranks.

    Args:
        context: surroundings.
        prefix: name of the table in the checkpoint, without ".weight".
        num_embeddings: V.
        width: H.
    """

    def __init__(self, context: BuildContext, prefix: str, num_embeddings: int, width: int) -> None:
        self.prefix = prefix
        self.num_embeddings = num_embeddings
        self.gather = LogitsGather(context, num_embeddings)
        self._shard = context.parallel.shard_vocabulary(num_embeddings)
        self._is_whole = context.parallel.tp_size == 1
        self._collectives = context.collectives
        # [V, H] in the model's dtype, or a rank's part of it
        self._weight: torch.Tensor | PackedLinear
        self._look_up = gather_rows if has_kernel(context.dtype, context.device) else torch.embedding
        self._weight = _table(context, self._shard.size, width)

    def slots(self) -> list[WeightSlot]:
        """The table."""
        weight = self._weight
        target = weight if isinstance(weight, torch.Tensor) else weight.target(0, self._shard.size)
        return [
            WeightSlot(f"{self.prefix}.weight", (self.num_embeddings, target.shape[1]), target, (self._shard.start,))
        ]

    def keep_packed(self) -> None:
        """Before loading: has the table lie as products want it, if vectors can be read from that, too."""
        weight = self._weight
        if isinstance(weight, torch.Tensor) and has_kernel(weight.dtype, weight.device):
            num_rows, width = weight.shape
            self._weight = PackedLinear(num_rows, width, weight.dtype, weight.device)

    def packed(self) -> PackedLinear:
        """The loaded table, for products."""
        return PackedLinear.of(self._weight) if isinstance(self._weight, torch.Tensor) else self._weight

    def _vectors(self, indices: torch.Tensor) -> torch.Tensor:
        return (
            self._weight.rows(indices)
            if isinstance(self._weight, PackedLinear)
            else self._look_up(self._weight, indices)
        )

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] int64 → [T, H], complete on every rank."""
        if self._is_whole:
            return self._vectors(indices)
        places = indices - self._shard.start
        is_elsewhere = (places < 0) | (places >= self._shard.size)
        vectors = self._vectors(places.masked_fill(is_elsewhere, 0))
        return self._collectives.all_reduce(vectors.masked_fill_(is_elsewhere[:, None], 0))


class LogitsGather:
    """Puts the logits of all ranks together.

    Args:
        context: surroundings.
        vocab_size: V.
    """

    def __init__(self, context: BuildContext, vocab_size: int) -> None:
        self._collectives = context.collectives
        self._vocab_size = vocab_size
        self._part = context.parallel.padded_part(vocab_size)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """[S, W], a rank's own, or fewer columns on the last rank → [S, V] on every rank."""
        missing = self._part - logits.shape[1]
        if missing:
            logits = torch.nn.functional.pad(logits, (0, missing))
        return self._collectives.gather_columns(logits, self._vocab_size)


class LMHead(Linear):
    """Logits over the vocabulary, with its own weight in the checkpoint; the vocabulary is split over ranks."""

    def __init__(
        self, context: BuildContext, prefix: str, hidden_size: int, vocab_size: int, *, bias: bool = False
    ) -> None:
        shard = context.parallel.shard_vocabulary(vocab_size)
        super().__init__(context, prefix, [LinearOutput(prefix, vocab_size, shard)], hidden_size, bias=bias)
        self._gather = LogitsGather(context, vocab_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, H] → [S, V] on every rank."""
        return self._gather(self._method.apply(self, x))


class NoLMHead(Layer):
    """In the place of the head of a model that pools, and of a pipeline stage that others follow."""

    def forward(self, _hidden: torch.Tensor) -> torch.Tensor:
        """Never called: nothing is sampled.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a pooling model, or a stage that others follow, has no LM head")


class TiedLMHead(Layer):
    """Logits over the vocabulary, with the weight of the token embedding."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        embedding.keep_packed()
        self._embedding = embedding
        self._packed: PackedLinear | None = None

    def after_load(self) -> None:
        """Packs the table, which is loaded by then: a child's slots count as the parent's."""
        self._packed = self._embedding.packed()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V] on every rank."""
        if self._packed is None:
            raise RuntimeError("the tied LM head is used before the embedding is loaded")
        return self._embedding.gather(self._packed(hidden, None))
