"""The paged KV cache: writing to it, and attention that reads it.

Letters: T tokens of a step, R rows (sequences) of a step, B most blocks of a row, N query heads, K KV heads,
D head size, P blocks of the cache, S tokens of a block. A layer's cache is [2, P, K, S, D]; its two halves are
the key cache and the value cache below. It is in the dtype of keys and values, or has a byte for each number
(`ops.kv_bytes`).

Only the positions of a row's sequence are read from its blocks: other contents of the cache, NaN included, never
affect a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ascend_vllm.ops.elementwise import make_cos_sin_cache
from ascend_vllm.ops.kv_bytes import from_bytes, largest_number, own_scales, to_bytes
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import OPS, define_op

HEAD_SIZES = range(16, 257, 8)
BLOCK_SIZES = (16, 32, 64, 128)

# dtype of a cache of bytes, whether its numbers have scales of their own, and the scales of keys and values if not
_BYTE_CACHES: tuple[tuple[torch.dtype, bool, float, float], ...] = (
    (torch.int8, True, 1.0, 1.0),
    (torch.float8_e4m3fn, True, 1.0, 1.0),
    (torch.int8, False, 0.03, 0.05),
    (torch.float8_e4m3fn, False, 1.0, 1.0),
    (torch.float8_e4m3fn, False, 0.01, 0.004),
    (torch.float8_e5m2, False, 1.0, 1.0),
)


def _byte_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, has_scales: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Keys, values [P, K, S, D] and their scales [P, K, S], all with memory of their own, for inputs of the ops.

    Scales are NaN and bytes have all bits but the sign set, which is NaN in the formats that have it.
    """
    numbers = torch.full((2, *shape), 0x7F, dtype=torch.uint8).view(dtype)
    scales = torch.full((2, *shape[:3]), float("nan"), dtype=torch.bfloat16) if has_scales else None
    return (*numbers.unbind(0), *((None, None) if scales is None else scales.unbind(0)))


def _store_kv_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    # tokens, KV heads, head size, block size, blocks, share of skipped tokens, whether rows are views of a fused qkv
    cases = [
        (0, 2, 16, 16, 2, 0.0, False),
        (1, 1, 16, 16, 1, 0.0, False),
        (1, 1, 16, 16, 1, 1.0, False),
        (7, 2, 32, 16, 3, 0.3, True),
        (33, 3, 24, 32, 4, 0.0, True),
        (65, 4, 72, 64, 3, 0.5, False),
        (300, 8, 128, 128, 5, 0.1, True),
        (40, 2, 256, 16, 8, 0.1, True),
    ]
    for tokens, kv_heads, head_size, block_size, blocks, skipped, fused in cases:
        if fused:
            # views of a fused projection: a query of kv_heads heads, key, value
            qkv = torch.randn(tokens, 3 * kv_heads * head_size, generator=generator, dtype=torch.float32).to(dtype)
            _, key, value = (part.view(tokens, kv_heads, head_size) for part in qkv.chunk(3, dim=-1))
        else:
            key, value = torch.randn(2, tokens, kv_heads, head_size, generator=generator).to(dtype).unbind(0)
        cache = torch.randn(2, blocks, kv_heads, block_size, head_size, generator=generator).to(dtype)
        slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
        slots[torch.rand(tokens, generator=generator) < skipped] = -1
        yield key, value, cache[0], cache[1], slots
        for byte_dtype, has_scales, *scales in _BYTE_CACHES:
            shape = (blocks, kv_heads, block_size, head_size)
            parts = _byte_cache(shape, byte_dtype, has_scales=has_scales)
            # rows of zeros, and numbers too large for the scale of all
            factors = torch.randint(0, 4, (tokens, kv_heads, 1), generator=generator)
            yield (key * factors).to(dtype), value, *parts[:2], slots, *parts[2:], *scales


_CACHE_ARGUMENTS = ("key_cache", "value_cache", "key_scales", "value_scales")


