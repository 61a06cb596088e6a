"""prefix_attention and decode_attention against the op's reference in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from ascend_vllm.ops.paged import make_paged_problem
from ascend_vllm.ops.registry import OPS
from tests.npu_kernels.conftest import Kernels
from tests.npu_kernels.layouts import BLOCK_HEAD_TOKEN, BLOCK_TOKEN_HEAD, FRACTAL_NZ, LAYOUTS, from_reference

DTYPES = (torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """One batch; rows are (query tokens, tokens in the cache)."""

    rows: list[tuple[int, int]]
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    window: int = 0
    padding: int = 0
    layout: int = BLOCK_TOKEN_HEAD
    cores: int = 3
    dtype: int = 0

    @property
    def numbers(self) -> list[int]:
        """What the host code takes, except the number of tokens."""
        blocks = max((-(-seq_len // self.block_size) for _, seq_len in self.rows), default=0) + 1
        query_stride = self.num_heads * self.head_size
        sizes = [len(self.rows), self.num_heads, self.num_kv_heads, self.head_size, self.block_size, blocks]
        return [self.dtype, *sizes, query_stride, self.window, self.layout]


PREFIX_CASES = [
    Case([(1, 1)], 1, 1, 64, 64, cores=1),
    # a whole prompt, tiles of all kinds; chunks over a cached prefix
    Case([(70, 70)], 4, 2, 64, 64, layout=FRACTAL_NZ),
    Case([(9, 200), (5, 5)], 4, 1, 80, 64, dtype=1, layout=BLOCK_HEAD_TOKEN),
    Case([(33, 129), (0, 17), (2, 140)], 3, 3, 96, 128, cores=40, padding=3),
    Case([(20, 150)], 8, 2, 128, 128, dtype=1, layout=FRACTAL_NZ),
    Case([(17, 131)], 2, 1, 128, 64, cores=2),
    Case([(11, 75), (1, 64)], 4, 2, 192, 64, dtype=1),
    Case([(19, 210)], 2, 1, 256, 128, layout=FRACTAL_NZ, cores=5),
    Case([(5, 65)], 14, 2, 64, 64, dtype=1),
    # blocks that are shorter than a tile
    Case([(20, 50)], 2, 1, 64, 16, layout=FRACTAL_NZ),
    # sliding windows: of one token, within a tile, around blocks, longer than everything
    Case([(30, 90)], 2, 1, 64, 64, window=1),
    Case([(40, 170), (1, 3)], 4, 2, 80, 64, window=7, layout=FRACTAL_NZ),
    Case([(37, 300)], 2, 2, 128, 128, window=100, dtype=1, cores=7),
    Case([(12, 80)], 2, 1, 64, 128, window=4096),
]
DECODE_CASES = [
    Case([(1, 1)], 1, 1, 64, 64, cores=1),
    # around the edges of tiles, blocks and parts
    Case([(1, n) for n in (63, 64, 65, 512, 513)], 2, 1, 64, 64, cores=8),
    Case([(1, 129), (1, 2), (1, 1100)], 4, 2, 80, 128, dtype=1, layout=FRACTAL_NZ, cores=5),
    Case([(1, 127), (1, 0), (1, 700)], 3, 3, 96, 64, layout=BLOCK_HEAD_TOKEN),
    Case([(1, 600)], 28, 4, 128, 128, dtype=1, cores=40),
    Case([(1, 530), (1, 40)], 4, 2, 192, 64, layout=FRACTAL_NZ),
    Case([(1, 520)], 2, 1, 256, 128, dtype=1),
    Case([(1, 70), (1, 32)], 2, 2, 112, 32, dtype=1),
    # more heads of a KV head than a tile has room for
    Case([(1, 200)], 20, 1, 64, 64, cores=2),
    Case([(1, 700), (1, 30)], 4, 2, 64, 64, window=1),
    Case([(1, 1200), (1, 5)], 4, 2, 128, 128, window=600, layout=FRACTAL_NZ, dtype=1),
]


def problem_of(case: Case) -> tuple[Any, ...]:
    """The op's arguments, with caches as the reference takes them."""
    return make_paged_problem(
        DTYPES[case.dtype],
        case.rows,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        block_size=case.block_size,
        sliding_window=case.window,
        padding=case.padding,
    )


