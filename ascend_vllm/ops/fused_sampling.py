"""From logits to tokens in one op, for devices whose kernel does it in one launch.

Letters: S sampling rows, V vocabulary, M rows of the table of counts, G masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ascend_vllm.ops.registry import OPS, define_op
from ascend_vllm.ops.sampling import _sample_inputs

# in a table of counts: a token that only the prompt has
ONLY_IN_PROMPT = -1
MAX_COUNT = 2**15 - 1


def _inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for logits, temperature, top_k, top_p, min_p, seeds, positions in _sample_inputs(dtype):
        rows, vocab = logits.shape
        row = torch.arange(rows)
        counts = torch.randint(-4, 5, (rows + 2, vocab), generator=generator).clamp(-1, 3).to(torch.int16)
        counts[:, ::2] = 0
        count_rows = torch.randperm(rows + 2, generator=generator)[:rows]
        fresh = torch.randint(-1, vocab, (rows,), generator=generator)
        bitmask = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=generator).to(torch.int32)
        bitmask[1] = 0
        for edits in (False, True):
            penalties = [
                torch.where(row % 3 == 0, value, off) for value, off in ((1.3, 1.0), (0.5, 0.0), (-0.4, 0.0))
            ]
            yield (
                logits,
                counts.clone(),
                count_rows.where(row % 2 == 0, -1) if edits else torch.full_like(row, -1),
                fresh,
                *penalties,
                bitmask,
                # every fifth row has a mask, every tenth one that forbids all
                torch.where(row % 5 == 0, row % 2, -1) if edits else torch.full_like(row, -1),
                *(temperature, top_k, top_p, min_p, seeds, positions),
                -1,
            )


# only the custom operator for NPUs calls it: other devices sample by an op for each step
@define_op(inputs=_inputs, mutates=("counts",), devices=())
def edit_and_sample(
    logits: torch.Tensor,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    fresh_ids: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    bitmask: torch.Tensor,
    mask_rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    nothing: int,
) -> torch.Tensor:
    """Counts each row's newest token, applies penalties and a mask to its logits, and samples as `sample_tokens`.

    A count is the number of a token in the output, ONLY_IN_PROMPT if only the prompt has it, 0 if nothing has, and
    stays at MAX_COUNT. Penalties are those of `apply_penalties`, masks those of `apply_token_bitmask`.

    Args:
        logits: [S, V] float; rows may be strided. They stay as they are.
        counts: [M, V] int16, updated.
        count_rows: [S] int64, the row of counts of each row, none twice; negative: no penalties.
        fresh_ids: [S] int64, the token to count before sampling; outside [0, V): none.
        repetition: [S] float32; so are the next two.
        bitmask: [G, ceil(V / 32)] int32, or wider.
        mask_rows: [S] int64, the mask of each row; negative: all tokens are allowed.
        temperature, top_k, top_p, min_p, seeds, positions: see `sample_tokens`.
        nothing: the result of a row whose tokens are all forbidden.

    Returns:
        [S] int64.
    """
    vocab = logits.shape[1]
    x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    rows = (count_rows >= 0).nonzero()[:, 0]
    fresh = rows[(fresh_ids[rows] >= 0) & (fresh_ids[rows] < vocab)]
    place = count_rows[fresh], fresh_ids[fresh]
    counts[place] = (counts[place].int().clamp(min=0) + 1).clamp(max=MAX_COUNT).to(counts.dtype)
    of_row = counts[count_rows[rows]].to(x.dtype)
    edited, factor = x[rows], repetition[rows, None]
    edited = torch.where(of_row != 0, torch.where(edited > 0, edited / factor, edited * factor), edited)
    of_row = of_row.clamp(min=0)
    x[rows] = edited - frequency[rows, None] * of_row - presence[rows, None] * (of_row > 0)
    masked = (mask_rows >= 0).nonzero()[:, 0]
    OPS["apply_token_bitmask"].reference(x, bitmask[mask_rows[masked]], masked)
    ids: torch.Tensor = OPS["sample_tokens"].reference(x, temperature, top_k, top_p, min_p, seeds, positions)
    return torch.where((x == -torch.inf).all(-1), nothing, ids)
