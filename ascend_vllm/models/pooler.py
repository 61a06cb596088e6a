"""Makes embeddings, classes and scores of hidden states.

Letters: S prompts or tokens, H hidden, D entries of an embedding, C labels.
"""

from __future__ import annotations

import torch

from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext

# minimum norm, to divide vectors of zeros by
_EPSILON = 1e-12


class ScoreHead(Layer):
    """The linear layer of XForSequenceClassification, "score", without a bias. It computes in float32."""

    def __init__(self, context: BuildContext, hidden_size: int, num_labels: int) -> None:
        # [C, H]
        self.weight = torch.empty(num_labels, hidden_size, dtype=torch.float32, device=context.device)

    def slots(self) -> list[WeightSlot]:
        return [WeightSlot("score.weight", tuple(self.weight.shape), self.weight)]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[S, H] float32 → [S, C]."""
        return torch.nn.functional.linear(states, self.weight)


class Pooler(Layer):
    """The head of a pooling model, instead of an LM head.

    Args:
        pooler: task and activation.
        context: surroundings of the layers.
        width: of the result of `CausalLM.output_states`.
    """

    def __init__(self, pooler: PoolerConfig, context: BuildContext, width: int) -> None:
        self.config = pooler
        self.score: ScoreHead | None = None
        if pooler.convert == "classify":
            self.score = ScoreHead(context, width, len(pooler.labels))

    def forward(
        self, states: torch.Tensor, use_activation: torch.Tensor, dimensions: torch.Tensor | None
    ) -> torch.Tensor:
        """Results of prompts or tokens.

        Args:
            states: [S, H], from `CausalLM.output_states`.
            use_activation: [S] bool, see `PoolingParams`.
            dimensions: [S] int64, number of entries of each embedding; None: all.

        Returns:
            [S, D] float32, 0 after the first `dimensions` entries; or [S, C] float32.
        """
        states = states.float()
        if self.score is not None:
            scores = self.score.forward(states)
            return torch.where(use_activation[:, None], self._activate(scores), scores)
        if dimensions is not None:
            behind = torch.arange(states.shape[1], device=states.device) >= dimensions[:, None]
            states = states.masked_fill(behind, 0.0)
        lengths = torch.linalg.vector_norm(states, dim=-1).clamp_min_(_EPSILON)
        return states / torch.where(use_activation, lengths, 1.0)[:, None]

    def _activate(self, scores: torch.Tensor) -> torch.Tensor:
        if self.config.activation == "softmax":
            return torch.softmax(scores, dim=-1)
        return torch.sigmoid(scores) if self.config.activation == "sigmoid" else scores
