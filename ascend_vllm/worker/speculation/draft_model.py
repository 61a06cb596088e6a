"""Drafts of a smaller model with the target's vocabulary.

It has KV of its own in the target's blocks. What it has computed of a row is kept by slot: it lags behind the target
by the last draft of a row, which does not enter it, and by the steps in which no drafts were wanted. So cached blocks
may have KV of the target only, see `ComputedBlocks`.

Letters: M slots, R rows of a step, T tokens of a pass, H hidden size, V vocabulary of the target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.collectives import SingleRank
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.models.loader import load_model
from ascend_vllm.types.step import MoveKind, SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.sampling.columns import Int64Array
from ascend_vllm.worker.sampling.sampler import Sampler
from ascend_vllm.worker.speculation.chain import ChainProposer, Drafter, DraftingModel
from ascend_vllm.worker.speculation.proposer import ComputedStep


def draft_context(context: BuildContext, scale_dtype: str) -> BuildContext:
    """The context of a draft model: whole on one worker, without the target's quantization and adapters.

    Args:
        context: of the target.
        scale_dtype: see `CacheConfig`.
    """
    cache_format = context.kv_cache
    if cache_format is not None and cache_format.dtype == "int8":
        # measured scales are those of the target's layers
        cache_format = msgspec.structs.replace(cache_format, has_scales=True, scale_dtype=scale_dtype)
    return dataclasses.replace(
        context,
        parallel=ParallelContext(),
        collectives=SingleRank(),
        quant=UnquantizedScheme(),
        step_state=StepState(0, 0, context.device),
        lora=None,
        kv_cache=cache_format,
        kv_layer_scales=None,
    )


def load_draft(config: EngineConfig, context: BuildContext, max_model_len: int) -> CausalLM:
    """Loads `SpeculativeConfig.draft`.

    Args:
        config: of the engine.
        context: of `draft_context`.
        max_model_len: positions that it must know.

    Raises:
        ModelLoadError: it cannot be loaded.
    """
    assert config.speculation is not None
    assert config.speculation.draft is not None
    draft = msgspec.structs.replace(config.speculation.draft, max_model_len=max_model_len)
    load = config.load
    if load.load_format != "dummy":
        # drafts need not be stored as the target is
        load = msgspec.structs.replace(load, load_format="auto")
    return load_model(draft, load, context)


class ComputedBlocks:
    """Which full blocks have KV of the draft model: it may not have computed what the target has cached."""

    def __init__(self) -> None:
        self._on_device: set[int] = set()
        self._in_cpu_memory: set[int] = set()

    def add(self, block_ids: Sequence[int]) -> None:
        """Adds blocks that the draft model has filled."""
        self._on_device.update(block_ids)

    def discard(self, block_ids: Sequence[int]) -> None:
        """Removes blocks that get other tokens."""
        self._on_device.difference_update(block_ids)

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Follows the contents of blocks, see `SchedulerOutput.block_moves`."""
        pools = {
            MoveKind.COPY: (self._on_device, self._on_device),
            MoveKind.SWAP_OUT: (self._on_device, self._in_cpu_memory),
            MoveKind.SWAP_IN: (self._in_cpu_memory, self._on_device),
        }
        for kind, source, target in moves:
            sources, targets = pools[MoveKind(kind)]
            if source in sources:
                targets.add(target)
            else:
                targets.discard(target)

    def count_first(self, block_ids: Sequence[int]) -> int:
        """How many of the first of these blocks there are."""
        return next((index for index, one in enumerate(block_ids) if one not in self._on_device), len(block_ids))


