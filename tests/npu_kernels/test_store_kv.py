"""store_kv against the op's reference, bit by bit."""

from __future__ import annotations

import pytest
import torch

from ascend_vllm.ops.paged import store_kv
from tests.npu_kernels.conftest import Kernels
from tests.npu_kernels.layouts import BLOCK_TOKEN_HEAD, LAYOUTS, from_reference, to_reference

# tokens, KV heads, head size, block size, blocks, share of skipped tokens, cores
CASES = [
    (1, 1, 64, 64, 1, 0.0, 1),
    (1, 2, 80, 64, 2, 1.0, 4),
    (7, 3, 80, 64, 2, 0.3, 2),
    (65, 2, 96, 128, 2, 0.0, 3),
    (130, 8, 128, 128, 3, 0.2, 40),
    (50, 1, 192, 128, 1, 0.5, 7),
    (90, 2, 256, 64, 4, 0.1, 2),
    *((5, 2, size, 64, 1, 0.2, 2) for size in range(16, 257, 16)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_matches_reference(kernels: Kernels, case: tuple[int, int, int, int, int, float, int], layout: int) -> None:
    tokens, heads, size, block_size, blocks, skipped, cores = case
    generator = torch.Generator().manual_seed(tokens)
    # as a fused projection leaves them: tokens of key and value lie apart
    qkv = torch.randn(tokens, 3 * heads * size, generator=generator).to(torch.bfloat16)
    _, key, value = (part.view(tokens, heads, size) for part in qkv.chunk(3, dim=-1))
    cache = torch.randn(2, blocks, heads, block_size, size, generator=generator).to(torch.bfloat16)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < skipped] = -1
    written = [from_reference(half, layout) for half in cache]
    store_kv(key, value, cache[0], cache[1], slots)
    numbers = (tokens, heads, size, block_size, key.stride(0), value.stride(0), layout)
    kernels.run("store_kv", (key, value, slots), written, numbers, cores=cores)
    for half, expected in zip(written, cache, strict=True):
        assert torch.equal(to_reference(half, layout, heads), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({2: 24}, "head_size: 24 is not a multiple of 16 from 16 to 256"),
        ({4: 63}, "key_stride: tokens overlap"),
        ({1: 0}, "kv_heads: 0 is not in 1 … 1024"),
        ({1: 1024, 2: 256, 4: 1 << 20, 5: 1 << 20}, "kv_heads: a token's heads do not fit into the unified buffer"),
    ],
)
def test_arguments_are_checked(kernels: Kernels, changed: dict[int, int], message: str) -> None:
    numbers = [1, 1, 64, 64, 64, 64, BLOCK_TOKEN_HEAD]
    for index, number in changed.items():
        numbers[index] = number
    with pytest.raises(ValueError, match=message):
        kernels.run("store_kv", (), (), numbers)


def test_slots_beyond_the_cache_are_noticed(kernels: Kernels) -> None:
    key = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    caches = torch.zeros(2, 1, 64, 1, 64, dtype=torch.bfloat16).unbind(0)
    caches = [cache.clone() for cache in caches]
    with pytest.raises(ValueError, match="outside of the global memory"):
        kernels.run(
            "store_kv", (key, key.clone(), torch.tensor([64])), caches, (1, 1, 64, 64, 64, 64, BLOCK_TOKEN_HEAD)
        )
