"""Token and position embeddings, and the LM head. Letters: T tokens, S sampling rows, H hidden, V vocabulary."""

from __future__ import annotations

import torch

from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import Linear, LinearOutput
from ascend_vllm.ops.gemm import PackedLinear


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
        self.weight = torch.empty(num_embeddings, width, dtype=context.dtype, device=context.device)

    def slots(self) -> list[WeightSlot]:
        """The table."""
        return [WeightSlot(f"{self.prefix}.weight", tuple(self.weight.shape), self.weight)]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] int64 → [T, H]."""
        if self._offset:
            indices = indices + self._offset
        return torch.embedding(self.weight, indices)


class LMHead(Linear):
    """Logits over the vocabulary, with its own weight in the checkpoint."""

    def __init__(
        self, context: BuildContext, prefix: str, hidden_size: int, vocab_size: int, *, bias: bool = False
    ) -> None:
        shard = context.parallel.shard(vocab_size, "vocabulary entries")
        super().__init__(context, prefix, [LinearOutput(prefix, vocab_size, shard)], hidden_size, bias=bias)


class NoLMHead(Layer):
    """In the place of the head of a model that pools."""

    def forward(self, _hidden: torch.Tensor) -> torch.Tensor:
        """Never called: a pooling model samples nothing.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a pooling model has no LM head")


class TiedLMHead(Layer):
    """Logits over the vocabulary, with the weight of the token embedding.

    The look-up reads rows and the GEMM its own arrangement, so both forms are kept.
    """

    def __init__(self, embedding: Embedding) -> None:
        self._embedding = embedding
        self._packed: PackedLinear | None = None

    def after_load(self) -> None:
        """Packs the table, which is loaded by then: a child's slots count as the parent's."""
        self._packed = PackedLinear(self._embedding.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V]."""
        if self._packed is None:
            raise RuntimeError("the tied LM head is used before the embedding is loaded")
        return self._packed(hidden, None)