def run(kernels: Kernels, name: str, case: Case, problem: tuple[Any, ...]) -> torch.Tensor:
    """What the kernel makes of a problem; what it leaves alone is zero."""
    query, key_cache, value_cache, block_table, query_start, seq_lens, scale, _ = problem
    caches = (from_reference(cache, case.layout) for cache in (key_cache, value_cache))
    output = torch.zeros(query.shape, dtype=query.dtype)
    if name == "prefix_attention":
        inputs, numbers = (query, *caches, block_table, query_start, seq_lens), [*case.numbers, query.shape[0]]
    else:
        inputs, numbers = (query, *caches, block_table, seq_lens), case.numbers
    kernels.run(name, inputs, (output,), numbers, reals=(scale,), cores=case.cores)
    return output


def check(kernels: Kernels, name: str, case: Case) -> None:
    """The kernel's error is at most twice that of rounding the exact result."""
    problem = problem_of(case)
    wide = (part.double() if torch.is_tensor(part) and part.is_floating_point() else part for part in problem)
    exact = OPS["paged_attention"].reference(*wide)
    rounding = (exact.to(DTYPES[case.dtype]).double() - exact).abs().max()
    result = run(kernels, name, case, problem)
    assert (result.double() - exact).abs().max() <= 2 * rounding


# around a block's end, in the layouts and dtypes by turns
SIZE_CASES = [
    Case([(3, 70), (1, 5)], 4, 2, size, 64, layout=LAYOUTS[number % 3], dtype=number % 2, cores=2)
    for number, size in enumerate(range(16, 257, 16))
]


@pytest.mark.parametrize("case", SIZE_CASES, ids=lambda case: str(case.head_size))
def test_every_head_size(kernels: Kernels, case: Case) -> None:
    check(kernels, "prefix_attention", case)
    check(kernels, "decode_attention", case._replace(rows=[(1, 70), (1, 5)]))


@pytest.mark.parametrize("case", PREFIX_CASES)
def test_prefix_attention(kernels: Kernels, case: Case) -> None:
    check(kernels, "prefix_attention", case)


@pytest.mark.parametrize("case", DECODE_CASES)
def test_decode_attention(kernels: Kernels, case: Case) -> None:
    check(kernels, "decode_attention", case)


def test_decoding_depends_on_nothing_but_the_row(kernels: Kernels) -> None:
    case = Case([(1, 600), (1, 90)], 4, 2, 64, 64)
    problem = problem_of(case)
    both = run(kernels, "decode_attention", case, problem)
    query, key_cache, value_cache, block_table, query_start, seq_lens, scale, window = problem
    alone = (
        query[1:].clone(),
        key_cache,
        value_cache,
        block_table[1:].clone(),
        query_start[:2],
        seq_lens[1:].clone(),
        scale,
        window,
    )
    one = case._replace(rows=[(1, 600)], cores=1)
    assert torch.equal(run(kernels, "decode_attention", one, alone), both[1:])


@pytest.mark.parametrize("name", ["prefix_attention", "decode_attention"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_query_may_be_a_view_of_a_fused_projection(kernels: Kernels, name: str, layout: int) -> None:
    case = Case([(1, 30), (1, 70)], 4, 2, 64, 64, layout=layout)
    problem = problem_of(case)
    expected = run(kernels, name, case, problem)
    fused = torch.cat([problem[0].flatten(1), torch.full((2, 256), float("nan"), dtype=torch.float16)], 1)
    query, key_cache, value_cache, block_table, query_start, seq_lens, scale, _ = problem
    caches = [from_reference(cache, layout) for cache in (key_cache, value_cache)]
    starts = (query_start,) if name == "prefix_attention" else ()
    output = torch.zeros_like(expected)
    numbers = case.numbers
    numbers[7] = 512
    tokens = [query.shape[0]] if name == "prefix_attention" else []
    inputs = (fused, *caches, block_table, *starts, seq_lens)
    kernels.run(name, inputs, (output,), [*numbers, *tokens], reals=(scale,))
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("index", "number", "message"),
    [
        (2, 3, "heads: not a multiple of kv_heads"),
        *((4, size, f"head_size: {size} is not a multiple of 16 from 16 to 256") for size in (0, 8, 40, 264, 272)),
        (6, 0, "max_blocks: 0 is not in"),
        (7, 100, "query_stride: tokens overlap"),
        (8, -1, "window: -1 is not in"),
    ],
)
def test_arguments_are_checked(kernels: Kernels, index: int, number: int, message: str) -> None:
    numbers = Case([(1, 1)], 4, 2, 64, 64).numbers
    numbers[index] = number
    for name in ("prefix_attention", "decode_attention"):
        with pytest.raises(ValueError, match=message):
            kernels.run(name, (), (), [*numbers, 1], reals=(1.0,))
