"""What the paged ops promise beyond agreeing with their references on the common inputs."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from ascend_vllm.attention.backend import AttentionSpec, ForwardBatch
from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.ops.elementwise import rotary_embedding
from ascend_vllm.ops.native import available_cpu_isas
from ascend_vllm.ops.paged import (
    BLOCK_SIZES,
    HEAD_SIZES,
    make_paged_problem,
    paged_attention,
    rotary_store_kv,
    store_kv,
)
from ascend_vllm.ops.registry import FLOAT_DTYPES, OPS
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES
from tests.combinations import combinations
from tests.op_checks import copies, is_unchanged

needs_kernels = pytest.mark.skipif(not available_cpu_isas(), reason="the CPU kernels are not built")


def attention_cut(problem: tuple[Any, ...], split_keys: int, threads: int) -> torch.Tensor:
    return torch.ops.ascend_vllm._paged_attention_cut(*problem[:8], split_keys, threads, *problem[8:])


def widened(problem: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in problem)


def assert_as_accurate(result: torch.Tensor, problem: tuple[Any, ...]) -> None:
    """The error is at most twice that of the plain implementation in the same dtype."""
    reference = OPS["paged_attention"].reference
    exact = reference(*widened(problem))
    assert result.shape == exact.shape
    assert result.dtype == problem[0].dtype
    if exact.numel() == 0:
        return
    allowed = 2 * (reference(*problem).double() - exact).abs().max().item()
    if result.dtype == torch.float32:
        allowed = max(allowed, OPS["paged_attention"].tolerance)
    error = (result.double() - exact).abs().max().item()
    assert error <= allowed


def dense_problem(
    lengths: list[int], num_heads: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, seed: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Query [L, N, D], key [L, K, D] and value [L, K, D] of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(length, num_heads, head_size, generator=generator).to(dtype),
            torch.randn(length, num_kv_heads, head_size, generator=generator).to(dtype),
            torch.randn(length, num_kv_heads, head_size, generator=generator).to(dtype),
        )
        for length in lengths
    ]


class PagedSequences:
    """Sequences over one cache of NaN, advanced a step at a time through the backend."""

    def __init__(
        self,
        sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        block_size: int,
        sliding_window: int | None = None,
        seed: int = 0,
    ) -> None:
        query, key, _ = sequences[0]
        self.sequences = sequences
        self.block_size = block_size
        self.spec = AttentionSpec(
            query.shape[1], key.shape[1], query.shape[2], query.shape[2] ** -0.5, sliding_window
        )
        self.backend = CpuAttention(block_size)
        widths = [-(-len(query) // block_size) for query, _, _ in sequences]
        num_blocks = sum(widths) + 3
        dtype = str(query.dtype).removeprefix("torch.")
        cache = KEYS_AND_VALUES.spec(block_size, key.shape[1], key.shape[2], dtype)
        self.kv_cache = torch.full(self.backend.kv_cache_shape(num_blocks, cache), float("nan"), dtype=query.dtype)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        self.block_table = torch.zeros(len(sequences), max(widths), dtype=torch.int32)
        for row, width in enumerate(widths):
            self.block_table[row, :width], order = order[:width], order[width:]
        self.done = [0] * len(sequences)

    def step(self, counts: list[int]) -> list[torch.Tensor]:
        """Advances row r by counts[r] tokens; returns each row's output [counts[r], N, D]."""
        parts: list[list[torch.Tensor]] = [[], [], []]
        positions, slots = [], []
        for row, count in enumerate(counts):
            span = torch.arange(self.done[row], self.done[row] + count)
            for part, tensor in zip(parts, self.sequences[row], strict=True):
                part.append(tensor[span])
            positions.append(span)
            slots.append(self.block_table[row, span // self.block_size] * self.block_size + span % self.block_size)
            self.done[row] += count
        query, key, value = (torch.cat(part) for part in parts)
        # query, key and value as a fused projection leaves them
        fused = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=1)
        query, key, value = fused.split([part.shape[1] * part.shape[2] for part in (query, key, value)], dim=1)
        batch = ForwardBatch(
            input_ids=torch.zeros(len(query), dtype=torch.int64),
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots).long(),
            query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            seq_lens=torch.tensor(self.done, dtype=torch.int32),
            block_table=self.block_table,
            logits_indices=torch.zeros(0, dtype=torch.int64),
            query_start_np=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens_np=np.array(self.done, np.int32),
            max_query_len=max(counts),
            max_seq_len=max(self.done),
        )
        output = self.backend.forward(self.spec, query, key, value, self.kv_cache, batch, self.backend.prepare(batch))
        return list(output.view(len(query), self.spec.num_heads, -1).split(counts))


