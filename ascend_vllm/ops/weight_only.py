"""Products of a weight in 8 or 4 bits as NPUs keep it, and inputs that are not rounded.

Letters: T tokens, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ascend_vllm.ops.registry import define_op

# values of 4 bits in a word of a packed weight
PACKED = 8


def unpack_int4(words: torch.Tensor) -> torch.Tensor:
    """words [..., W] int32, lowest bits first → [..., 8 * W] int8, each -8 ... 7."""
    shifts = torch.arange(0, 32, 32 // PACKED, dtype=torch.int32, device=words.device)
    nibbles = torch.bitwise_and(torch.bitwise_right_shift(words.unsqueeze(-1), shifts), 15)
    return ((nibbles + 8) % 16 - 8).to(torch.int8).flatten(-2)


def _linear_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows, inputs, outputs, group (0: none)
    for seed, (rows, inputs, outputs, group) in enumerate(
        [(0, 32, 16, 0), (1, 64, 24, 32), (5, 96, 48, 64), (3, 33, 8, 0)]
    ):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        shape = (-(-inputs // group) if group else 1, outputs)
        bias = torch.randn(outputs, generator=generator) if seed % 2 else None
        # see `bias` below
        bias = bias if bias is None or dtype == torch.bfloat16 else bias.to(dtype)
        for bits in (4, 8):
            values = torch.randint(2**bits, (inputs, outputs), generator=generator) - 2 ** (bits - 1)
            weight = values.to(torch.int8)
            if bits == 4:
                shifts = torch.arange(0, 32, 4)
                weight = ((values & 15).view(inputs, -1, PACKED) << shifts).sum(-1).to(torch.int32)
            scales = (0.5 + torch.rand(shape, generator=generator)) / (2**bits * 0.3 * math.sqrt(inputs))
            offsets = torch.randint(-3, 4, shape, generator=generator).to(dtype) if seed % 2 == 0 else None
            yield x, weight, scales.to(dtype), offsets, bias, group


@define_op(inputs=_linear_inputs, dtypes=(torch.float16, torch.bfloat16), devices=("npu",))
def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """`x @ ((weight + offsets) * scales) + bias`.

    Args:
        x: [T, K].
        weight: [K, N] int8, perhaps a transposed view; or [K, N / 8] int32 of values of 4 bits, see `unpack_int4`.
        scales: [G, N], dtype of x.
        offsets: [G, N], dtype of x, or None.
        bias: [N], float32 for x in bfloat16, otherwise dtype of x; or None.
        group_size: inputs of a group, 0 if all are one.

    Returns:
        [T, N], contiguous, dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = (unpack_int4(weight) if weight.dtype == torch.int32 else weight).to(wide)
    size = group_size or len(values)
    if offsets is not None:
        values = values + offsets.to(wide).repeat_interleave(size, 0)[: len(values)]
    result = x.to(wide) @ (values * scales.to(wide).repeat_interleave(size, 0)[: len(values)])
    return (result if bias is None else result + bias.to(wide)).to(x.dtype)
