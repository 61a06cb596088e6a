"""The largest step there can be, for measuring what memory steps need."""

from __future__ import annotations

import math

from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NewRow, SchedulerOutput

# what a sampler needs most memory for
_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1)


def make_largest_step(config: SchedulerConfig, block_size: int, *, pools: bool) -> SchedulerOutput:
    """All slots enter; as few prompts as possible fill the budget of tokens, in blocks 0, 1, …

    Args:
        config: says how many tokens and sequences a step may have, and how long one may be.
        block_size: tokens of a KV block.
        pools: the model pools.
    """
    missing = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    step = SchedulerOutput(-1, [], [], [], [], [])
    num_blocks = 0
    for slot in range(config.max_num_seqs):
        length = min(missing, config.max_model_len)
        missing -= length
        # a slot that computes nothing has a token and parameters all the same: it samples
        blocks = list(range(num_blocks, num_blocks + math.ceil(length / block_size)))
        num_blocks += len(blocks)
        row = NewRow(slot, f"largest-{slot}", [0] * max(1, length), max(1, length), 0, blocks, _SAMPLING, slot, [])
        if pools:
            row.pooling_params = PoolingParams()
        step.new_rows.append(row)
        if length:
            step.slots.append(slot)
            step.num_scheduled_tokens.append(length)
    return step


def num_blocks_of(step: SchedulerOutput) -> int:
    """KV blocks that the rows of a step have."""
    return sum(len(row.block_ids) for row in step.new_rows)
