"""Messages between the engine core and its workers, once a step.

A step is a *diff*: from admission to its end or preemption a row has a *slot* (0 … max_num_seqs-1), chosen by the
core. The worker keeps the row's state there (token ids, block table, sampling parameters, number of computed tokens)
and appends the tokens it samples itself, so that a running row costs the core two integers a step. Workers of
pipeline stages that do not sample are sent the tokens.

A row may compute drafts after its last known token. It samples at the position of each, as if the drafts before it
had been sampled, and accepts drafts up to the first that differs from the token sampled in its place. KV after that
is void, and written again.

Letters: R rows scheduled in a step, S rows that sample in a step, K number of log-probabilities, N steps, or most
places at which a row samples, V vocabulary, G constrained rows.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import numpy as np

from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.sampling_params import SamplingParams

# a row's length when nothing limits it
UNLIMITED = 1 << 31
# sampled id of a row all of whose tokens are forbidden
NO_TOKEN = -1
# sampled id at positions after a rejected draft
REJECTED_TOKEN = -2
# pads the sampled ids of a row that samples at fewer than N positions
PADDING_TOKEN = -3
# fills up the drafts of a row that has fewer than others
NO_DRAFT = -1
# name of the row state (`NewRow.state`) that has the slot of the row's LoRA adapter
ADAPTER_SLOT = "adapter_slot"


class MoveKind(enum.IntEnum):
    """Source and target pool of a block copy."""

    # device to device: a shared block gets a copy that its new owner may write
    COPY = 0
    # device to CPU pool
    SWAP_OUT = 1
    # CPU pool to device
    SWAP_IN = 2


class KVCacheSize(msgspec.Struct, array_like=True, frozen=True):
    """Numbers of KV blocks."""

    # on the device
    num_blocks: int
    # in CPU memory, for preempted rows; 0: there is no swapping
    num_cpu_blocks: int = 0


class NewRow(msgspec.Struct, array_like=True, gc=False):
    """A request that enters a slot: new, or resumed after a preemption."""

    slot: int
    request_id: str
    # prompt, and what was generated before a preemption
    token_ids: list[int]
    num_prompt_tokens: int
    # tokens whose KV is in the cache already (a cached prefix, a forked or a swapped row); the row computes from here
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    # key of the row's counter-based random stream, 0 … 2**63-1: the request's own seed, or one the core drew
    seed: int
    # ids that end the sequence; the sampler forbids them while fewer than min_tokens are generated
    stop_token_ids: list[int]
    # tokens at which the sequence ends whatever they are; several steps at once do not go on behind them
    max_num_tokens: int = UNLIMITED
    # prompt tokens, counted from the first, whose log-probabilities are not needed (any more); the first has none
    num_prompt_logprobs: int = 0
    # sequences that the output must not contain, each of one token or more
    bad_words: list[list[int]] = []
    # set: nothing is sampled, the prompt's hidden states are pooled
    pooling_params: PoolingParams | None = None
    # values that step state is filled with (layers/step_state.py), by name: numbers, or lists of them
    state: dict[str, Any] = {}
    # its tokens are read for drafts of later ones
    may_draft: bool = True


class SchedulerOutput(msgspec.Struct, array_like=True, gc=False):
    """One step for the workers.

    Applied in this order: sampled, freed_slots, block_moves, new_rows, forks, new_blocks, replaced_blocks; then the
    rows compute.
    """

    step_id: int
    # slots whose rows ended or were preempted since the last step; their contents are void
    freed_slots: list[int]
    new_rows: list[NewRow]
    # [R] slots that compute in this step
    slots: list[int]
    # [R] tokens each of them computes, starting at its num_computed_tokens; drafts among them. The row samples if
    # this reaches its last known token.
    num_scheduled_tokens: list[int]
    # block ids appended to rows that were in their slot before: (slot, ids)
    new_blocks: list[tuple[int, list[int]]]
    # forward steps to run with sampled ids fed back on the device (multi-step decoding). Above 1 every row of the
    # step misses one token, and blocks are there for as many more as its max_num_tokens leaves it.
    num_steps: int = 1
    # contents to copy before anything is computed: (MoveKind, source block, target block), strictly in this order,
    # since a later move may overwrite the source of an earlier one
    block_moves: list[tuple[int, int, int]] = []
    # blocks put in the place of others: (slot, index in the row's block table, block id)
    replaced_blocks: list[tuple[int, int, int]] = []
    # (slot, source slot, token): the row in `slot` becomes a copy of the one in `source slot` up to its computed
    # tokens (parameters, blocks, everything), followed by this token instead of what it sampled last (beam search).
    # The source may be the slot itself; if it is another one, that one is forked from itself in the same step.
    forks: list[tuple[int, int, int]] = []
    # [G] slots of sampling rows whose next token is constrained, and once more for each of their drafts, in order;
    # there are none with num_steps above 1
    constrained_slots: list[int] = []
    # [G, ceil(V / 32)] int32: of each of them the tokens it may get; bit t % 32 of word t // 32 is token t's.
    # None if there are none.
    bitmask: np.ndarray | None = None
    # (slot, token): what running rows have sampled since the last step, for stages that do not sample. Beam searches
    # are not among them: their tokens come with `forks`. Empty without pipeline stages.
    sampled: list[tuple[int, int]] = []
    # (slot, tokens): drafts of rows that miss one token, all of which they compute in this step; there are none with
    # num_steps above 1
    drafts: list[tuple[int, list[int]]] = []
    # most drafts that are wanted of each row that samples, for the next step
    max_drafts: int = 0


class StepLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of the sampled tokens; rows that asked for none hold padding."""

    # [S, N, 1+K] int32: the sampled token, then the K most likely ones, best first
    token_ids: np.ndarray
    # [S, N, 1+K] float32
    logprobs: np.ndarray
    # [S, N] int32: 1 + number of vocabulary entries more likely than the sampled token
    ranks: np.ndarray


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of P consecutive prompt tokens of a row, each given those before it."""

    slot: int
    # index of the first of them in the prompt, 1 or more
    start: int
    # [P, 1+K] int32: the prompt's token, then the K most likely ones, best first
    token_ids: np.ndarray
    # [P, 1+K] float32
    logprobs: np.ndarray
    # [P] int32: 1 + number of vocabulary entries more likely than the prompt's token
    ranks: np.ndarray


class RowResult(msgspec.Struct, array_like=True, gc=False):
    """The result of a row that samples nothing."""

    slot: int
    # float32. Of a pooler [D] of the prompt, or [P, D] of each of its P tokens
    data: np.ndarray


class StepOutput(msgspec.Struct, array_like=True, gc=False):
    """One step's output, from one rank."""

    step_id: int
    # [S] int32: the slots that sampled, in the order of SchedulerOutput.slots
    slots: np.ndarray
    # [S, N] int64: sampled ids; those after the one that ends a row are void. NO_TOKEN where nothing is left to
    # sample, which ends the row. Of a row with drafts REJECTED_TOKEN in the places behind a wrong one; at the end of
    # rows that sample at fewer than N places PADDING_TOKEN.
    sampled_token_ids: np.ndarray
    # None when no sampling row asked for log-probabilities
    logprobs: StepLogprobs | None = None
    # of the rows that asked for them and computed a part of their prompt
    prompt_logprobs: list[PromptLogprobs] = []
    # of the rows that are done without sampling; they are not among `slots`
    results: list[RowResult] = []
    # [S, k] int32: drafts of the tokens that each row may sample next, filled up with NO_DRAFT; None: there are none
    drafts: np.ndarray | None = None
    # seconds that proposing them took, and reading for later ones
    draft_s: float = 0.0
    # of these, what reading tokens took that were known before: prompts, and what was decoded without drafts
    read_s: float = 0.0
