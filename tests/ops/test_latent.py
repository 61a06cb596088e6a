"""What the ops of latent attention promise beyond agreeing with their references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ascend_vllm.ops import latent
from ascend_vllm.ops.kv_bytes import BYTE_DTYPES, LatentByteCache, largest_number, own_scales, to_bytes
from ascend_vllm.ops.registry import FLOAT_DTYPES
from ascend_vllm.ops.tape import Tapes

HEADS, LATENT, ROTARY, NOPE, VALUE, BLOCK = 6, 48, 16, 24, 40, 16
WIDTH = LATENT + ROTARY
# None: the queries'
CACHE_DTYPES = [None, torch.int8, torch.float8_e4m3fn]
SCALE = (NOPE + ROTARY) ** -0.5


class Layer:
    """A layer's weights, and a step's queries and cache."""

    # of a cache of bytes
    scales: tuple[torch.Tensor | None, float] = (None, 1.0)

    def __init__(
        self, dtype: torch.dtype, rows: Sequence[tuple[int, int]], cache_dtype: torch.dtype | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = (HEADS, NOPE + VALUE, LATENT)
        weight = (torch.randn(shape, generator=generator) / math.sqrt(LATENT)).to(dtype)
        self.key_weight, self.value_weight = weight[:, :NOPE], weight[:, NOPE:]
        self.absorb = latent.pack_heads(self.key_weight.transpose(1, 2))
        self.keys, self.values = latent.pack_heads(self.key_weight), latent.pack_heads(self.value_weight)
        self.query, self.cache, self.block_table, self.query_start, self.seq_lens = latent.make_latent_problem(
            dtype,
            rows,
            num_heads=HEADS,
            latent_width=LATENT,
            rotary_width=ROTARY,
            block_size=BLOCK,
            query_width=NOPE + ROTARY,
        )
        if cache_dtype is not None:
            has_scales = cache_dtype == torch.int8
            rows_of_cache, *scales = latent.latent_bytes(
                self.cache, LATENT, cache_dtype, has_scales, 1.0 if has_scales else 0.01
            )
            # as backends lay them out
            planes = torch.full((len(self.cache), BLOCK * (WIDTH + 4 * has_scales)), 0x7F, dtype=torch.uint8)
            made = LatentByteCache.over(planes, BLOCK, WIDTH, cache_dtype)
            self.cache = made.rows.copy_(rows_of_cache)
            self.scales = (None if made.scales is None else made.scales.copy_(scales[0]), scales[1])

    @property
    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.block_table, self.query_start, self.seq_lens

    def absorbed(self) -> torch.Tensor:
        """[T, N, V] by absorbed queries."""
        query = latent.heads_linear(self.query, self.absorb, NOPE, LATENT)
        sums = latent.latent_attention(query, self.cache, *self.step, SCALE, LATENT, *self.scales)
        result: torch.Tensor = latent.heads_linear(sums, self.values, LATENT, VALUE)
        return result

    def expand(self, out: torch.Tensor) -> torch.Tensor:
        """The same by keys and values of heads."""
        inputs = (self.query, self.cache, self.keys, self.values, *self.step, SCALE)
        latent.expanded_attention(*inputs, out, *self.scales)
        return out

    def row(self, row: int) -> Layer:
        """The same with one row only."""
        part = object.__new__(Layer)
        part.__dict__.update(self.__dict__)
        start, end = self.query_start[row : row + 2].tolist()
        part.query = self.query[start:end]
        part.block_table, part.seq_lens = self.block_table[row : row + 1], self.seq_lens[row : row + 1].clone()
        part.query_start = torch.tensor([0, end - start], dtype=torch.int32)
        return part

    def plain(self, row: int) -> torch.Tensor:
        """Attention of a row, by the formulas of the paper, in float64."""
        start, end = self.query_start[row : row + 2].tolist()
        length = int(self.seq_lens[row])
        blocks = self.block_table[row, : -(-length // BLOCK)].long()
        rows = self.cache[blocks].flatten(0, 1)[:length].double() * self.scales[1]
        if self.scales[0] is not None:
            of_latent, of_key = self.scales[0][blocks].flatten(0, 1)[:length].double().split(1, dim=1)
            rows = torch.cat([rows[:, :LATENT] * of_latent, rows[:, LATENT:] * of_key], dim=1)
        result = torch.empty(end - start, HEADS, VALUE, dtype=torch.float64)
        for head in range(HEADS):
            keys = torch.cat([rows[:, :LATENT] @ self.key_weight[head].double().T, rows[:, LATENT:]], dim=1)
            values = rows[:, :LATENT] @ self.value_weight[head].double().T
            for token in range(end - start):
                seen = length - (end - start) + token + 1
                scores = keys[:seen] @ self.query[start + token, head].double() * SCALE
                result[token, head] = scores.softmax(0) @ values[:seen]
        return result


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_both_forms_are_attention_to_keys_and_values_of_heads(isa: str, cache_dtype: torch.dtype | None) -> None:
    rows = [(1, 1), (1, 70), (3, 600), (40, 90), (33, 33)]
    layer = Layer(torch.float32, rows, cache_dtype)
    expected = torch.cat([layer.plain(row) for row in range(len(rows))]).float()
    torch.testing.assert_close(layer.absorbed(), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(layer.expand(torch.empty_like(expected)), expected, atol=2e-5, rtol=1e-5)


def test_whole_prompts_and_long_chunks_are_expanded() -> None:
    rows = [(1, 1), (31, 31), (32, 32), (500, 500), (60, 100), (100, 8000), (169, 100_000), (180, 100_000)]
    query_lens, seq_lens = np.array(rows, np.int32).T
    expected = [False, False, True, True, False, False, False, True]
    assert latent.pays_to_expand(query_lens, seq_lens, 128, 128, 512).tolist() == expected


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_a_row_depends_on_nothing_but_itself(isa: str, dtype: torch.dtype, cache_dtype: torch.dtype | None) -> None:
    rows = [(1, 5), (2, 1200), (1, 530), (40, 300), (1, 16)]
    layer = Layer(dtype, rows, cache_dtype)
    out = torch.empty(len(layer.query), HEADS, VALUE, dtype=dtype)
    together = layer.absorbed(), layer.expand(out)
    starts = layer.query_start.tolist()
    for row in range(len(rows)):
        alone = layer.row(row)
        span = slice(starts[row], starts[row + 1])
        assert torch.equal(alone.absorbed(), together[0][span])
        assert torch.equal(alone.expand(torch.empty_like(out[span])), together[1][span])


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rows",
    # several; ones alone, whose keys and values threads share: in part of a tile, in several, in one more than they
    # share; more queries than they share
    [[(1, 3000), (2, 900), (50, 700)], [(1, 5)], [(1, 159)], [(2, 256)], [(1, 513)], [(30, 300)]],
    ids=str,
)
def test_threads_change_nothing(
    isa: str, rows: list[tuple[int, int]], dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    layer = Layer(dtype, rows, cache_dtype)
    query = latent.heads_linear(layer.query, layer.absorb, NOPE, LATENT)
    arguments = (query, layer.cache, *layer.step, SCALE, LATENT)
    with_threads = torch.ops.ascend_vllm._latent_attention_with
    torch.set_num_threads(3)
    results = [with_threads(*arguments, threads, *layer.scales) for threads in (1, 2, 3)]
    out = torch.empty(len(query), HEADS, VALUE, dtype=dtype)
    expanded = layer.expand(out.clone())
    torch.set_num_threads(1)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(layer.expand(out), expanded)


def test_heads_that_do_not_fit_into_the_memory_come_later() -> None:
    # keys and values of one head of 20,000 positions take 5 MB, and of all more than a thread may use
    layer = Layer(torch.float32, [(2, 20_000)])
    out = layer.expand(torch.empty(2, HEADS, VALUE))
    torch.testing.assert_close(out, layer.absorbed(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_a_prompt_may_be_cut_anywhere(cache_dtype: torch.dtype | None) -> None:
    whole = Layer(torch.float32, [(90, 90)], cache_dtype)
    expected = whole.expand(torch.empty(90, HEADS, VALUE))
    for cut in (1, 16, 37, 89):
        for start, end in ((0, cut), (cut, 90)):
            part = whole.row(0)
            part.query, part.seq_lens = whole.query[start:end], torch.tensor([end], dtype=torch.int32)
            part.query_start = torch.tensor([0, end - start], dtype=torch.int32)
            for got in (part.absorbed(), part.expand(torch.empty(end - start, HEADS, VALUE))):
                torch.testing.assert_close(got, expected[start:end], atol=2e-5, rtol=1e-5)


def test_a_tape_follows_growing_rows() -> None:
    layer = Layer(torch.float32, [(1, 700), (1, 40)])
    lengths = layer.seq_lens.clone()
    layer.seq_lens.copy_(torch.tensor([1, 2]))
    tapes = Tapes()
    recorded = tapes.record(0, layer.absorbed)
    layer.seq_lens.copy_(lengths)
    tapes.replay(0)
    assert torch.equal(recorded, layer.absorbed())
    layer.seq_lens[0] = 10_000
    with pytest.raises(RuntimeError, match="row 0 of length 10000 needs 625 blocks, block_table has 45"):
        tapes.replay(0)


def _stored(positions: torch.Tensor, slots: torch.Tensor, **changes: Any) -> torch.Tensor:
    """The cache after the arguments, with changes, were stored."""
    tokens = len(positions)
    arguments: dict[str, Any] = {
        "positions": positions,
        "query_rope": torch.ones(tokens, HEADS, ROTARY),
        "latent": torch.full((tokens, LATENT + ROTARY), 2.0),
        "weight": torch.full((LATENT,), 3.0),
        "epsilon": 0.0,
        "cos_sin_cache": torch.cat([torch.ones(50, ROTARY // 2), torch.zeros(50, ROTARY // 2)], dim=1),
        "is_neox": False,
        "cache": torch.zeros(3, BLOCK, LATENT + ROTARY),
        "slot_mapping": slots,
    }
    arguments |= changes
    latent.store_latent(**arguments)
    cache: torch.Tensor = arguments["cache"]
    return cache


def test_a_stored_row_is_the_normalised_latent_and_the_rotated_key() -> None:
    cache = _stored(torch.tensor([0, 4]), torch.tensor([17, -1]))
    assert torch.equal(cache[1, 1], torch.cat([torch.full((LATENT,), 3.0), torch.full((ROTARY,), 2.0)]))
    cache[1, 1] = 0
    assert not cache.any()


# scales of rows are int8's and E4M3's
@pytest.mark.parametrize(
    ("cache_dtype", "has_scales"),
    [(dtype, False) for dtype in BYTE_DTYPES] + [(torch.int8, True), (torch.float8_e4m3fn, True)],
)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_bytes_are_those_of_the_stored_row(
    isa: str, dtype: torch.dtype, cache_dtype: torch.dtype, has_scales: bool
) -> None:
    tokens, generator = 40, torch.Generator().manual_seed(0)
    rows = torch.randn(tokens, WIDTH, generator=generator)
    # keys are not normalised: rows of zeros, and of very different sizes
    rows[:, LATENT:] *= 10.0 ** torch.randint(-5, 4, (tokens, 1), generator=generator)
    rows[3], rows[4, LATENT:] = 0, 0
    slots = torch.randperm(3 * BLOCK, generator=generator)[:tokens]
    changes = {
        "query_rope": torch.ones(tokens, HEADS, ROTARY, dtype=dtype),
        "latent": rows.to(dtype),
        "weight": (torch.rand(LATENT, generator=generator) + 0.5).to(dtype),
        "epsilon": 1e-6,
        "is_neox": True,
    }
    plain = _stored(torch.arange(tokens), slots, **changes, cache=torch.zeros(3, BLOCK, WIDTH, dtype=dtype))
    stored = plain.flatten(0, 1)[slots].float()
    scale: torch.Tensor | float = 1.0 if has_scales else 0.75
    if has_scales:
        parts = [own_scales(part, largest_number(cache_dtype)) for part in stored.split([LATENT, ROTARY], dim=1)]
        scale = torch.cat([parts[0].expand(-1, LATENT), parts[1].expand(-1, ROTARY)], dim=1)
    planes = torch.zeros(3, BLOCK * (WIDTH + 4 * has_scales), dtype=torch.uint8)
    made = LatentByteCache.over(planes, BLOCK, WIDTH, cache_dtype)
    of_all = 1.0 if has_scales else 0.75
    _stored(torch.arange(tokens), slots, **changes, cache=made.rows, row_scales=made.scales, row_scale=of_all)
    found = made.rows.flatten(0, 1)[slots]
    assert torch.equal(found.float(), to_bytes(stored, scale, cache_dtype).float()), isa
    if made.scales is not None:
        assert torch.equal(made.scales.flatten(0, 1)[slots].float(), torch.cat(parts, dim=1)), isa
    unused = torch.ones(3 * BLOCK, dtype=torch.bool)
    unused[slots] = False
    assert not made.rows.flatten(0, 1)[unused].float().any()


def test_a_cache_of_bytes_that_does_not_fit_is_refused() -> None:
    layer = Layer(torch.float32, [(1, 5)], torch.int8)
    query = latent.heads_linear(layer.query, layer.absorb, NOPE, LATENT)
    arguments = (query, layer.cache, *layer.step, SCALE, LATENT)
    with pytest.raises(RuntimeError, match="numbers with scales of their own have no row_scale"):
        latent.latent_attention(*arguments, layer.scales[0], 0.5)
    with pytest.raises(RuntimeError, match=r"row_scales must be a bfloat16 tensor \[blocks, block size, 2\]"):
        latent.latent_attention(*arguments, torch.ones(2, BLOCK, 2))
    with pytest.raises(RuntimeError, match="row_scale must be positive, got 0"):
        latent.latent_attention(*arguments, None, 0.0)
    floats = Layer(torch.float32, [(1, 5)])
    with pytest.raises(RuntimeError, match="a cache in Float has no scales"):
        latent.latent_attention(query, floats.cache, *floats.step, SCALE, LATENT, None, 0.5)
    with pytest.raises(RuntimeError, match="cache must be Float, int8, float8_e4m3fn or float8_e5m2, got Double"):
        latent.latent_attention(query, floats.cache.double(), *floats.step, SCALE, LATENT)
    wide = torch.zeros(1, BLOCK, 1032, dtype=torch.int8)
    with pytest.raises(RuntimeError, match="a cache of bytes has rows of at most 1024 numbers, got 1032"):
        latent.latent_attention(torch.ones(1, 1, 1032), wide, *layer.step, SCALE, 1024)


def test_what_does_not_fit_is_refused() -> None:
    zero, one = torch.tensor([0]), torch.tensor([1])
    with pytest.raises(IndexError, match="slot_mapping holds slot 48, the cache has 48"):
        _stored(zero, torch.tensor([48]))
    with pytest.raises(IndexError, match="position 50 is outside the rotary table of 50 positions"):
        _stored(torch.tensor([50]), one)
    with pytest.raises(RuntimeError, match=r"latent must be \[1, 64\], got \[1, 63\]"):
        _stored(zero, one, latent=torch.ones(1, 63))
    layer = Layer(torch.float32, [(1, 5)])
    with pytest.raises(RuntimeError, match="not that of 6 Float weights of 24 inputs, of 40, and 60 outputs"):
        latent.heads_linear(layer.query, layer.absorb, NOPE, 60)
    query = latent.heads_linear(layer.query, layer.absorb, NOPE, LATENT)
    with pytest.raises(RuntimeError, match="value_width must be a multiple of 8, got 12"):
        latent.latent_attention(query, layer.cache, *layer.step, SCALE, 12)
    with pytest.raises(RuntimeError, match="scale must be greater than 0, got 0"):
        latent.latent_attention(query, layer.cache, *layer.step, 0.0, LATENT)
    with pytest.raises(RuntimeError, match="query has a width of 40 and values of 48, the cache's rows have 64"):
        latent.latent_attention(layer.query, layer.cache, *layer.step, SCALE, LATENT)
    with pytest.raises(RuntimeError, match="out must be a contiguous tensor"):
        layer.expand(torch.empty(1, HEADS + 1, VALUE))
    with pytest.raises(RuntimeError, match="not those of 6 heads with queries of 40 and values of 96"):
        layer.expand(torch.empty(1, HEADS, 96))