def dense_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None = None
) -> torch.Tensor:
    """Causal attention of one whole sequence in float64 with a dense mask."""
    length = len(query)
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    group = len(query) // len(key)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    if sliding_window is not None:
        mask &= ~torch.ones(length, length, dtype=torch.bool).tril(-sliding_window)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(group, 0), value.repeat_interleave(group, 0), attn_mask=mask
    ).transpose(0, 1)


@needs_kernels
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (4, 1), (14, 2), (20, 1)])
def test_splits_do_not_change_a_result(isa: str, dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> None:
    rows = [(1, 1000), (1, 129), (1, 1), (3, 700)]
    problem = make_paged_problem(
        dtype, rows, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=40, block_size=16
    )
    unsplit = attention_cut(problem, 0, 1)
    one_thread = attention_cut(problem, 128, 1)
    assert torch.equal(attention_cut(problem, 128, 3), one_thread)
    assert not torch.equal(one_thread, unsplit) or dtype != torch.float32, "the splits were not taken"
    for result in (unsplit, one_thread):
        assert_as_accurate(result, problem)


@needs_kernels
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_threads_do_not_change_a_result(isa: str, dtype: torch.dtype) -> None:
    rows = [(150, 300), (1, 900), (2, 2), (64, 64), (1, 40)]
    problem = make_paged_problem(dtype, rows, num_heads=6, num_kv_heads=2, head_size=32, block_size=32)
    one = attention_cut(problem, 512, 1)
    for threads in (2, 3, 5):
        assert torch.equal(attention_cut(problem, 512, threads), one)


@needs_kernels
@pytest.mark.parametrize("changes", [{}, {"soft_cap": 1.0, "alibi": True}])
def test_a_row_does_not_depend_on_its_batch(isa: str, changes: dict[str, Any]) -> None:
    rows = [(1, 77), (90, 200), (1, 1200), (5, 5), (0, 4), (1, 3)]
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "block_size": 16}
    problem = make_paged_problem(torch.float32, rows, **sizes, **changes)
    query, key_cache, value_cache, block_table, query_start, seq_lens, *rest = problem
    together = paged_attention(*problem)
    for row in range(len(rows)):
        owned = slice(int(query_start[row]), int(query_start[row + 1]))
        count = owned.stop - owned.start
        alone = paged_attention(
            query[owned],
            key_cache,
            value_cache,
            block_table[row : row + 1],
            torch.tensor([0, count], dtype=torch.int32),
            seq_lens[row : row + 1],
            *rest,
        )
        assert torch.equal(alone, together[owned])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_block_order_does_not_change_a_result(isa: str, dtype: torch.dtype) -> None:
    rows = [(1, 150), (40, 100), (1, 16)]
    problem = make_paged_problem(dtype, rows, num_heads=4, num_kv_heads=2, head_size=24, block_size=16)
    query, key_cache, value_cache, block_table, *rest = problem
    order = torch.randperm(len(key_cache), generator=torch.Generator().manual_seed(1))
    moved = torch.empty_like(order)
    moved[order] = torch.arange(len(order))
    permuted = paged_attention(query, key_cache[order], value_cache[order], moved[block_table.long()].int(), *rest)
    assert torch.equal(permuted, paged_attention(*problem))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("sliding_window", [0, 1, 50])
def test_what_a_row_may_not_read_never_reaches_it(isa: str, block_size: int, sliding_window: int) -> None:
    rows = [(1, 3 * block_size + 5), (30, 2 * block_size), (1, block_size), (0, 7), (70, 71)]
    for num_heads in (2, 16):
        for dtype in FLOAT_DTYPES:
            problem = make_paged_problem(
                dtype,
                rows,
                num_heads=num_heads,
                num_kv_heads=2,
                head_size=32,
                block_size=block_size,
                sliding_window=sliding_window,
            )
            # the generator fills with NaN; other garbage must give the very same bits
            poisoned = paged_attention(*problem)
            assert poisoned.isfinite().all()
            query, *caches = problem[:3]
            cleared = [cache.nan_to_num(nan=3.0e4) for cache in caches]
            assert torch.equal(paged_attention(query, *cleared, *problem[3:]), poisoned)


