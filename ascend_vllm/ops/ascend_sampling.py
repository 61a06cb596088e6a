"""Drawing tokens on Ascend NPUs. The meaning is that of `ops.sampling`; everything is computed in float32.

Letters: S sampling rows, V vocabulary, G masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# the largest k that npu_top_k_top_p takes
_MAX_TOP_K = 1024


@functools.cache
def _bits_of_a_word(device: torch.device) -> torch.Tensor:
    """[32] int32: each has one bit, the last one that of the sign."""
    return torch.tensor([1 << place for place in range(31)] + [-(1 << 31)], dtype=torch.int32).to(device)


def apply_token_bitmask(logits: torch.Tensor, bitmask: torch.Tensor, rows: torch.Tensor) -> None:
    """See `sampling.apply_token_bitmask`."""
    # and, not shifts: there is no operator of the current family for those
    forbidden = (bitmask[:, :, None] & _bits_of_a_word(logits.device)).eq(0).flatten(1)[:, : logits.shape[1]]
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
    """See `sampling.draw_tokens`."""
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
    # the first token in whose part the number lies; one without a part never is, whatever the sums are rounded to
    inside = (cumulative > uniforms[:, None] * cumulative[:, -1:]) & (weights > 0)
    return torch.where(random, inside.float().argmax(-1), greedy)


def _filter(
    z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_top_k: int, has_top_p: bool
) -> torch.Tensor:
    """[S, V] float32 with -inf in the place of what top-k and top-p leave out."""
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
    # the operator cuts through tokens that are equally likely; here all that equal the last one kept stay
    last = kept.masked_fill(kept == -torch.inf, torch.inf).amin(-1, keepdim=True)
    return z.masked_fill(z < last, -torch.inf)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `sampling.token_logprobs`."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    ids = token_ids[:, None]
    own = logprobs.gather(-1, ids)
    # not a sort, which is stable but orders the whole vocabulary
    top = logprobs.topk(min(num_top, logits.shape[1]), dim=-1)
    return torch.cat((ids, top.indices), -1), torch.cat((own, top.values), -1), (logprobs > own).sum(-1) + 1


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "apply_token_bitmask": apply_token_bitmask,
    "draw_tokens": draw_tokens,
    "token_logprobs": token_logprobs,
}
