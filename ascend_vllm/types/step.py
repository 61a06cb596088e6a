"""What crosses between the engine core and its workers, once a step.

A step is a *diff*: a row lives in a *slot* (0 … max_num_seqs-1) chosen by the core from admission to
its end or preemption. The worker keeps everything about the row there (token ids, block table, sampling
parameters, number of computed tokens) and appends the tokens it samples itself, so that a running row costs
the core two integers a step.

Letters: R rows scheduled in a step, S rows that sample in a step, K number of log-probabilities, N steps.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ascend_vllm.sampling_params import SamplingParams


class NewRow(msgspec.Struct, array_like=True, gc=False):
    """A request that enters a slot: new, or resumed after a preemption."""

    slot: int
    request_id: str
    # prompt, and what was generated before a preemption
    token_ids: list[int]
    num_prompt_tokens: int
    # tokens whose KV is in the cache already (a cached prefix); the row computes from here
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    # key of the row's counter-based random stream, 0 … 2**63-1: the request's own seed, or one the core drew
    seed: int
    # ids that end the sequence; the sampler forbids them while fewer than min_tokens are generated
    stop_token_ids: list[int]


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """One step for the workers. Applied in the order of the fields."""

    step_id: int
    # slots whose rows ended or were preempted since the last step; their contents are void
    freed_slots: list[int]
    new_rows: list[NewRow]
    # [R] slots that compute in this step
    slots: list[int]
    # [R] tokens each of them computes, starting at its num_computed_tokens. The row samples if this
    # reaches its last known token.
    num_scheduled_tokens: list[int]
    # block ids appended to rows that were in their slot before: (slot, ids)
    new_blocks: list[tuple[int, list[int]]]
    # forward steps to run with sampled ids fed back on the device (multi-step decoding)
    num_steps: int = 1

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the first forward step."""
        return sum(self.num_scheduled_tokens)


class StepLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of the sampled tokens; rows that asked for none hold padding."""

    # [S, 1+K] int32: the sampled token, then the K most likely ones, best first
    token_ids: np.ndarray
    # [S, 1+K] float32
    logprobs: np.ndarray
    # [S] int32: 1 + number of vocabulary entries more likely than the sampled token
    ranks: np.ndarray


class StepOutput(msgspec.Struct, array_like=True, gc=False):
    """What a step gives back, from one rank."""

    step_id: int
    # [S] int32: the slots that sampled, in the order of SchedulerOutput.slots
    slots: np.ndarray
    # [S, N] int64: sampled ids
    sampled_token_ids: np.ndarray
    # None when no sampling row asked for log-probabilities (N is 1 otherwise)
    logprobs: StepLogprobs | None = None
