"""Drafts of an EAGLE head, which continues the target's hidden states (models/eagle.py).

The head reads every hidden state that the target computes, with the token behind it, which is known: of the prompt,
drafted and accepted, or just sampled. So it lacks nothing when a step is over, and keeps no state of rows but its KV.

Letters: R rows of a step, T tokens of a pass, H hidden size.
"""

from __future__ import annotations

import numpy as np
import torch

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.eagle import DraftHead
from ascend_vllm.types.step import SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch, upload
from ascend_vllm.worker.sampling.columns import Int64Array, ragged_arange
from ascend_vllm.worker.sampling.sampler import Sampler
from ascend_vllm.worker.speculation.chain import ChainProposer, Drafter, DraftingModel
from ascend_vllm.worker.speculation.draft_model import draft_context, load_draft
from ascend_vllm.worker.speculation.proposer import ComputedStep


class EagleProposer(ChainProposer):
    """Proposes what a head predicts."""

    needs_hidden = True
    input_shift = 1
    feeds_hidden = True

    def __init__(self, drafter: Drafter, batch: InputBatch, sampler: Sampler, head: DraftHead) -> None:
        super().__init__(drafter, batch, sampler)
        self._head = head

    def apply(self, step: SchedulerOutput) -> None:
        """Nothing to do: rows have no state here."""

    def _catch_up(self, step: ComputedStep) -> tuple[Int64Array, torch.Tensor] | None:
        assert step.hidden is not None
        batch, slots, first = self._batch, step.slots, step.batch.query_start[:-1].astype(np.int64)
        starts = step.batch.positions[first]
        # hidden states behind a rejected draft are void
        counts = np.minimum(step.num_scheduled, batch.num_tokens[slots] - 1 - starts)
        counts = np.minimum(counts, self._drafter.max_model_len - starts)
        kept = np.flatnonzero(counts > 0)
        if len(kept) == 0:
            return None
        slots, starts, counts = slots[kept], starts[kept], counts[kept]
        places = upload(ragged_arange(first[kept], counts), self._drafter.device)
        tokens = batch.token_ids[np.repeat(slots, counts), ragged_arange(starts + 1, counts)].astype(np.int64)
        features = self._head.features(step.hidden[places])
        return slots, self._compute(slots, starts, counts, tokens, features)

    def _best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.best_tokens(hidden)


def make_eagle(config: EngineConfig, target: CausalLM, context: BuildContext) -> DraftingModel:
    """Loads the head, and makes the target report what it reads; see `METHODS`.

    Raises:
        ModelLoadError: it cannot be loaded, or does not fit the target.
    """
    own, length = draft_context(context, config.cache.scale_dtype), config.model.max_model_len
    head = load_draft(config, own, length)
    if not isinstance(head, DraftHead):
        raise ModelLoadError(f"{type(head).__name__} is no EAGLE head")
    head.use_target(target, is_whole=context.parallel.tp_size == 1)
    layers = head.reported_layers(config.model.num_layers)
    if layers:
        target.report_states(layers)
    return DraftingModel(
        config, head, own, length, lambda drafter, batch, sampler: EagleProposer(drafter, batch, sampler, head)
    )
