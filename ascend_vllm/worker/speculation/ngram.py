"""Drafts from the row's own text, see ops/ngrams.py."""

from __future__ import annotations

from collections.abc import Sequence

from ascend_vllm.attention.backend import AttentionBackend, LayerCache
from ascend_vllm.config.speculation import SpeculativeConfig
from ascend_vllm.layers.attention import Attention
from ascend_vllm.ops.ngrams import NgramTables
from ascend_vllm.types.step import SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch, Int32Array
from ascend_vllm.worker.sampling.sampler import Sampler
from ascend_vllm.worker.speculation.proposer import ComputedStep


class NgramProposer:
    """Looks the last tokens of rows up in their own texts.

    Args:
        config: lengths of the n-grams.
        batch: the slots.
    """

    needs_hidden = False
    read_s = 0.0

    def __init__(self, config: SpeculativeConfig, batch: InputBatch) -> None:
        limits = config.prompt_lookup_min, config.prompt_lookup_max
        self._tables = NgramTables(batch.token_ids, batch.num_tokens, *limits, pads=config.pads_drafts)

    def apply(self, step: SchedulerOutput) -> None:
        """See `Proposer`."""
        for row in step.new_rows:
            self._tables.clear(row.slot)

    def propose(self, step: ComputedStep) -> Int32Array | None:
        """See `Proposer`."""
        slots = step.batch.sampling_slots
        return self._tables.drafts(slots, step.max_drafts) if step.max_drafts and len(slots) else None


class NgramFactory:
    """Makes `NgramProposer`, which has no weights.

    Args:
        config: lengths of the n-grams.
    """

    attention_layers: Sequence[Attention] = ()

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def make(
        self, batch: InputBatch, sampler: Sampler, kv_caches: Sequence[LayerCache], backend: AttentionBackend
    ) -> NgramProposer:
        """See `ProposerFactory`."""
        del sampler, kv_caches, backend
        return NgramProposer(self._config, batch)
