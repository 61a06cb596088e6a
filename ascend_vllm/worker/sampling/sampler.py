"""From logits to token ids.

Order of application (vLLM's): the raw logits of rows that request log-probabilities are kept; then constraints,
allowed ids, bad words, min_tokens, logit bias, penalties; then arg-max, or temperature, min_p, top-k, top-p and a
draw. With ``processed_logprobs`` log-probabilities are computed at the end instead. If the masks forbid all tokens of
a row, its token is NO_TOKEN.

Letters: S sampling rows of a step, V vocabulary.
"""

from __future__ import annotations

import dataclasses

import torch

from ascend_vllm.ops.fused_sampling import edit_and_sample
from ascend_vllm.ops.registry import OPS
from ascend_vllm.ops.sampling import apply_penalties, apply_token_bitmask, arg_max, draw_tokens, sample_tokens
from ascend_vllm.types.step import NO_TOKEN
from ascend_vllm.worker.input_batch import InputBatch, Int32Array
from ascend_vllm.worker.sampling.acceptance import TypicalAcceptance
from ascend_vllm.worker.sampling.columns import MASKS, Int64Array, LogitsProcessor
from ascend_vllm.worker.sampling.logprobs import LogprobTensors, filtered_logits, report
from ascend_vllm.worker.sampling.plan import BadWords, FusedStep, History, Planner, SamplingPlan

RAW_LOGPROBS = "raw_logprobs"
PROCESSED_LOGPROBS = "processed_logprobs"
RAW_LOGITS = "raw_logits"
PROCESSED_LOGITS = "processed_logits"


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of each row, on the device."""

    # [S] int64; NO_TOKEN where all are forbidden
    token_ids: torch.Tensor
    # of the rows of `SamplingPlan.asking`; None if there are none
    logprobs: LogprobTensors | None


class Sampler:
    """Samples the next token of each row, without waiting for the device.

    Args:
        batch: the slots; their parameters and tokens so far are read from it.
        logprobs_mode: one of the four above; with the last two, logits are reported instead of log-probabilities.
        device: of the logits.
        host_memory: tensors on the device are in host memory.
        fused: sample by `edit_and_sample`; None: where the device has a kernel for it.
        acceptance: the rule for drafts; None: the exact one, for which `sample` needs to know nothing of drafts.

    Example::

        plan = sampler.plan(slots)
        sampled = sampler.sample(logits, plan, num_tokens)
    """

    def __init__(
        self,
        batch: InputBatch,
        logprobs_mode: str,
        device: torch.device,
        *,
        host_memory: bool = True,
        fused: bool | None = None,
        acceptance: TypicalAcceptance | None = None,
    ) -> None:
        self._batch = batch
        self._acceptance = acceptance
        self._device = device
        self._raw = logprobs_mode in (RAW_LOGPROBS, RAW_LOGITS)
        self._reports_logits = logprobs_mode in (RAW_LOGITS, PROCESSED_LOGITS)
        if fused is None:
            # which does not tell how likely tokens are
            fused = acceptance is None and OPS["edit_and_sample"].has_kernel(device.type)
        self._planner = Planner(batch, device, raw_logprobs=self._raw, host_memory=host_memory, fused=fused)
        # [up to M, V] float32, kept between steps: page faults of new memory would cost more than the arithmetic
        self._float_logits = torch.empty(0)

    def plan(self, slots: Int64Array, num_steps: int = 1, num_tokens: Int64Array | None = None) -> SamplingPlan:
        """Reads the parameters of some slots, see `Planner.make`."""
        return self._planner.make(slots, num_steps, num_tokens)

    def constrain(self, plan: SamplingPlan, rows: Int64Array, bitmask: Int32Array) -> SamplingPlan:
        """A plan for one token, with masks, [G, ceil(V / 32)], for some rows of it, [G]."""
        return self._planner.constrain(plan, rows, bitmask)

    def with_drafts(self, plan: SamplingPlan, slots: Int64Array, num_tokens: Int64Array) -> SamplingPlan:
        """A plan for one token at positions [S] where drafts are to be verified, see `TypicalAcceptance.drafts`."""
        if self._acceptance is None or plan.filters is None:
            return plan
        drafts = self._acceptance.drafts(self._batch, slots, num_tokens, self._device)
        return dataclasses.replace(plan, likely_drafts=drafts)

    def sample(self, logits: torch.Tensor, plan: SamplingPlan, num_tokens: torch.Tensor, number: int = 0) -> Sampled:
        """Draws the next token of each row.

        Args:
            logits: [S, V], any float dtype; may be changed.
            plan: of the rows.
            num_tokens: [S] int64, tokens of each row before the next one.
            number: index of the next token among the plan's tokens.
        """
        if plan.needed == 0:
            return Sampled(arg_max(logits), None)
        scored = _asking_rows(logits, plan) if self._raw and len(plan.asking) else None
        logits = self._edit(logits, plan, num_tokens, keep=scored is logits)
        if not self._raw and len(plan.asking):
            assert plan.filters is not None
            filters = (_asking_rows(column, plan) for column in plan.filters)
            scored = filtered_logits(_asking_rows(logits, plan).float(), *filters)
        if plan.fused is not None:
            ids = _edit_and_sample(logits, plan.fused, num_tokens, NO_TOKEN if plan.needed & MASKS else 0)
        else:
            ids = self._draw(logits, plan, num_tokens, number)
        if plan.likely_drafts is not None and plan.filters is not None:
            ids = plan.likely_drafts.decide(logits, plan.filters, ids)
        reports = None
        if scored is not None:
            reports = report(scored, _asking_rows(ids, plan), plan.num_logprobs, reports_logits=self._reports_logits)
        if plan.needed & MASKS and plan.fused is None:
            ids = ids.masked_fill(logits.gather(1, ids[:, None])[:, 0] == -torch.inf, NO_TOKEN)
        return Sampled(ids, reports)

    def remember(self, plan: SamplingPlan, token_ids: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Adds sampled tokens to the plan's history and counts, before the same plan samples again.

        Args:
            plan: that sampled them.
            token_ids: [S] int64.
            num_tokens: [S] int64, as passed to `sample`.
        """
        if plan.history is not None:
            plan.history.token_ids[plan.history.table_rows, num_tokens] = token_ids.int()
        if plan.fused is not None:
            plan.fused.fresh_ids.copy_(token_ids)

    def _edit(
        self, logits: torch.Tensor, plan: SamplingPlan, num_tokens: torch.Tensor, *, keep: bool
    ) -> torch.Tensor:
        """Applies masks, biases and penalties, in place or to a copy if the logits are kept."""
        # masks are exact in any dtype
        needs_float = plan.bias is not None or plan.penalties is not None or plan.processors is not None
        if (needs_float and logits.dtype != torch.float32) or (keep and plan.edits_logits):
            logits = self._float_copy(logits)
        if plan.processors is not None and plan.history is not None:
            _call_processors(logits, plan.processors, plan.history, num_tokens)
        if plan.constraints is not None:
            apply_token_bitmask(logits, plan.constraints.bitmask, plan.constraints.rows)
        if plan.allowed is not None:
            apply_token_bitmask(logits, plan.allowed.bitmask, plan.allowed.rows)
        if plan.bad_words is not None and plan.history is not None:
            _ban_words(logits, plan.bad_words, plan.history, num_tokens)
        if plan.forbidden is not None:
            index = plan.forbidden.index
            too_short = num_tokens[index[0]] < plan.forbidden.values
            logits[index] = logits[index].masked_fill(too_short, -torch.inf)
        if plan.bias is not None:
            logits[plan.bias.index] += plan.bias.values
        if plan.penalties is not None and plan.history is not None:
            tokens = plan.history.token_ids, plan.history.table_rows, plan.history.prompt_lens, num_tokens.int()
            apply_penalties(logits, *tokens, *plan.penalties)
        return logits

    def _float_copy(self, logits: torch.Tensor) -> torch.Tensor:
        if len(self._float_logits) < len(logits):
            self._float_logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        return self._float_logits[: len(logits)].copy_(logits)

    @staticmethod
    def _draw(logits: torch.Tensor, plan: SamplingPlan, num_tokens: torch.Tensor, number: int) -> torch.Tensor:
        ids: torch.Tensor
        draws = plan.draws
        if plan.filters is not None and draws is not None:
            uniforms = draws.uniforms.select(0, number)
            ids = draw_tokens(logits, *plan.filters, uniforms, draws.largest_top_k, draws.has_top_p)
        elif plan.filters is not None and plan.seeds is not None:
            # keyed by seed and position in the sequence: draws depend neither on other rows of the batch, nor on the
            # chunks of the prompt, nor on preemption
            ids = sample_tokens(logits, *plan.filters, plan.seeds, num_tokens)
        else:
            ids = arg_max(logits)
        return ids


