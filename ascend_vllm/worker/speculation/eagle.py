"""Drafts of an EAGLE head, which continues the target's hidden states (models/eagle.py).

The head reads every hidden state that the target computes, with the token behind it, which is known: of the prompt,
drafted and accepted, or just sampled. In steps that want no drafts it reads only long prompts; other hidden states
are kept, and read together once drafts are wanted. A row that has none for long lapses: its oldest hidden states
would have to be dropped, so that it has no drafts any more.

Letters: R rows of a step, T tokens of a pass, M slots, W hidden states that are kept of a slot, F their width,
H hidden size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.eagle import DraftHead
from ascend_vllm.ops.kept_states import StateKeeper
from ascend_vllm.types.step import SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch, upload
from ascend_vllm.worker.sampling.columns import Int64Array, ragged_arange
from ascend_vllm.worker.sampling.sampler import Sampler
from ascend_vllm.worker.speculation.chain import ChainProposer, Drafter, DraftingModel
from ascend_vllm.worker.speculation.draft_model import draft_context, load_draft
from ascend_vllm.worker.speculation.proposer import ComputedStep

# W: more than the steps after which drafts are watched again (core/draft_costs.py)
_MOST_KEPT = 96
# slots whose hidden states are kept; low ones are taken first
_MOST_KEEPING = 64
# kept hidden states that are read in one pass, of one row at least: streams wait for it
_MOST_READ = 512
# position of a row that has lapsed
_LAPSED = -1


class KeptStates:
    """Hidden states that a head has not read yet, the latest ones of each slot.

    Args:
        num_slots: M.
        num_read: [M], see `EagleProposer`; slots that have lapsed keep nothing.
    """

    def __init__(self, num_slots: int, num_read: Int64Array) -> None:
        self._num_read = num_read
        self.num_slots = min(num_slots, _MOST_KEEPING)
        # [M] int64, host: how many there are
        self.counts = np.zeros(num_slots, np.int64)
        # [M*W, F]; None: there have been none
        self._states: torch.Tensor | None = None
        self._keeper: StateKeeper | None = None

    def has_room(self, slots: Int64Array, counts: Int64Array) -> npt.NDArray[np.bool_]:
        """[R] bool: so many more of the row can be kept."""
        return (slots < self.num_slots) & (self.counts[slots] + counts <= _MOST_KEPT)

    def add(self, slots: Int64Array, counts: Int64Array, states: torch.Tensor) -> None:
        """Keeps states [T, F], so many of each slot, for which there is room."""
        kept = self._memory_for(states) if self._states is None else self._states
        places = ragged_arange(slots * _MOST_KEPT + self.counts[slots], counts)
        kept.index_copy_(0, upload(places, states.device), states)
        self.counts[slots] += counts

    def add_one_each(self, slots: Int64Array, states: torch.Tensor) -> bool:
        """Keeps states [R, F], one of each slot, as far as there is room; slots without room lapse.

        Returns:
            Whether it was done: it is one native call, for which tensors must be in host memory.
        """
        if self._keeper is None:
            kept = self._memory_for(states) if self._states is None else self._states
            self._keeper = StateKeeper(kept, self.counts, self._num_read, _MOST_KEPT, _LAPSED)
        return self._keeper.keep(slots, states)

    def _memory_for(self, states: torch.Tensor) -> torch.Tensor:
        """Makes room for states like these."""
        self._states = states.new_zeros(self.num_slots * _MOST_KEPT, states.shape[1])
        return self._states

    def take(self, slots: Int64Array, counts: Int64Array, states: torch.Tensor) -> torch.Tensor:
        """Hidden states of each slot, first those that were kept, which are no longer kept then.

        Args:
            slots: [R].
            counts: [R], how many of `states` are of each.
            states: [T, F].

        Returns:
            [T', F].
        """
        kept = self.counts[slots]
        self.counts[slots] = 0
        if self._states is None or not kept.any():
            return states
        both = torch.cat([self._states[upload(ragged_arange(slots * _MOST_KEPT, kept), states.device)], states])
        # of each slot: where its kept ones begin in `both`, and where the others do
        starts = np.stack([np.cumsum(kept) - kept, kept.sum() + np.cumsum(counts) - counts], axis=1)
        places = ragged_arange(starts.ravel(), np.stack([kept, counts], axis=1).ravel())
        return both[upload(places, states.device)]

    def fork(self, targets: Int64Array, sources: Int64Array) -> None:
        """Gives slots copies of what others have."""
        counts = self.counts[sources] * (targets < self.num_slots)
        self.counts[targets] = counts
        if self._states is not None and counts.any():
            device = self._states.device
            found = self._states[upload(ragged_arange(sources * _MOST_KEPT, counts), device)]
            self._states.index_copy_(0, upload(ragged_arange(targets * _MOST_KEPT, counts), device), found)


class EagleProposer(ChainProposer):
    """Proposes what a head predicts."""

    needs_hidden = True
    input_shift = 1
    feeds_hidden = True

    def __init__(self, drafter: Drafter, batch: InputBatch, sampler: Sampler, head: DraftHead) -> None:
        super().__init__(drafter, batch, sampler)
        self._head = head
        # [M] int64, host: positions that the head has read, or _LAPSED
        self._num_read = np.zeros(len(batch.num_tokens), np.int64)
        self._kept = KeptStates(len(batch.num_tokens), self._num_read)

    def apply(self, step: SchedulerOutput) -> None:
        """New rows have what is cached of them: KV of a head that has not read it costs acceptance only."""
        for row in step.new_rows:
            self._num_read[row.slot] = row.num_computed_tokens if row.may_draft else _LAPSED
            self._kept.counts[row.slot] = 0
        if step.forks:
            targets, sources, _ = np.array(step.forks, np.int64).T
            self._kept.fork(targets, sources)
            without = (self._kept.counts[targets] < self._kept.counts[sources]) | (self._num_read[sources] == _LAPSED)
            self._num_read[targets] = np.where(without, _LAPSED, self._num_read[sources])

    def _catch_up(self, step: ComputedStep) -> tuple[Int64Array, torch.Tensor] | None:
        assert step.hidden is not None
        # nearly every step while there are no drafts
        is_plain = step.max_drafts == 0 and step.batch.max_query_len == 1
        if is_plain and self._kept.add_one_each(step.slots, step.hidden):
            return None
        batch, slots, first = self._batch, step.slots, step.batch.query_start[:-1].astype(np.int64)
        starts = step.batch.positions[first]
        # hidden states behind a rejected draft are void
        counts = np.minimum(step.num_scheduled, batch.num_tokens[slots] - 1 - starts)
        counts = np.minimum(counts, self._drafter.max_model_len - starts)
        reading = (counts > 0) & (self._num_read[slots] != _LAPSED)
        kept = self._kept.counts[slots]
        if step.max_drafts == 0:
            is_kept = reading & self._kept.has_room(slots, counts)
            # what is left of a prompt is read; rows of one token have had no drafts for long
            lapsed = reading & ~is_kept & (counts == 1)
            self._num_read[slots[lapsed]] = _LAPSED
            reading &= ~is_kept & ~lapsed
        else:
            is_kept = np.zeros_like(reading)
            if kept.sum() > _MOST_READ:
                is_kept = reading & self._kept.has_room(slots, counts) & ~_first_up_to(kept, _MOST_READ)
                reading &= ~is_kept
        if is_kept.any():
            self._kept.add(slots[is_kept], counts[is_kept], self._states(step, first[is_kept], counts[is_kept]))
        if not reading.any():
            return None
        slots, counts, kept, first = slots[reading], counts[reading], kept[reading], first[reading]
        hidden = self._kept.take(slots, counts, self._states(step, first, counts))
        starts, counts = self._num_read[slots], kept + counts
        self._num_read[slots] = starts + counts
        return slots, self._compute(slots, starts, counts, self._head.features(hidden))

    def _states(self, step: ComputedStep, first: Int64Array, counts: Int64Array) -> torch.Tensor:
        """[T, F] of some of the step's rows: so many of each from its first token on."""
        assert step.hidden is not None
        if counts.sum() == len(step.hidden):
            return step.hidden
        if len(first) == 1:
            return step.hidden[int(first[0]) : int(first[0] + counts[0])]
        return step.hidden[upload(ragged_arange(first, counts), self._drafter.device)]

    def _best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.best_tokens(hidden)


def _first_up_to(kept: Int64Array, most: int) -> npt.NDArray[np.bool_]:
    """[R] bool: the rows with the fewest, one at least, which have at most so many together."""
    order = kept.argsort(kind="stable")
    chosen = np.empty(len(kept), np.bool_)
    chosen[order] = kept[order].cumsum() <= most
    chosen[order[:1]] = True
    return chosen


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