def _write(
    numbers: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, scales: torch.Tensor | None, scale: float
) -> None:
    """Writes numbers [T, K, D] into slots [T] of a cache of keys or values, see `store_kv`."""
    blocks, offsets = slots // cache.shape[2], slots % cache.shape[2]
    if cache.dtype == numbers.dtype and scales is None and scale == 1:
        cache[blocks, :, offsets] = numbers
        return
    wide = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    own: torch.Tensor | float = scale
    if scales is not None:
        own = own_scales(wide, largest_number(cache.dtype))
        scales[blocks, :, offsets] = own[..., 0].to(scales.dtype)
    cache[blocks, :, offsets] = to_bytes(wide, own, cache.dtype)


@define_op(inputs=_store_kv_inputs, mutates=_CACHE_ARGUMENTS, tolerance=0.0, devices=("cpu",), recordable=True)
def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Writes the keys and values of a step into their KV slots.

    Args:
        key: [T, K, D]; tokens and heads may be strided, as views of a fused projection are.
        value: [T, K, D], likewise.
        key_cache: [P, K, S, D], key's dtype, int8, float8_e4m3fn or float8_e5m2; written. A head's block is
            contiguous, and heads, then blocks, follow one another at equal distances.
        value_cache: [P, K, S, D], likewise.
        slot_mapping: [T] int64, KV slot (block * S + offset) of each token, no slot twice; tokens with a negative
            slot are skipped.
        key_scales: [P, K, S] bfloat16, written: for a cache of bytes whose numbers have scales of their own, see
            `kv_bytes.own_scales`; None: they have not.
        value_scales: likewise.
        k_scale: of all keys in a cache of bytes; 1 otherwise, and with scales of their own.
        v_scale: likewise of values.

    Example:
        >>> cache = torch.zeros(2, 4, 1, 16, 16)
        >>> store_kv(torch.ones(1, 1, 16), torch.ones(1, 1, 16), cache[0], cache[1], torch.tensor([17]))
        >>> cache[0, 1, 0, 1].sum().item()
        16.0
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    _write(key[kept], key_cache, slots, key_scales, k_scale)
    _write(value[kept], value_cache, slots, value_scales, v_scale)


def _rotary_store_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, query heads per KV head, KV heads, head size, rotated part of it, block size, share of skipped tokens
    cases = [
        (0, 2, 1, 16, 16, 16, 0.0),
        (1, 7, 2, 64, 64, 32, 0.0),
        (1, 1, 1, 16, 2, 16, 1.0),
        (5, 3, 2, 24, 8, 16, 0.3),
        (33, 2, 3, 72, 18, 64, 0.5),
        (130, 2, 4, 128, 128, 128, 0.1),
        (40, 1, 2, 256, 64, 16, 0.1),
    ]
    for seed, (tokens, group, kv_heads, size, rot_dim, block_size, skipped) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        widths = [group * kv_heads * size, kv_heads * size, kv_heads * size]
        for is_neox in (True, False):
            # views of a fused projection
            qkv = torch.randn(tokens, sum(widths), generator=generator).to(dtype)
            query, key, value = qkv.tensor_split((widths[0], widths[0] + widths[1]), dim=-1)
            blocks = tokens // block_size + 2
            cache = torch.randn(2, blocks, kv_heads, block_size, size, generator=generator).to(dtype)
            slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
            slots[torch.rand(tokens, generator=generator) < skipped] = -1
            positions = torch.randint(0, 50, (tokens,), generator=generator)
            rotary = (positions, query, key, value, make_cos_sin_cache(50, rot_dim), is_neox)
            yield *rotary, cache[0], cache[1], slots
            for byte_dtype, has_scales, *scales in _BYTE_CACHES[:3]:
                shape = (blocks, kv_heads, block_size, size)
                parts = _byte_cache(shape, byte_dtype, has_scales=has_scales)
                yield *rotary, *parts[:2], slots, *parts[2:], *scales


