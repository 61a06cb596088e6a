"""Log-probabilities that are returned to clients.

Letters: S rows, A rows that requested them, V vocabulary, K most likely tokens reported, N forward passes of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.ops.sampling import token_logprobs
from ascend_vllm.types.step import StepLogprobs
from ascend_vllm.worker.sampling.columns import Int64Array


def filtered_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Logits of the distribution a token is drawn from: after temperature, min_p, top-k and top-p.

    Args:
        logits: [S, V] float32, with biases, masks and penalties applied.
        temperature: [S] float32; 0 leaves the logits unchanged, since greedy rows have no temperature.
        top_k: [S] int32; 0 or less is off.
        top_p: [S] float32; 1 is off.
        min_p: [S] float32; 0 is off.

    Returns:
        [S, V] float32, -inf for tokens that are filtered out. Tokens as likely as the last kept one are kept, too.
    """
    logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    best = logits.max(-1, keepdim=True).values
    logits = logits.masked_fill(logits < best + min_p.log()[:, None], -torch.inf)
    ordered = logits.sort(-1, descending=True).values
    vocab_size = logits.shape[-1]
    num_kept = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    in_top_k = torch.arange(vocab_size, device=logits.device) < num_kept[:, None]
    ordered = ordered.masked_fill(~in_top_k, -torch.inf)
    # a token is kept if those before it do not reach top_p: the smallest set that reaches it
    probs = ordered.softmax(-1)
    in_top_p = (probs.cumsum(-1) - probs < top_p[:, None]) | (top_p >= 1)[:, None]
    last = (in_top_p & (ordered > -torch.inf)).sum(-1, keepdim=True) - 1
    threshold = ordered.gather(-1, last.clamp(min=0))
    return logits.masked_fill(logits < threshold, -torch.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probabilities of the tokens that a forward pass sampled, on the device."""

    # [A, 1+K] int64: the sampled token, then the K most likely ones
    token_ids: torch.Tensor
    # [A, 1+K] float32
    logprobs: torch.Tensor
    # [A] int64
    ranks: torch.Tensor


def report(logits: torch.Tensor, sampled: torch.Tensor, num_logprobs: int, *, reports_logits: bool) -> LogprobTensors:
    """Looks up the sampled tokens and the most likely ones.

    Args:
        logits: [A, V] float.
        sampled: [A] int64, the sampled ids.
        num_logprobs: the largest number that any row requested; K is V if that is less.
        reports_logits: report logits instead of log-probabilities.
    """
    if not reports_logits:
        return LogprobTensors(*token_logprobs(logits, sampled, num_logprobs))
    logits = logits.float()
    ids = sampled[:, None]
    own = logits.gather(-1, ids)
    top = logits.topk(min(num_logprobs, logits.shape[-1]), dim=-1)
    return LogprobTensors(
        token_ids=torch.cat((ids, top.indices), -1),
        logprobs=torch.cat((own, top.values), -1),
        ranks=(logits > own).sum(-1) + 1,
    )


def by_place(logprobs: StepLogprobs, num_places: Int64Array) -> StepLogprobs:
    """Reshapes reports of P positions, [P, 1, …], to rows, [S, N, …]; `num_places`, [S], is the positions per row."""
    has_place = np.arange(num_places.max()) < num_places[:, None]

    def spread(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        spread = np.zeros((*has_place.shape, *column.shape[2:]), column.dtype)
        spread[has_place] = column[:, 0]
        return spread

    return StepLogprobs(spread(logprobs.token_ids), spread(logprobs.logprobs), spread(logprobs.ranks))


def collect(
    passes: Sequence[tuple[Int64Array, LogprobTensors | None]], num_rows: int, num_steps: int
) -> StepLogprobs | None:
    """Copies the reports of a step's forward passes to the host.

    Args:
        passes: of each, the indices of the reported rows in the step, and the report.
        num_rows: S, all sampling rows; those without a request get zeros.
        num_steps: N, at least the number of passes; passes that were not needed are zeros.

    Returns:
        None if no pass has a report.
    """
    reports = [(step, rows, found) for step, (rows, found) in enumerate(passes) if found is not None]
    if not reports:
        return None
    width = max(found.token_ids.shape[1] for _, _, found in reports)
    result = StepLogprobs(
        token_ids=np.zeros((num_rows, num_steps, width), np.int32),
        logprobs=np.zeros((num_rows, num_steps, width), np.float32),
        ranks=np.zeros((num_rows, num_steps), np.int32),
    )
    for step, rows, found in reports:
        columns = slice(found.token_ids.shape[1])
        result.token_ids[rows, step, columns] = found.token_ids.cpu().numpy()
        result.logprobs[rows, step, columns] = found.logprobs.cpu().numpy()
        result.ranks[rows, step] = found.ranks.cpu().numpy()
    return result
