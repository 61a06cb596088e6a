"""`ops.sampling` on Ascend NPUs, computed in float32.

Letters: S sampling rows, V vocabulary, G masks.
"""

from __future__ import annotations

import functools

import torch

# the largest k that npu_top_k_top_p takes
_MAX_TOP_K = 1024


@functools.cache
def _word_bits(device: torch.device) -> torch.Tensor:
    """[32] int32: 1 << 0 … 1 << 31."""
    return torch.tensor([1 << place for place in range(31)] + [-(1 << 31)], dtype=torch.int32).to(device)


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    # bitwise and, since CANN's current operators have no shifts
    forbidden = (bitmask[:, :, None] & _word_bits(logits.device)).eq(0).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(forbidden, -torch.inf)


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniforms: torch.Tensor,
    largest_top_k: int,
    has_top_p: bool,
) -> torch.Tensor:
    greedy = logits.argmax(-1)
    if logits.shape[0] == 0:
        return greedy
    x = logits.float()
    largest = x.gather(-1, greedy[:, None])
    random = (temperature > 0) & largest[:, 0].isfinite()
    divisor = torch.where(temperature > 0, temperature, 1.0)[:, None]
    z = torch.where(random[:, None], (x - largest) / divisor, 0.0)
    z = z.masked_fill(z < min_p.log()[:, None], -torch.inf)
    z = _filter(z, top_k, top_p, largest_top_k, has_top_p)
    weights = z.exp()
    cumulative = weights.cumsum(-1)
    # the first token whose cumulative sum exceeds the target; weights of 0 are excluded whatever the rounding
    inside = (cumulative > uniforms[:, None] * cumulative[:, -1:]) & (weights > 0)
    return torch.where(random, inside.float().argmax(-1), greedy)


def _filter(
    z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_top_k: int, has_top_p: bool
) -> torch.Tensor:
    """[S, V] float32 with -inf for the tokens that top-k and top-p drop."""
    vocab_size = z.shape[1]
    k = None
    if largest_top_k > 0:
        k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).int()
        if min(largest_top_k, vocab_size) > _MAX_TOP_K:
            kth = z.sort(-1, descending=True).values.gather(-1, k.long()[:, None] - 1)
            z, k = z.masked_fill(z < kth, -torch.inf), None
    if k is None and not has_top_p:
        return z
    kept = torch.ops.npu.npu_top_k_top_p(z, top_p if has_top_p else None, k)
    # the operator may drop some of several equal logits; here all ties with the last one kept stay
    last = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1, keepdim=True)
    return z.masked_fill(z < last, -torch.inf)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    ids = token_ids[:, None]
    own = logprobs.gather(-1, ids)
    # a stable sort would sort the whole vocabulary
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return torch.cat((ids, top.indices), -1), torch.cat((own, top.values), -1), (logprobs > own).sum(-1) + 1
