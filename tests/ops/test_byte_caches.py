"""Caches of a byte per number: what is written bit by bit, and what a result does not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_vllm.ops import native
from ascend_vllm.ops.kv_bytes import BYTE_DTYPES, ByteCache, largest_number, own_scales
from ascend_vllm.ops.paged import make_paged_problem, paged_attention, store_kv, with_byte_cache
from ascend_vllm.ops.registry import FLOAT_DTYPES, OPS
from tests.op_checks import is_unchanged

BLOCKS, KV_HEADS, BLOCK_SIZE = 5, 2, 16


@pytest.fixture(params=native.available_cpu_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.cpu_isa()
    native.set_cpu_isa(request.param)
    yield request.param
    if before is not None:
        native.set_cpu_isa(before)


def empty(head_size: int, dtype: torch.dtype, *, has_scales: bool) -> ByteCache:
    width = BLOCK_SIZE * (head_size + 2 * has_scales)
    planes = torch.zeros(2, BLOCKS, KV_HEADS, width, dtype=torch.uint8)
    return ByteCache.over(planes, BLOCK_SIZE, head_size, dtype)


def hard_numbers(tokens: int, head_size: int) -> torch.Tensor:
    """Rows of very different sizes, with zeros, ties and numbers below and above the formats' ranges."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, KV_HEADS, head_size, generator=generator)
    x *= 10.0 ** torch.randint(-6, 6, (tokens, KV_HEADS, 1), generator=generator)
    x[:, :, ::5] = (x[:, :, ::5] * 2).round() / 2
    x[1], x[2, 0, 3] = 0, 1e30
    # what float16 has, too
    return x.clamp(-60_000, 60_000)


@pytest.mark.parametrize("number", FLOAT_DTYPES)
@pytest.mark.parametrize("has_scales", [True, False])
@pytest.mark.parametrize("dtype", BYTE_DTYPES)
def test_every_byte_is_that_of_the_definition(
    isa: str, dtype: torch.dtype, has_scales: bool, number: torch.dtype
) -> None:
    if has_scales and dtype == torch.float8_e5m2:
        pytest.skip("scales of rows are those of E4M3")
    for head_size in (16, 24, 72, 256):
        tokens = 40
        key, value = hard_numbers(tokens, head_size).to(number), hard_numbers(tokens, head_size).flip(0).to(number)
        slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(1))[:tokens]
        scales = (1.0, 1.0) if has_scales else (0.75, 2.5)
        found, expected = (empty(head_size, dtype, has_scales=has_scales) for _ in range(2))
        store_kv(key, value, *found[1:3], slots, *found[3:], *scales)
        OPS["store_kv"].reference(key, value, *expected[1:3], slots, *expected[3:], *scales)
        # -0 is written as 0, which is the same number
        negative_zero = 0 if dtype == torch.int8 else 0x80
        numbers = BLOCK_SIZE * head_size
        for cache in (found, expected):
            cache.planes[..., :numbers].masked_fill_(cache.planes[..., :numbers] == negative_zero, 0)
        assert is_unchanged(found.planes, expected.planes), isa


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_row_with_a_number_that_is_not_finite_has_no_scale(isa: str, dtype: torch.dtype) -> None:
    cache = empty(32, dtype, has_scales=True)
    key = torch.ones(3, KV_HEADS, 32)
    key[0, 0, 7], key[1, 1, 31] = float("inf"), float("nan")
    store_kv(key, key, *cache[1:3], torch.arange(3), *cache[3:])
    assert cache.key_scales is not None
    assert cache.key_scales[0, :, :3].isnan().tolist() == [[True, False, False], [False, True, False]], isa


def test_own_scales_are_never_too_small() -> None:
    x = torch.randn(4000, 32, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.int8, torch.float8_e4m3fn):
        largest = largest_number(dtype)
        scales = own_scales(x, largest)
        assert torch.equal(scales, scales.bfloat16().float())
        ratios = x.abs().amax(-1, keepdim=True) / scales
        assert (ratios <= largest).all() and (ratios > largest * (1 - 2**-7)).all()


ROWS = [(1, 700), (1, 33), (130, 900), (3, 1100), (40, 40), (1, 512), (2, 513)]


@pytest.mark.parametrize("group", [2, 7])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_a_row_depends_on_nothing_but_itself(isa: str, dtype: torch.dtype, group: int) -> None:
    """Neither on other rows, nor on threads, nor on how its keys and values lie in memory."""
    sizes: dict[str, Any] = {"num_heads": 2 * group, "num_kv_heads": 2, "head_size": 40, "block_size": 32}
    plain = make_paged_problem(torch.bfloat16, ROWS, **sizes)
    problem = with_byte_cache(plain, dtype, has_scales=dtype == torch.int8)
    whole = paged_attention(*problem)
    for threads in (1, 2, 5):
        cut = torch.ops.ascend_vllm._paged_attention_cut(*problem[:8], 512, threads, *problem[8:])
        assert torch.equal(cut, whole), isa
    query, key_cache, value_cache, block_table, query_start, seq_lens, *rest = problem
    packed = ByteCache.over(
        torch.empty(2, *key_cache.shape[:2], 32 * (42 if dtype == torch.int8 else 40), dtype=torch.uint8),
        32,
        40,
        dtype,
    )
    for target, source in zip(packed[1:], (key_cache, value_cache, *rest[4:6]), strict=True):
        if target is not None:
            target.copy_(source)
    for row in range(len(ROWS)):
        start, end = query_start[row : row + 2].tolist()
        alone = paged_attention(
            query[start:end],
            *packed[1:3],
            block_table[row : row + 1],
            torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens[row : row + 1],
            *rest[:4],
            *packed[3:],
            *rest[6:],
        )
        assert torch.equal(alone, whole[start:end]), (isa, row)
