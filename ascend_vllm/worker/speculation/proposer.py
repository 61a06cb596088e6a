"""What proposes drafts: the interface between the model's runner and n-grams, draft models and EAGLE heads.

A proposer sees every step that the model has computed, prompts included, and proposes the tokens that its rows may
sample next. The engine core sends these drafts back with the next step, to all ranks; the model computes them as it
computes a prompt, and the sampler decides which are right (`InputBatch.accept`). A wrong draft costs time, but no
token depends on it.

There are two parts, since weights outlive the KV cache: a `ProposerFactory` is made where the model is loaded, and
makes the `Proposer` of each runner. Both exist on the rank that samples only.

Letters: R rows of a step, S rows that sampled, T tokens of a step, k most drafts of a row, H hidden size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from ascend_vllm.attention.backend import AttentionBackend, LayerCache
from ascend_vllm.layers.attention import Attention
from ascend_vllm.types.step import SchedulerOutput
from ascend_vllm.worker.input_batch import HostBatch, InputBatch, Int32Array
from ascend_vllm.worker.sampling.columns import Int64Array
from ascend_vllm.worker.sampling.sampler import Sampler


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose tokens are computed, sampled and accepted: `InputBatch` has the rows as they are after it."""

    # the step's batch, with positions, slots of KV and `sampling_slots`, [S]
    batch: HostBatch
    # [R] int64: the rows that computed
    slots: Int64Array
    # [R] int64: tokens that each of them computed, drafts included; rejected ones are among them
    num_scheduled: Int64Array
    # [T, H], or what the model computes with `needs_hidden`: of all tokens of the step, valid until the next step;
    # None without, and if no row may have drafts
    hidden: torch.Tensor | None
    # k; 0: the step wants no drafts, but later ones may
    max_drafts: int


class Proposer(Protocol):
    """Proposes drafts for the rows of one runner.

    Attributes:
        needs_hidden: whether `ComputedStep.hidden` is wanted.
        read_s: seconds that the last `propose` took for tokens that were known before, see `StepOutput.read_s`.
    """

    needs_hidden: bool
    read_s: float

    def apply(self, step: SchedulerOutput) -> None:
        """Called with each step before it is computed, after `InputBatch.apply`; blocks have been moved."""

    def propose(self, step: ComputedStep) -> Int32Array | None:
        """Called after each step that computed tokens of rows that may have drafts.

        Returns:
            [S, k] drafts of the rows of `step.batch.sampling_slots`, in the order of their positions, each row filled
            up with NO_DRAFT; None: no row has any. Nobody else keeps or changes the array.
        """


class ProposerFactory(Protocol):
    """Has what a method needs that outlives the KV cache, such as weights.

    Attributes:
        attention_layers: whose KV is cached beside the model's, in the same blocks: a block's id is valid in the
            caches of all layers.
    """

    attention_layers: Sequence[Attention]

    def make(
        self, batch: InputBatch, sampler: Sampler, kv_caches: Sequence[LayerCache], backend: AttentionBackend
    ) -> Proposer:
        """Makes a proposer.

        Args:
            batch: the slots; it may read everything in it.
            sampler: of the model, whose draws depend on seeds and positions only.
            kv_caches: one for each of `attention_layers`; swapping moves their blocks, too.
            backend: computes attention in these layers, as in the model's.
        """
