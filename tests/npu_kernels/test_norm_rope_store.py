"""norm_rope_store against norms, rotation and the write one after another, in float64."""

from __future__ import annotations

import pytest
import torch

from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.registry import OPS
from tests.npu_kernels.conftest import Kernels

TYPES = {torch.float16: 0, torch.bfloat16: 1}
import_op_modules()
EPSILON = 1e-6

# tokens, query heads, KV heads, head size, rotated elements, cores
CASES = [
    (1, 1, 1, 16, 16, 1),
    (3, 4, 2, 64, 64, 2),
    (5, 32, 8, 128, 128, 3),
    (4, 7, 1, 96, 96, 4),
    (6, 9, 3, 80, 32, 1),
    (2, 8, 4, 256, 256, 2),
    (9, 64, 8, 128, 64, 40),
]


def reference(
    parts: list[torch.Tensor],
    weights: list[torch.Tensor],
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    norms: bool,
) -> list[torch.Tensor]:
    """Query and key, [T, heads, D], by the references of the ops."""
    size = parts[0].shape[2]
    if norms:
        parts = [
            OPS["rms_norm"].reference(part, weight, EPSILON) for part, weight in zip(parts, weights, strict=True)
        ]
    rotated = [part.clone().flatten(1) for part in parts]
    OPS["rotary_embedding"].reference(positions, *rotated, size, table, True)
    return [part.view(part.shape[0], -1, size) for part in rotated]


@pytest.mark.parametrize("norms", [True, False], ids=["norms", "no norms"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(
    kernels: Kernels, case: tuple[int, int, int, int, int, int], dtype: torch.dtype, norms: bool
) -> None:
    tokens, heads, kv_heads, size, rotated, cores = case
    generator = torch.Generator().manual_seed(tokens)
    # as a fused projection leaves them
    qkv = (torch.randn(tokens, (heads + 2 * kv_heads) * size, generator=generator) * 3).to(dtype)
    widths = [heads * size, kv_heads * size, kv_heads * size]
    query, key, value = (part.view(tokens, -1, size) for part in qkv.split(widths, dim=1))
    weights = [(torch.rand(size, generator=generator) + 0.5).to(dtype) for _ in range(2)]
    angles = torch.rand(50, rotated // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 50, (tokens,), generator=generator)
    slots = torch.randperm(2 * 64, generator=generator)[:tokens]
    slots[tokens // 2] = -1
    caches = [torch.full((2, 64, kv_heads, size), 7.0, dtype=dtype) for _ in range(2)]
    output, keys, values = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    output, keys, values = (part.contiguous() for part in (output, keys, values))
    stride = qkv.stride(0)
    numbers = (TYPES[dtype], tokens, heads, kv_heads, size, rotated, stride, stride, stride, norms, 1)
    work = kernels.run(
        "norm_rope_store",
        (query, key, value, *weights, positions, table, slots),
        (output, *caches, keys, values),
        numbers,
        reals=(EPSILON,),
        cores=cores,
    )
    plain = reference([query, key], weights, positions, table, norms=norms)
    wide = [weight.double() for weight in weights]
    exact = reference([query.double(), key.double()], wide, positions, table.double(), norms=norms)
    for got, by_ops, truth in zip((output, keys), plain, exact, strict=True):
        allowed = 2 * (by_ops.double() - truth).abs().max()
        assert (got.double() - truth).abs().max() <= allowed
    assert torch.equal(values, value)
    for cache, new in zip(caches, (keys, value), strict=True):
        expected = torch.full_like(cache, 7.0).flatten(0, 1)
        expected[slots[slots >= 0]] = new[slots >= 0]
        assert torch.equal(cache.flatten(0, 1), expected)
    # each element is read once and written once, but for what is kept beside the cache
    element = qkv.element_size()
    assert work.bytes_in <= qkv.numel() * element + tokens * rotated * 4 + 2 * cores * size * element
    assert work.bytes_out <= (qkv.numel() + 2 * key.numel()) * element


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({4: 24}, "head_size: 24 is not a multiple of 16 from 16 to 256"),
        ({5: 24}, "rotated: 24 is not a multiple of 16 from 16 to the head size"),
        ({6: 63}, "query_stride: tokens overlap"),
        ({2: 128, 4: 128, 6: 128 * 128, 7: 128, 8: 128}, "heads: a token's heads do not fit into the unified buffer"),
    ],
)
def test_arguments_are_checked(kernels: Kernels, changed: dict[int, int], message: str) -> None:
    numbers = dict(enumerate((0, 1, 1, 1, 64, 64, 64, 64, 64, 1, 0))) | changed
    with pytest.raises(ValueError, match=message):
        kernels.run(
            "norm_rope_store", (torch.zeros(1),) * 8, (torch.zeros(1),) * 5, list(numbers.values()), reals=(0,)
        )