def _edit_and_sample(logits: torch.Tensor, fused: FusedStep, num_tokens: torch.Tensor, nothing: int) -> torch.Tensor:
    counts = fused.counts, fused.count_rows, fused.fresh_ids
    masks = fused.bitmask, fused.mask_rows
    ids: torch.Tensor = edit_and_sample(
        logits, *counts, *fused.penalties, *masks, *fused.filters, fused.seeds, num_tokens, nothing
    )
    return ids


def _call_processors(
    logits: torch.Tensor,
    processors: list[tuple[int, list[LogitsProcessor]]],
    history: History,
    num_tokens: torch.Tensor,
) -> None:
    """Calls logits processors of requests. They take lists of ids, for which the host waits, row by row."""
    for row, functions in processors:
        token_ids = history.token_ids[history.table_rows[row], : num_tokens[row]].tolist()
        prompt_len = int(history.prompt_lens[row])
        processed = logits[row]
        for function in functions:
            processed = function(token_ids[:prompt_len], token_ids[prompt_len:], processed)
        logits[row] = processed


def _ban_words(logits: torch.Tensor, words: BadWords, history: History, num_tokens: torch.Tensor) -> None:
    """Forbids the last token of each sequence if the output ends with the tokens before it."""
    places = num_tokens[words.rows] - words.distances
    tokens = history.token_ids[history.table_rows[words.rows], places.clamp(min=0)]
    misses = (tokens != words.prefixes) | (places < history.prompt_lens[words.rows])
    last = words.index[1]
    # by sequence: without a mismatch only its last token is missing
    num_misses = torch.zeros(len(last), device=logits.device)
    num_misses.index_put_((words.sequences,), misses.float(), accumulate=True)
    banned = num_misses == 0
    # added, since several sequences may end with the same token
    values = torch.zeros(len(last), dtype=logits.dtype, device=logits.device).masked_fill_(banned, -torch.inf)
    logits.index_put_(words.index, values, accumulate=True)


def _asking_rows(tensor: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
    """Rows of a tensor that requested log-probabilities; call it only if there are some."""
    return tensor if plan.asking_index is None else tensor[plan.asking_index]
