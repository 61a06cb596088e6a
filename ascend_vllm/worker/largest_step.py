"""The largest possible step, to measure the memory that steps need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ascend_vllm.attention.backend import NO_STATE
from ascend_vllm.config.scheduler import SchedulerConfig
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NewRow, SchedulerOutput

# the parameters for which the sampler needs most memory
_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1)


def make_largest_step(
    config: SchedulerConfig, block_size: int, *, pools: bool, state: Mapping[str, Any] = NO_STATE
) -> SchedulerOutput:
    """A step in which all slots get a row, and as few prompts as possible use the token budget, in blocks 0, 1, …

    Args:
        config: limits of the tokens and sequences of a step, and of the length of a sequence.
        block_size: tokens of a KV block.
        pools: it is a pooling model.
        state: of the rows, with which layers compute most.
    """
    missing = min(config.max_num_batched_tokens, config.max_num_seqs * config.max_model_len)
    step = SchedulerOutput(-1, [], [], [], [], [])
    num_blocks = 0
    for slot in range(config.max_num_seqs):
        length = min(missing, config.max_model_len)
        missing -= length
        # rows without scheduled tokens have a token and parameters, too, since they sample
        blocks = list(range(num_blocks, num_blocks + math.ceil(length / block_size)))
        num_blocks += len(blocks)
        row = NewRow(slot, f"largest-{slot}", [0] * max(1, length), max(1, length), 0, blocks, _SAMPLING, slot, [])
        row.state = dict(state)
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
