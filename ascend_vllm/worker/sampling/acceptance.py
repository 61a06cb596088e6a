"""Rules by which drafts are accepted.

The exact rule needs nothing here: a draft is accepted if it is the token that the row samples in its place, see
`InputBatch.accept`. The rule of typical acceptance (T. Cai et al., Medusa, 2024) decides otherwise which token a row
with a draft has there: the draft, if the model finds it likely enough, else the most likely token.

Letters: S positions at which rows sample, G of them that have a draft and sample at random, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ascend_vllm.config.speculation import AcceptanceMethod, SpeculativeConfig
from ascend_vllm.worker.input_batch import InputBatch, upload_all
from ascend_vllm.worker.sampling.columns import Int64Array
from ascend_vllm.worker.sampling.logprobs import filtered_logits

# in the logarithm of the entropy, as in vLLM
_TINY = 1e-5


@dataclasses.dataclass(frozen=True, slots=True)
class LikelyDrafts:
    """Drafts that are accepted if they are likely enough.

    Attributes:
        rows: [G] int64, of the S positions.
        tokens: [G] int64, the drafts in these places.
        threshold: see `SpeculativeConfig.posterior_threshold`.
        alpha: see `SpeculativeConfig.posterior_alpha`.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    threshold: float
    alpha: float

    def decide(self, logits: torch.Tensor, filters: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """The tokens of all positions.

        Args:
            logits: [S, V], with biases, masks and penalties applied.
            filters: [S] each: temperature, top_k, top_p, min_p.
            ids: [S] int64, as drawn.

        Returns:
            [S] int64.
        """
        rows = self.rows
        kept = filtered_logits(logits[rows].float(), *(column[rows] for column in filters))
        probs = kept.softmax(-1)
        entropy = -(probs * (probs + _TINY).log()).sum(-1)
        limit = (self.alpha * (-entropy).exp()).clamp(max=self.threshold)
        likely = probs.gather(1, self.tokens[:, None])[:, 0]
        return ids.index_copy(0, rows, torch.where(likely > limit, self.tokens, kept.argmax(-1)))


@dataclasses.dataclass(frozen=True, slots=True)
class TypicalAcceptance:
    """Finds the drafts that are accepted if they are likely enough.

    Attributes:
        threshold: see `SpeculativeConfig.posterior_threshold`.
        alpha: see `SpeculativeConfig.posterior_alpha`.
    """

    threshold: float
    alpha: float

    @classmethod
    def of(cls, config: SpeculativeConfig | None) -> TypicalAcceptance | None:
        """The rule that a configuration asks for; None: the exact one."""
        if config is None or config.acceptance is not AcceptanceMethod.TYPICAL:
            return None
        return cls(config.posterior_threshold, config.posterior_alpha)

    def drafts(
        self, batch: InputBatch, slots: Int64Array, num_tokens: Int64Array, device: torch.device
    ) -> LikelyDrafts | None:
        """The drafts of a step's rows; None: no row that samples at random has any.

        Args:
            batch: with the drafts, which are computed but not accepted yet.
            slots: [S]; one that samples at several positions is repeated.
            num_tokens: [S] tokens before each position.
            device: of the logits.
        """
        if batch.num_drafts is None:
            return None
        ends = batch.num_tokens[slots] + batch.num_drafts[slots]
        # the most likely token is the only one of greedy rows
        rows = np.flatnonzero((num_tokens < ends) & (batch.sampling.temperature[slots] > 0))
        if len(rows) == 0:
            return None
        tokens = batch.token_ids[slots[rows], num_tokens[rows]].astype(np.int64)
        rows_on_device, tokens_on_device = upload_all((rows, tokens), device)
        return LikelyDrafts(rows_on_device, tokens_on_device, self.threshold, self.alpha)
