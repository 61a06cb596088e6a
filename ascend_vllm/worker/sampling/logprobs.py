"""Log-probabilities that go back to the client.

Letters: S rows, V vocabulary, K most likely tokens reported.
"""

from __future__ import annotations

import numpy as np
import torch

from ascend_vllm.types.step import StepLogprobs
from ascend_vllm.worker.ragged import Int64Array


def filtered_logprobs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Log-probabilities of the distribution a token is drawn from: after temperature, min_p, top-k and top-p.

    Args:
        logits: [S, V] float32, with biases, masks and penalties applied.
        temperature: [S] float32; 0 leaves the logits as they are, for a greedy row has no temperature.
        top_k: [S] int32; 0 or less is off.
        top_p: [S] float32; 1 is off.
        min_p: [S] float32; 0 is off.

    Returns:
        [S, V] float32, -inf for tokens that are filtered out. Tokens as likely as the last one kept stay.
    """
    logits = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    best = logits.max(-1, keepdim=True).values
    logits = logits.masked_fill(logits < best + min_p.log()[:, None], -torch.inf)
    ordered = logits.sort(-1, descending=True).values
    vocab_size = logits.shape[-1]
    num_kept = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    in_top_k = torch.arange(vocab_size, device=logits.device) < num_kept[:, None]
    ordered = ordered.masked_fill(~in_top_k, -torch.inf)
    # a token stays if those before it do not reach top_p: the smallest set that reaches it
    probs = ordered.softmax(-1)
    in_top_p = (probs.cumsum(-1) - probs < top_p[:, None]) | (top_p >= 1)[:, None]
    last = (in_top_p & (ordered > -torch.inf)).sum(-1, keepdim=True) - 1
    threshold = ordered.gather(-1, last.clamp(min=0))
    return torch.log_softmax(logits.masked_fill(logits < threshold, -torch.inf), dim=-1)


def report(
    logprobs: torch.Tensor, rows: Int64Array, sampled: torch.Tensor, num_logprobs: int, num_rows: int
) -> StepLogprobs:
    """What a step says of the sampled tokens.

    Args:
        logprobs: [A, V] float32, of the rows that asked.
        rows: [A] which of the step's sampling rows they are.
        sampled: [num_rows] int64, ids drawn by all rows.
        num_logprobs: K, the most any of them asked for.
        num_rows: S, all sampling rows; those that did not ask get zeros.
    """
    ids = sampled[torch.from_numpy(rows).to(sampled.device)][:, None]
    own = logprobs.gather(-1, ids)
    ranks = (logprobs > own).sum(-1) + 1
    top = logprobs.topk(num_logprobs, dim=-1)
    result = StepLogprobs(
        token_ids=np.zeros((num_rows, 1, 1 + num_logprobs), np.int32),
        logprobs=np.zeros((num_rows, 1, 1 + num_logprobs), np.float32),
        ranks=np.zeros((num_rows, 1), np.int32),
    )
    result.token_ids[rows, 0] = torch.cat((ids, top.indices), -1).cpu().numpy()
    result.logprobs[rows, 0] = torch.cat((own, top.values), -1).cpu().numpy()
    result.ranks[rows, 0] = ranks.cpu().numpy()
    return result