class DraftModelProposer(ChainProposer):
    """Proposes what a draft model would generate.

    Vocabularies of one family may be padded to different sizes; what is added has no text.

    Args:
        drafter: see `ChainProposer`.
        batch: see there.
        sampler: see there.
        vocab_size: of the target.
        own_vocab_size: of the draft model.
        most_tokens: of a pass; what a row lacks beyond it is computed after later steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        batch: InputBatch,
        sampler: Sampler,
        vocab_size: int,
        own_vocab_size: int,
        most_tokens: int,
    ) -> None:
        super().__init__(drafter, batch, sampler)
        self._vocab_size = vocab_size
        if own_vocab_size < vocab_size:
            self._last_id = own_vocab_size - 1
        self._most_tokens = most_tokens
        # [M] int64, host: tokens whose KV the draft model has computed, and full blocks that `_blocks` has of them
        self._num_computed = np.zeros(len(batch.num_tokens), np.int64)
        self._num_blocks = np.zeros_like(self._num_computed)
        self._blocks = ComputedBlocks()

    def apply(self, step: SchedulerOutput) -> None:
        """New rows have what is cached of them, as far as the draft model has computed it."""
        block_size = self._batch.block_size
        self._blocks.move(step.block_moves)
        for row in step.new_rows:
            num_cached = row.num_computed_tokens // block_size
            num_blocks = self._blocks.count_first(row.block_ids[:num_cached])
            self._blocks.discard(row.block_ids[num_cached:])
            self._num_blocks[row.slot], self._num_computed[row.slot] = num_blocks, num_blocks * block_size
        if step.forks:
            targets, sources, _ = np.array(step.forks, np.int64).T
            self._num_computed[targets] = self._num_computed[sources]
            self._num_blocks[targets] = self._num_blocks[sources]
        for _, block_ids in step.new_blocks:
            self._blocks.discard(block_ids)

    def _catch_up(self, step: ComputedStep) -> tuple[Int64Array, torch.Tensor] | None:
        batch, slots = self._batch, step.slots
        num_tokens = batch.num_tokens[slots]
        # KV of a rejected draft is that of another token
        starts = np.minimum(self._num_computed[slots], num_tokens - 1)
        self._num_computed[slots] = starts
        if step.max_drafts == 0:
            return None
        is_sampling = self._place_of[slots] >= 0
        # the target has computed all tokens of a row that samples but the last
        ends = np.where(is_sampling, num_tokens, batch.num_computed_tokens[slots])
        ends = np.minimum(ends, np.minimum(batch.num_blocks[slots] * batch.block_size, self._drafter.max_model_len))
        missing = np.flatnonzero((ends > starts) & batch.may_draft[slots])
        if len(missing) == 0:
            return None
        slots, starts, ends = slots[missing], starts[missing], ends[missing]
        counts = ends - starts
        # a row that has not drafted for long lacks as much as a prompt, or more
        counts = np.minimum(counts, self._most_tokens - (np.cumsum(counts) - counts))
        if counts[-1] <= 0:
            kept = counts > 0
            slots, starts, ends, counts = slots[kept], starts[kept], ends[kept], counts[kept]
        self._note_computed(slots, starts + counts)
        hidden = self._compute(slots, starts, counts, None)
        if starts[-1] + counts[-1] == ends[-1]:
            return slots, hidden
        # all but the last row lack nothing now
        return slots[:-1], hidden[:-1]

    def _note_computed(self, slots: Int64Array, ends: Int64Array) -> None:
        """Notes that the draft model has computed rows up to some tokens of them."""
        self._num_computed[slots] = ends
        num_blocks = ends // self._batch.block_size
        for index in np.flatnonzero(num_blocks > self._num_blocks[slots]):
            # one iteration per row that has filled a block
            slot, count = slots[index], num_blocks[index]
            self._blocks.add(self._batch.block_table[slot, self._num_blocks[slot] : count].tolist())
            self._num_blocks[slot] = count

    def _note_passes(self, slots: Int64Array, num_tokens: Int64Array) -> None:
        self._num_computed[slots] = num_tokens

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `ChainProposer`; what the draft model does not have is never drafted."""
        logits = super()._logits(hidden)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits if missing == 0 else logits[:, : self._vocab_size].contiguous()


def make_draft_model(config: EngineConfig, _target: CausalLM, context: BuildContext) -> DraftingModel:
    """Loads the draft model; see `METHODS`."""
    assert config.speculation is not None
    assert config.speculation.draft is not None
    own, draft = draft_context(context, config.cache.scale_dtype), config.speculation.draft
    length = min(draft.max_model_len, config.model.max_model_len)
    sizes = config.model.vocab_size, draft.vocab_size, config.scheduler.max_num_batched_tokens
    return DraftingModel(
        config,
        load_draft(config, own, length),
        own,
        length,
        lambda drafter, batch, sampler: DraftModelProposer(drafter, batch, sampler, *sizes),
    )
