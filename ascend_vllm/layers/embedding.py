"""Token and position embeddings, and the LM head.

Letters: T tokens, S sampling rows, H hidden, V vocabulary, W entries of it in a rank's part.
"""

from __future__ import annotations

import dataclasses

import torch

from ascend_vllm.layers.base import Layer, Target, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.linear import Linear
from ascend_vllm.layers.quantization.base import LayerKind, LinearOutput
from ascend_vllm.platforms.host_memory import weight_memory


class Embedding(Layer):
    """A table of vectors, whole on every rank.

    Args:
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
        self.weight = weight_memory((num_embeddings, width), context.dtype, context.device)

    def slots(self) -> list[WeightSlot]:
        return [WeightSlot(f"{self.prefix}.weight", tuple(self.weight.shape), self.weight)]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] int64 → [T, H]."""
        if self._offset:
            indices = indices + self._offset
        return torch.embedding(self.weight, indices)


class VocabParallelEmbedding(Linear):
    """The embeddings of the vocabulary, split over ranks: a matrix [V, H] whose rows are looked up.

    Args:
        prefix: name of the table in the checkpoint, without ".weight".
        num_embeddings: V.
        width: H.
    """

    kind = LayerKind.EMBEDDING

    def __init__(self, context: BuildContext, prefix: str, num_embeddings: int, width: int) -> None:
        self._shard = context.parallel.shard_vocabulary(num_embeddings)
        super().__init__(context, prefix, [LinearOutput(prefix, num_embeddings, self._shard)], width, bias=False)
        self._gather = LogitsGather(context, num_embeddings)
        self._is_whole = context.parallel.tp_size == 1
        self._collectives = context.collectives
        self._quant = context.quant

    def tie_lm_head(self) -> None:
        """Uses the table as LM head, too; call it before loading."""
        self.kind = LayerKind.TIED_EMBEDDING
        self._method = self._quant.method_for(self)
        self._slots = self._method.create_weights(self)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """indices [T] int64 → [T, H], complete on every rank."""
        if self._is_whole:
            return self._method.finish_vectors(indices, self._method.look_up(self, indices))
        places = indices - self._shard.start
        is_elsewhere = (places < 0) | (places >= self._shard.size)
        vectors = self._method.look_up(self, places.masked_fill(is_elsewhere, 0))
        vectors = self._collectives.all_reduce(vectors.masked_fill_(is_elsewhere[:, None], 0))
        return self._method.finish_vectors(indices, vectors)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → products with all vectors, [S, V] on every rank."""
        return self._method.finish_logits(hidden, self._gather(self._method.apply(self, hidden)))


class LogitsGather:
    """Gathers the logits of all ranks."""

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


class _NormalizedRows:
    """A destination of rows [M, K] that are divided by their Euclidean norms first."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.shape = target.shape
        self.dtype = target.dtype

    def copy_(self, source: torch.Tensor) -> None:
        """Writes the rows: [M, K] of any float dtype."""
        self._target.copy_(torch.nn.functional.normalize(source.float(), dim=1))


class LMHead(Linear):
    """Logits over the vocabulary, with its own weight in the checkpoint; the vocabulary is split over ranks.

    Args:
        normalizes: see `ArchConfig.normalizes_head`.
    """

    kind = LayerKind.LM_HEAD

    def __init__(
        self,
        context: BuildContext,
        prefix: str,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        normalizes: bool = False,
    ) -> None:
        shard = context.parallel.shard_vocabulary(vocab_size)
        super().__init__(context, prefix, [LinearOutput(prefix, vocab_size, shard)], hidden_size, bias=bias)
        if normalizes:
            self._slots = [
                dataclasses.replace(slot, target=_NormalizedRows(slot.target))
                if slot.name == f"{prefix}.weight"
                else slot
                for slot in self._slots
            ]
        self._gather = LogitsGather(context, vocab_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, H] → [S, V] on every rank."""
        return self._method.finish_logits(x, self._gather(self._method.apply(self, x)))


class NoLMHead(Layer):
    """Replaces the head of pooling models, and of pipeline stages before the last."""

    def forward(self, _hidden: torch.Tensor) -> torch.Tensor:
        """Not to be called, since nothing is sampled.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a pooling model, or a stage that others follow, has no LM head")


class TiedLMHead(Layer):
    """Logits over the vocabulary, with the weight of the token embedding."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        embedding.tie_lm_head()
        self._embedding = embedding

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] → [S, V] on every rank."""
        return self._embedding.logits(hidden)