def test_nan_of_one_token_stays_with_it(isa: str) -> None:
    for num_heads in (1, 12):
        problem = make_paged_problem(
            torch.float32, [(20, 20), (1, 9)], num_heads=num_heads, num_kv_heads=1, head_size=16, block_size=16
        )
        clean = paged_attention(*problem)
        problem[0][7, 0, 3] = float("nan")
        result = paged_attention(*problem)
        assert result[7, 0].isnan().all()
        result[7, 0] = clean[7, 0]
        assert torch.equal(result, clean)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("sliding_window", [None, 20, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (7, 1)])
def test_chunked_prefill_equals_one_shot(
    isa: str, dtype: torch.dtype, sliding_window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    sequences = dense_problem([200, 90, 1], num_heads, num_kv_heads, 32, dtype)
    one_shot = PagedSequences(sequences, 16, sliding_window).step([200, 90, 1])
    chunked = PagedSequences(sequences, 32, sliding_window, seed=1)
    chunks: list[list[torch.Tensor]] = [[], [], []]
    for counts in ([64, 1, 0], [1, 33, 1], [70, 55, 0], [65, 1, 0]):
        for row, output in enumerate(chunked.step(counts)):
            chunks[row].append(output)
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for whole, parts in zip(one_shot, chunks, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sliding_window", [None, 1, 16, 17, 63, 1000])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (9, 1)])
def test_decoding_and_prompts_equal_a_dense_mask(
    isa: str, sliding_window: int | None, num_heads: int, num_kv_heads: int
) -> None:
    lengths = [150, 81, 33]
    sequences = dense_problem(lengths, num_heads, num_kv_heads, 24, torch.float32)
    paged = PagedSequences(sequences, 16, sliding_window)
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    steps = [[100, 60, 1]] + [[1, 1, 1]] * 20 + [[30, 1, 12]]
    for counts in steps:
        for row, output in enumerate(paged.step(counts)):
            outputs[row].append(output)
    assert paged.done == lengths
    for (query, key, value), parts in zip(sequences, outputs, strict=True):
        exact = dense_attention(query, key, value, sliding_window)
        torch.testing.assert_close(torch.cat(parts).double(), exact, rtol=0, atol=5e-6)


@hypothesis.settings(
    max_examples=60,
    # restoring the number of threads once for all examples is right
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
@hypothesis.given(data=st.data())
def test_ragged_batches(isa: str, data: st.DataObject) -> None:
    row = st.tuples(st.integers(0, 90), st.integers(0, 300)).map(lambda pair: (pair[0], sum(pair)))
    decoding = st.integers(1, 700).map(lambda length: (1, length))
    num_kv_heads = data.draw(st.integers(1, 3), "KV heads")
    problem = make_paged_problem(
        data.draw(st.sampled_from(FLOAT_DTYPES), "dtype"),
        data.draw(st.lists(row | decoding, max_size=5), "rows"),
        num_heads=num_kv_heads * data.draw(st.integers(1, 9), "group"),
        num_kv_heads=num_kv_heads,
        head_size=data.draw(st.sampled_from(HEAD_SIZES[:16]), "head size"),
        block_size=data.draw(st.sampled_from(BLOCK_SIZES), "block size"),
        sliding_window=data.draw(st.just(0) | st.integers(1, 400), "sliding window"),
        padding=data.draw(st.integers(0, 2), "padding"),
        soft_cap=data.draw(st.sampled_from([0.0, 0.3, 50.0]), "soft cap"),
        alibi=data.draw(st.booleans(), "ALiBi"),
        seed=data.draw(st.integers(0, 100), "seed"),
    )
    result = paged_attention(*problem)
    assert_as_accurate(result, problem)
    owned = int(problem[4][-1])
    assert not result[owned:].any()


@pytest.mark.parametrize(("head_size", "dtype"), combinations(HEAD_SIZES, FLOAT_DTYPES))
def test_every_head_size(isa: str, head_size: int, dtype: torch.dtype) -> None:
    for num_heads in (2, 24):
        problem = make_paged_problem(
            dtype, [(1, 40), (9, 30)], num_heads=num_heads, num_kv_heads=2, head_size=head_size, block_size=16
        )
        assert_as_accurate(paged_attention(*problem), problem)


def test_strided_query(isa: str) -> None:
    problem = make_paged_problem(
        torch.bfloat16, [(1, 20), (30, 60)], num_heads=4, num_kv_heads=2, head_size=16, block_size=16
    )
    query = problem[0]
    wide = torch.full((query.shape[0], 6, 32), float("nan"), dtype=query.dtype)
    wide[:, 1:5, 8:24] = query
    assert torch.equal(paged_attention(wide[:, 1:5, 8:24], *problem[1:]), paged_attention(*problem))


def test_store_kv_leaves_other_slots_alone(isa: str) -> None:
    cache = torch.zeros(2, 3, 2, 16, 16)
    key = torch.randn(4, 2, 16)
    store_kv(key, -key, cache[0], cache[1], torch.tensor([40, -1, 0, 15]))
    written = cache[0].transpose(1, 2).reshape(48, 2, 16)
    for token, slot in ((0, 40), (2, 0), (3, 15)):
        assert torch.equal(written[slot], key[token])
    assert cache[0].count_nonzero() == 3 * 2 * 16
    assert torch.equal(cache[1], -cache[0])


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": lambda x: x.fill_(9999)}, "holds block 9999"),
        ({"block_table": lambda x: x.fill_(-1)}, "holds block -1"),
        ({"block_table": lambda x: x[:, :1]}, "needs 3 blocks, block_table has 1"),
        ({"seq_lens": lambda x: x - 30}, "row 0 has 20 query tokens and a length of 10"),
        ({"query_start": lambda x: x + 1}, "query_start runs from 1 to 22, query has 21 tokens"),
        ({"query_start": lambda x: x.flip(0)}, "query_start runs from 21 to 0|query_start descends"),
        ({"seq_lens": lambda x: x.long()}, "seq_lens must be a contiguous Int"),
        ({"key_cache": lambda x: x.bfloat16()}, "key_cache must be Float"),
        ({"value_cache": lambda x: x[:, :, :8]}, "key_cache and value_cache must have one shape"),
        ({"query": lambda x: x[:, :3]}, "3 query heads cannot share 2 KV heads"),
        ({"query": lambda x: x[:, :, :8]}, "head size must be a multiple of 8 from 16 to 256, got 8"),
        ({"sliding_window": lambda _: -1}, "sliding_window must be 0"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    names = ("query", "key_cache", "value_cache", "block_table", "query_start", "seq_lens", "scale", "sliding_window")
    problem = make_paged_problem(
        torch.float32, [(20, 40), (1, 5)], num_heads=4, num_kv_heads=2, head_size=16, block_size=16
    )
    arguments = dict(zip(names, problem, strict=True))
    for name, function in change.items():
        arguments[name] = function(arguments[name])
    with pytest.raises((RuntimeError, IndexError), match=message):
        paged_attention(*arguments.values())


@needs_kernels
def test_store_kv_refuses_a_slot_beyond_the_cache() -> None:
    cache = torch.zeros(2, 3, 2, 16, 16)
    key = torch.randn(1, 2, 16)
    with pytest.raises(IndexError, match="slot 48, the cache has 48"):
        store_kv(key, key, cache[0], cache[1], torch.tensor([48]))


_STORE_NAMES = (
    "positions",
    "query",
    "key",
    "value",
    "cos_sin_cache",
    "is_neox",
    "key_cache",
    "value_cache",
    "slot_mapping",
    "key_scales",
    "value_scales",
    "k_scale",
    "v_scale",
)


def _store_problems(dtype: torch.dtype) -> list[dict[str, Any]]:
    # problems share tensors; without the last four arguments, the caches are of the keys' dtype
    inputs = OPS["rotary_store_kv"].inputs(dtype)
    return [dict(zip(_STORE_NAMES, copies(arguments), strict=False)) for arguments in inputs]


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_rotary_store_kv_is_both_ops_one_after_the_other(isa: str, dtype: torch.dtype) -> None:
    joined, apart = _store_problems(dtype), _store_problems(dtype)
    for one, two in zip(joined, apart, strict=True):
        before = one["key"].clone()
        rotary_store_kv(*one.values())
        assert torch.equal(one["key"], before), "keys stay where they are as they are"
        kv_heads, size = two["key_cache"].shape[1], two["key_cache"].shape[3]
        rotary_embedding(two["positions"], two["query"], two["key"], size, two["cos_sin_cache"], two["is_neox"])
        key, value = (two[name].view(-1, kv_heads, size) for name in ("key", "value"))
        store_kv(key, value, *(two[name] for name in _STORE_NAMES[6:] if name in two))
        for name in ("query", "key_cache", "value_cache", "key_scales", "value_scales"):
            if one.get(name) is not None:
                assert is_unchanged(one[name], two[name]), name


@needs_kernels
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": lambda x: x + 50}, "is outside the rotary table of 50 positions"),
        ({"slot_mapping": lambda x: x + 1000}, "slot_mapping holds slot 1"),
        ({"slot_mapping": lambda x: x[1:]}, "slot_mapping must be a contiguous Long tensor of 33"),
        ({"value": lambda x: x[:, :-1]}, "value must be of key's shape"),
        ({"value": lambda x: x.bfloat16()}, "value must be Float"),
        ({"key": lambda x: x[:, :72], "value": lambda x: x[:, :72]}, "key_cache must have 1 KV heads, got 3"),
        ({"value_cache": lambda x: x[:, :, :8]}, "key_cache and value_cache must have one shape"),
        ({"key_cache": lambda x: x[0]}, "key_cache must have four dimensions"),
        ({"cos_sin_cache": lambda x: x[:, :17]}, "cos_sin_cache must be"),
        ({"query": lambda x: x[:, :-1]}, "query must be"),
    ],
)
def test_rotary_store_kv_refuses_wrong_arguments(change: dict[str, Any], message: str) -> None:
    problem = next(itertools.dropwhile(lambda one: len(one["positions"]) != 33, _store_problems(torch.float32)))
    for name, function in change.items():
        problem[name] = function(problem[name])
    with pytest.raises((RuntimeError, IndexError), match=message):
        rotary_store_kv(*problem.values())


@pytest.mark.parametrize(
    ("spec", "dtype", "block_size", "reason"),
    [
        (AttentionSpec(4, 2, 64, 0.125), torch.float64, 16, "dtype torch.float64 is not one of"),
        (AttentionSpec(4, 2, 20, 0.125), torch.float32, 16, "head size 20 is not a multiple of 8 from 16 to 256"),
        (AttentionSpec(4, 2, 264, 0.125), torch.float32, 16, "head size 264 is not"),
        (AttentionSpec(4, 3, 64, 0.125), torch.float32, 16, "4 query heads cannot share 3 KV heads"),
        (AttentionSpec(4, 2, 64, 0.125), torch.float32, 8, "block size 8 is not one of 16, 32, 64, 128"),
        (AttentionSpec(4, 2, 64, 0.125, 0), torch.float32, 16, "sliding window 0 is below one token"),
    ],
)
def test_backend_says_why_it_refuses(spec: AttentionSpec, dtype: torch.dtype, block_size: int, reason: str) -> None:
    refusal = CpuAttention.unsupported_reason(spec, dtype, block_size)
    assert refusal is not None
    assert refusal.startswith(reason)


@pytest.mark.parametrize("changes", [{"soft_cap": 50.0}, {"alibi_slopes": torch.ones(4)}])
def test_backends_without_soft_caps_and_alibi_refuse_them(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = AttentionSpec(4, 2, 64, 0.125, **changes)
    assert CpuAttention.unsupported_reason(spec, torch.float32, 16) is None
    monkeypatch.setattr(CpuAttention, "changes_scores", False)
    assert CpuAttention.unsupported_reason(spec, torch.float32, 16) == (
        "its operators have no parameter for soft caps and ALiBi, which this model's attention needs"
    )


def test_backend_takes_what_it_can() -> None:
    for head_size in HEAD_SIZES:
        for block_size in BLOCK_SIZES:
            spec = AttentionSpec(14, 2, head_size, 0.1, 4096)
            assert all(CpuAttention.unsupported_reason(spec, dtype, block_size) is None for dtype in FLOAT_DTYPES)