@define_op(inputs=_rotary_store_inputs, mutates=("query", *_CACHE_ARGUMENTS), devices=("cpu",), recordable=True)
def rotary_store_kv(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """`rotary_embedding` and `store_kv` in one pass; rotated keys are written to the cache only.

    Args:
        positions: [T] int64, each in [0, rows of the table).
        query: [T, N*D]; rows may be strided; rotated in place.
        key: [T, K*D]; rows may be strided; not changed.
        value: [T, K*D], likewise.
        cos_sin_cache: [.., rot_dim] float32, as `rotary_embedding`'s.
        is_neox: as `rotary_embedding`'s.
        key_cache: [P, K, S, D], as `store_kv`'s; so are the others.
        value_cache: [P, K, S, D].
        slot_mapping: [T] int64.
        key_scales: [P, K, S] bfloat16, or None.
        value_scales: [P, K, S] bfloat16, or None.
        k_scale: of all keys.
        v_scale: of all values.
    """
    kv_heads, head_size = key_cache.shape[1], key_cache.shape[3]
    rotated = key.clone()
    OPS["rotary_embedding"].reference(positions, query, rotated, head_size, cos_sin_cache, is_neox)
    shape = (key.shape[0], kv_heads, head_size)
    scales = (key_scales, value_scales, k_scale, v_scale)
    OPS["store_kv"].reference(rotated.view(shape), value.view(shape), key_cache, value_cache, slot_mapping, *scales)


def make_paged_problem(
    dtype: torch.dtype,
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int,
    sliding_window: int = 0,
    padding: int = 0,
    soft_cap: float = 0.0,
    alibi: bool = False,
    seed: int = 0,
) -> tuple[Any, ...]:
    """Random arguments of `paged_attention`.

    Blocks are assigned in random order; cache entries that no row may read are NaN, and unused entries of the block
    table point to a block of NaN.

    Args:
        dtype: of the query and the cache.
        rows: (query tokens, tokens in the cache after the step) of each row.
        num_heads: N.
        num_kv_heads: K.
        head_size: D.
        block_size: S.
        sliding_window: as the op's.
        padding: tokens at the end of the query that belong to no row.
        soft_cap: as the op's.
        alibi: with random slopes. Without both, the arguments for them are left out.
        seed: of all randomness.
    """
    generator = torch.Generator().manual_seed(seed)
    query_lens = torch.tensor([query_len for query_len, _ in rows], dtype=torch.int32)
    seq_lens = torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32)
    query_start = torch.zeros(len(rows) + 1, dtype=torch.int32)
    query_start[1:] = query_lens.cumsum(0)
    num_tokens = sum(query_len for query_len, _ in rows) + padding
    blocks_of_row = [-(-seq_len // block_size) for _, seq_len in rows]
    # the last block belongs to no row
    num_blocks = sum(blocks_of_row) + 1
    cache = torch.randn(2, num_blocks, num_kv_heads, block_size, head_size, generator=generator)
    readable = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    order = torch.randperm(num_blocks - 1, generator=generator).to(torch.int32)
    block_table = torch.full((len(rows), max(blocks_of_row, default=0) + 1), num_blocks - 1, dtype=torch.int32)
    taken = 0
    for row, (query_len, seq_len) in enumerate(rows):
        blocks = order[taken : taken + blocks_of_row[row]]
        taken += blocks_of_row[row]
        oldest = max(0, seq_len - query_len - sliding_window + 1) if sliding_window else 0
        first_block = oldest // block_size
        block_table[row, first_block : blocks_of_row[row]] = blocks[first_block:]
        positions = torch.arange(oldest, seq_len if query_len else oldest)
        readable[blocks[positions // block_size].long(), positions % block_size] = True
    cache.masked_fill_(~readable[None, :, None, :, None], float("nan"))
    query = torch.randn(num_tokens, num_heads, head_size, generator=generator)
    arguments = (
        query.to(dtype),
        *cache.to(dtype).unbind(0),
        block_table,
        query_start,
        seq_lens,
        head_size**-0.5,
        sliding_window,
    )
    if not soft_cap and not alibi:
        return arguments
    return (*arguments, soft_cap, torch.rand(num_heads, generator=generator) if alibi else None)


def with_byte_cache(
    problem: tuple[Any, ...],
    dtype: torch.dtype,
    *,
    has_scales: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[Any, ...]:
    """A problem of `make_paged_problem` with its cache in bytes; what no row may read is the largest byte, or NaN.

    Args:
        problem: the arguments of `paged_attention`.
        dtype: of the cache, one of BYTE_DTYPES.
        has_scales: its numbers have scales of their own.
        k_scale: of all keys if they have not.
        v_scale: of all values.
    """
    query, key_cache, value_cache, *rest = problem
    *cache, key_scales, value_scales = _byte_cache(tuple(key_cache.shape), dtype, has_scales=has_scales)
    slots = (~key_cache[:, 0, :, 0].isnan()).flatten().nonzero()[:, 0]
    written = [part.transpose(1, 2).flatten(0, 1)[slots] for part in (key_cache, value_cache)]
    scales = (key_scales, value_scales, k_scale, v_scale)
    OPS["store_kv"].reference(*written, *cache, slots, *scales)
    changes = rest[-2:] if len(rest) > 5 else (0.0, None)
    return (query, *cache, *rest[:5], *changes, *scales)


def _paged_attention_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows as (query tokens, tokens in the cache), N, K, D, S, window, padding
    cases: list[tuple[list[tuple[int, int]], int, int, int, int, int, int]] = [
        # no rows; rows without tokens
        ([], 2, 1, 16, 16, 0, 0),
        ([(0, 0)], 2, 1, 16, 16, 0, 0),
        ([(0, 5), (0, 17)], 2, 1, 16, 16, 0, 3),
        # one token that sees itself
        ([(1, 1)], 1, 1, 16, 16, 0, 0),
        # decoding: MHA, GQA of even and odd groups, MQA; contexts around block edges and beyond one split
        ([(1, 16), (1, 17), (1, 15), (1, 300)], 4, 4, 32, 16, 0, 0),
        ([(1, 33), (1, 1), (1, 700)], 4, 2, 40, 32, 0, 1),
        ([(1, 64), (1, 1500)], 14, 2, 64, 64, 0, 0),
        ([(1, 127), (1, 129)], 9, 3, 128, 128, 0, 0),
        ([(1, 100), (1, 2)], 16, 1, 80, 16, 0, 0),
        ([(1, 70)], 10, 2, 256, 16, 0, 0),
        # prompts: one shot, and chunks over a paged prefix
        ([(5, 5)], 2, 2, 16, 16, 0, 0),
        ([(130, 130)], 4, 2, 64, 16, 0, 0),
        ([(97, 333), (2, 40)], 7, 1, 96, 32, 0, 0),
        ([(64, 64), (65, 129)], 4, 4, 128, 64, 0, 2),
        ([(33, 161)], 6, 2, 24, 128, 0, 0),
        ([(40, 90)], 4, 1, 256, 16, 0, 0),
        # a short chunk over a prefix longer than one split
        ([(3, 1300)], 8, 2, 64, 16, 0, 0),
        # mixtures, with rows that have no tokens in this step
        ([(1, 50), (0, 9), (20, 70), (1, 1), (1, 600), (37, 37), (0, 0), (2, 18)], 8, 2, 48, 16, 0, 1),
        # sliding windows: of one token, within a block, around its edge, longer than everything
        ([(1, 40), (9, 30)], 4, 2, 32, 16, 1, 0),
        ([(1, 700), (50, 200), (1, 3), (64, 64)], 4, 2, 64, 16, 7, 0),
        ([(1, 64), (1, 65), (100, 190)], 8, 1, 56, 32, 32, 0),
        ([(1, 1400), (200, 260), (6, 1200)], 14, 2, 64, 64, 100, 0),
        ([(1, 90), (30, 90)], 2, 2, 128, 128, 4096, 0),
        # three, six and eight rows of a KV head, of heads that whole vectors of pairs or of bytes fit; with a window
        ([(1, 40), (3, 130)], 2, 2, 64, 16, 0, 0),
        ([(1, 33), (1, 200)], 12, 2, 96, 16, 0, 0),
        ([(1, 70), (2, 500)], 8, 2, 64, 32, 24, 0),
        ([(1, 17), (1, 600)], 8, 1, 128, 16, 0, 0),
    ]
    names = ("num_heads", "num_kv_heads", "head_size", "block_size", "sliding_window", "padding")
    for seed, (rows, *sizes) in enumerate(cases):
        options: dict[str, Any] = dict(zip(names, sizes, strict=True))
        yield make_paged_problem(dtype, rows, seed=seed, **options)
    # soft caps that bend all scores, and ALiBi: decoding, prompts, chunks, windows, every form of the kernel
    changed: list[tuple[float, bool]] = [(0.5, False), (0.0, True), (2.0, True)]
    for seed, (soft_cap, alibi) in enumerate(changed):
        for number in (4, 7, 10, 12, 16, 17, 19):
            rows, *sizes = cases[number]
            options = dict(zip(names, sizes, strict=True))
            problem = make_paged_problem(dtype, rows, soft_cap=soft_cap, alibi=alibi, seed=seed, **options)
            yield problem
            if number in (4, 16):
                yield with_byte_cache(problem, torch.int8, has_scales=True)
    # caches of bytes, in every form of the kernel: decoding, prompts, chunks, mixtures, windows
    for number in (1, 2, 3, 5, 8, 9, 11, 12, 14, 15, 16, 18, 20, *range(23, len(cases))):
        rows, *sizes = cases[number]
        options = dict(zip(names, sizes, strict=True))
        problem = make_paged_problem(dtype, rows, seed=number, **options)
        for byte_dtype, has_scales, k_scale, v_scale in _BYTE_CACHES:
            yield with_byte_cache(problem, byte_dtype, has_scales=has_scales, k_scale=k_scale, v_scale=v_scale)


@define_op(inputs=_paged_attention_inputs, tolerance=2e-5, devices=("cpu",), recordable=True)
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention of each row's tokens to the row's blocks; decoding rows and prompt chunks in one call.

    Row r has tokens query_start[r] … query_start[r+1]-1, and the last of them is at position seq_lens[r]-1.
    A token at position p attends to positions 0 … p, or with a sliding window to the last sliding_window of
    those. A row's result does not depend on the other rows, the order of its blocks in the cache or the number of
    threads.

    Args:
        query: [T, N, D]; tokens and heads may be strided.
        key_cache: [P, K, S, D], as `store_kv` writes it; N is a multiple of K, and query heads
            k*N/K … (k+1)*N/K-1 share KV head k.
        value_cache: [P, K, S, D], likewise.
        block_table: [R, B] int32, block of each S positions; entries that a row does not attend to are not read.
        query_start: [R+1] int32, ascending.
        seq_lens: [R] int32.
        scale: factor on query·key.
        sliding_window: positions a token sees, itself included; 0: all.
        soft_cap: c > 0 makes c·tanh(score / c) of each scaled score; 0: scores stay as they are.
        alibi_slopes: [N] float32, factors on the distance from token to key, which is subtracted from the scores
            (Press et al., "Train Short, Test Long", 2022); None: nothing is.
        key_scales: [P, K, S] bfloat16, as `store_kv`'s; so are the following.
        value_scales: [P, K, S] bfloat16, or None.
        k_scale: of all keys.
        v_scale: of all values.

    Returns:
        [T, N, D] in query's dtype, contiguous; zero for tokens that belong to no row.
    """
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[1]
    block_size = key_cache.shape[2]
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    softmax_dtype = torch.promote_types(query.dtype, torch.float32)
    # written for readability: one row at a time, with a device synchronisation
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        oldest = max(0, seq_len - (end - start) - sliding_window + 1) if sliding_window else 0
        first_block = oldest // block_size
        blocks = block_table[row, first_block : -(-seq_len // block_size)].long()
        visible = slice(oldest - first_block * block_size, seq_len - first_block * block_size)
        keys, values = (
            # [K, keys, D] -> [N, keys, D]
            from_bytes(cache[blocks], None if scales is None else scales[blocks], scale_of_all, query.dtype)
            .transpose(0, 1)
            .flatten(1, 2)[:, visible]
            .repeat_interleave(num_heads // num_kv_heads, 0)
            for cache, scales, scale_of_all in (
                (key_cache, key_scales, k_scale),
                (value_cache, value_scales, v_scale),
            )
        )
        query_positions = torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
        key_positions = torch.arange(oldest, seq_len, device=query.device)[None, :]
        masked = key_positions > query_positions
        if sliding_window:
            masked |= key_positions <= query_positions - sliding_window
        scores = query[start:end].transpose(0, 1) @ keys.transpose(1, 2) * scale
        if soft_cap:
            scores = (scores / soft_cap).tanh() * soft_cap
        if alibi_slopes is not None:
            scores = scores + alibi_slopes[:, None, None] * (key_positions - query_positions)
        weights = scores.masked_fill(masked, float("-inf")).softmax(-1, dtype=softmax_dtype)
        output[start:end] = (weights.to(values.dtype) @ values).transpose(0, 1)
    return output


load_native_library()
