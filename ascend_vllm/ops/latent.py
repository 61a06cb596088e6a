"""Latent attention (MLA): a cache of one compressed row per token, which all heads share.

DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. A head's key is [nope | rotary]: the first part is a product of the
token's latent, the rotary part is the same in all heads. Its value is another product of the latent. So a product of
the query with a key is one of the absorbed query (`heads_linear`) with the token's row of the cache, and values can
be made after they were summed (`latent_attention`): best for few query tokens. For many, keys and values of each head
are computed first, which are shorter than rows of the cache (`expanded_attention`).

Letters: T tokens of a step, R rows (sequences) of a step, B most blocks of a row, N query heads, L latent width,
F width of the rotary part, W = L + F, Q width of the other part of a query, V width of a value, P blocks of the
cache, S tokens of a block. A layer's cache is [P, S, W]: a token has [normalised latent | rotated key]. It is in the
queries' dtype, or has a byte for each number (`ops.kv_bytes`).

Only the positions of a row's sequence are read from its blocks: other contents of the cache, NaN included, never
affect a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ascend_vllm.ops.elementwise import make_cos_sin_cache
from ascend_vllm.ops.experts import packed_stack
from ascend_vllm.ops.gemm import pack_panels, unpack_weight
from ascend_vllm.ops.kv_bytes import largest_number, own_scales, to_bytes
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import OPS, define_op

# Fewest query tokens of a row that `expanded_attention` is for: steps on tapes have fewer.
EXPANDED_MIN_TOKENS = 32


def pays_to_expand(
    query_lens: np.ndarray[Any, np.dtype[np.int32]],
    seq_lens: np.ndarray[Any, np.dtype[np.int32]],
    nope_width: int,
    value_width: int,
    latent_width: int,
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For which rows `expanded_attention` does fewer multiplications than `heads_linear` and `latent_attention`.

    Both multiply with the weights of keys and values: the one for each key, the others for each query token. For each
    pair of them the others do 2·L - Q - V multiplications more. With DeepSeek's widths, rows without a context are
    expanded, and with a long one those of at least 170 query tokens.

    Args:
        query_lens: [R], query tokens of rows.
        seq_lens: [R], tokens in the cache after the step.
        nope_width: Q.
        value_width: V.
        latent_width: L.

    Returns:
        [R]; False for rows with fewer than EXPANDED_MIN_TOKENS query tokens.
    """
    context = (seq_lens - query_lens).astype(np.int64)
    pairs = query_lens * (context + query_lens // 2)
    more = context * latent_width * (nope_width + value_width)
    return (query_lens >= EXPANDED_MIN_TOKENS) & (more < pairs * (2 * latent_width - nope_width - value_width))


def pack_heads(weight: torch.Tensor) -> torch.Tensor:
    """Packs a weight of each head for `heads_linear` and `expanded_attention`.

    Args:
        weight: [N, M, K] float: outputs, inputs.

    Returns:
        [N, panels, K, 16], for bfloat16 [N, panels, ceil(K / 2), 16, 2], with ceil(M / 16) panels.
    """
    heads, outputs, inputs = weight.shape
    packed = packed_stack(heads, outputs, inputs, weight.dtype)
    for head in range(heads):
        pack_panels(weight[head].contiguous(), packed[head], 0)
    return packed


def unpack_heads(packed: torch.Tensor, in_features: int, out_features: int) -> torch.Tensor:
    """The weight [N, M, K] that `pack_heads` packed."""
    return torch.stack([unpack_weight(panels, in_features, out_features) for panels in packed])


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# dtype of a cache of bytes, whether its rows have scales of their own, and the scale of all of them if not
_BYTE_CACHES: tuple[tuple[torch.dtype, bool, float], ...] = (
    (torch.int8, True, 1.0),
    (torch.float8_e4m3fn, True, 1.0),
    (torch.int8, False, 0.03),
    (torch.float8_e4m3fn, False, 0.01),
    (torch.float8_e5m2, False, 1.0),
)


def _byte_cache(
    blocks: int, block_size: int, width: int, dtype: torch.dtype, *, has_scales: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows [P, S, W] and their scales [P, S, 2] with memory of their own, for inputs of the ops.

    Scales are NaN and bytes have all bits but the sign set, which is NaN in the formats that have it.
    """
    rows = torch.full((blocks, block_size, width), 0x7F, dtype=torch.uint8).view(dtype)
    return rows, torch.full((blocks, block_size, 2), math.nan, dtype=torch.bfloat16) if has_scales else None


def _write_rows(
    rows: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    row_scales: torch.Tensor | None,
    row_scale: float,
    latent_width: int,
) -> None:
    """Writes rows [T, W] into slots [T] of a cache, see `store_latent`."""
    blocks, offsets = slots // cache.shape[1], slots % cache.shape[1]
    if cache.dtype == rows.dtype and row_scales is None and row_scale == 1:
        cache[blocks, offsets] = rows
        return
    scales: torch.Tensor | float = row_scale
    if row_scales is not None:
        largest = largest_number(cache.dtype)
        parts = (_wide(rows[:, :latent_width]), _wide(rows[:, latent_width:]))
        own = [own_scales(part, largest) for part in parts]
        row_scales[blocks, offsets] = torch.cat(own, dim=1).to(row_scales.dtype)
        scales = torch.cat([scale.expand_as(part) for scale, part in zip(own, parts, strict=True)], dim=1)
    cache[blocks, offsets] = to_bytes(_wide(rows), scales, cache.dtype)


def _read_rows(
    cache: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    row_scales: torch.Tensor | None,
    row_scale: float,
    latent_width: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The first `length` rows [length, W] of these blocks in a dtype."""
    rows = cache[blocks].flatten(0, 1)[:length].to(dtype)
    if row_scales is None:
        return rows if row_scale == 1 else rows * row_scale
    scales = row_scales[blocks].flatten(0, 1)[:length].to(dtype)
    return torch.cat([rows[:, :latent_width] * scales[:, :1], rows[:, latent_width:] * scales[:, 1:]], dim=1)


def _store_latent_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, heads, latent width, rotary width, other width of a query, block size, share of skipped tokens
    cases = [
        (0, 2, 16, 8, 8, 16, 0.0),
        (1, 16, 512, 64, 128, 32, 0.0),
        (1, 1, 8, 8, 0, 16, 1.0),
        (5, 3, 24, 8, 16, 16, 0.3),
        (33, 4, 72, 24, 40, 64, 0.5),
        (130, 2, 128, 32, 64, 128, 0.1),
    ]
    for seed, (tokens, heads, width, rotary, nope, block_size, skipped) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        for is_neox in (False, True):
            query = torch.randn(tokens, heads, nope + rotary, generator=generator).to(dtype)
            # columns of a fused projection
            fused = torch.randn(tokens, 16 + width + rotary, generator=generator).to(dtype)
            weight = (torch.randn(width, generator=generator) / 5 + 1).to(dtype)
            blocks = tokens // block_size + 2
            cache = torch.randn(blocks, block_size, width + rotary, generator=generator).to(dtype)
            slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
            slots[torch.rand(tokens, generator=generator) < skipped] = -1
            positions = torch.randint(0, 50, (tokens,), generator=generator)
            table = make_cos_sin_cache(50, rotary)
            step = (positions, query[..., nope:], fused[:, 16:], weight, 1e-6, table, is_neox)
            yield *step, cache, slots
            byte_dtype, has_scales, scale = _BYTE_CACHES[(2 * seed + is_neox) % len(_BYTE_CACHES)]
            rows, scales = _byte_cache(blocks, block_size, width + rotary, byte_dtype, has_scales=has_scales)
            yield *step, rows, slots, scales, scale


@define_op(
    inputs=_store_latent_inputs, mutates=("query_rope", "cache", "row_scales"), devices=("cpu",), recordable=True
)
def store_latent(
    positions: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    row_scales: torch.Tensor | None = None,
    row_scale: float = 1.0,
) -> None:
    """Rotates queries, and writes the step's latents, normalised, and keys, rotated, to the cache.

    `rms_norm` of the latents and `rotary_embedding` in one pass.

    Args:
        positions: [T] int64, each in [0, rows of the table).
        query_rope: [T, N, F] float, a view of the queries; tokens and heads may be strided; rotated in place.
        latent: [T, W], dtype of query_rope; rows may be strided. The first L columns are latents, the others keys.
        weight: [L], dtype of query_rope, of the norm.
        epsilon: of the norm.
        cos_sin_cache: [rows, F] float32, as `rotary_embedding`'s.
        is_neox: likewise.
        cache: [P, S, W], contiguous, dtype of query_rope; or int8, float8_e4m3fn or float8_e5m2, of contiguous
            blocks, with at most 1,024 numbers in a row; written.
        slot_mapping: [T] int64, KV slot (block * S + offset) of each token, no slot twice; of tokens with a negative
            slot only the queries are rotated.
        row_scales: [P, S, 2] bfloat16 of contiguous blocks, written: for a cache of bytes whose latents and keys have
            scales of their own, see `kv_bytes.own_scales`; None: they have not.
        row_scale: of all numbers in a cache of bytes; 1 otherwise, and with scales of their own.
    """
    tokens, heads, rotary = query_rope.shape
    width = weight.shape[0]
    query = query_rope.reshape(tokens, heads * rotary)
    key = latent[:, width:].clone()
    OPS["rotary_embedding"].reference(positions, query, key, rotary, cos_sin_cache, is_neox)
    query_rope.copy_(query.view(tokens, heads, rotary))
    rows = torch.cat([OPS["rms_norm"].reference(latent[:, :width], weight, epsilon), key], dim=1)
    kept = slot_mapping >= 0
    _write_rows(rows[kept], cache, slot_mapping[kept], row_scales, row_scale, width)


def _heads_linear_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, heads, inputs, outputs, columns behind the inputs: none; odd; parts of panels; slices; many rows
    cases = [(0, 2, 16, 16, 0), (1, 1, 1, 1, 0), (1, 16, 128, 512, 64), (2, 3, 7, 33, 8), (3, 2, 512, 128, 0)]
    cases += [(5, 4, 65, 40, 8), (7, 2, 600, 20, 0), (33, 3, 24, 50, 16), (200, 2, 48, 70, 0), (420, 1, 16, 16, 8)]
    for seed, (tokens, heads, inputs, outputs, further) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        weight = (torch.randn(heads, outputs, inputs, generator=generator) / math.sqrt(inputs)).to(dtype)
        wide = torch.randn(tokens, 2, heads, inputs + further, generator=generator).to(dtype)
        x = wide[:, 1] if seed % 2 else wide[:, 0].contiguous()
        yield x, pack_heads(weight), inputs, outputs


@define_op(inputs=_heads_linear_inputs, devices=("cpu",), recordable=True)
def heads_linear(x: torch.Tensor, packed: torch.Tensor, in_features: int, out_features: int) -> torch.Tensor:
    """`x[:, n, :K] @ weight[n].T` for each head n; columns of x behind those are copied behind the result.

    With the weights that turn queries into the space of latents, and the rotary part of queries behind the others,
    this makes the queries of `latent_attention`; with the weights of values, it turns its results into values.

    Args:
        x: [T, N, K + F] float; tokens and heads may be strided.
        packed: the weight [N, M, K] as `pack_heads` returns it, dtype of x.
        in_features: K.
        out_features: M.

    Returns:
        [T, N, M + F], contiguous, dtype of x. A token's result does not depend on the other tokens.
    """
    weight = _wide(unpack_heads(packed, in_features, out_features))
    product = torch.einsum("tnk,nmk->tnm", _wide(x[..., :in_features]), weight).to(x.dtype)
    return torch.cat([product, x[..., in_features:]], dim=-1)


def make_latent_problem(
    dtype: torch.dtype,
    rows: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    latent_width: int,
    rotary_width: int,
    block_size: int,
    query_width: int | None = None,
    padding: int = 0,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries, cache, block table, query starts and lengths of a step.

    Blocks are assigned in random order; cache entries that no row may read are NaN, and unused entries of the block
    table point to a block of NaN.

    Args:
        dtype: of the query and the cache.
        rows: (query tokens, tokens in the cache after the step) of each row.
        num_heads: N.
        latent_width: L.
        rotary_width: F.
        block_size: S.
        query_width: of a query's head; None: W.
        padding: tokens at the end of the query that belong to no row.
        seed: of all randomness.
    """
    generator = torch.Generator().manual_seed(seed)
    width = latent_width + rotary_width
    query_start = torch.zeros(len(rows) + 1, dtype=torch.int32)
    query_start[1:] = torch.tensor([query_len for query_len, _ in rows], dtype=torch.int32).cumsum(0)
    seq_lens = torch.tensor([seq_len for _, seq_len in rows], dtype=torch.int32)
    blocks_of_row = [-(-seq_len // block_size) for _, seq_len in rows]
    # the last block belongs to no row
    num_blocks = sum(blocks_of_row) + 1
    cache = torch.full((num_blocks, block_size, width), math.nan)
    order = torch.randperm(num_blocks - 1, generator=generator).to(torch.int32)
    block_table = torch.full((len(rows), max(blocks_of_row, default=0) + 1), num_blocks - 1, dtype=torch.int32)
    taken = 0
    for row, (query_len, seq_len) in enumerate(rows):
        blocks = order[taken : taken + blocks_of_row[row]]
        taken += blocks_of_row[row]
        block_table[row, : blocks_of_row[row]] = blocks
        positions = torch.arange(seq_len if query_len else 0)
        latents = torch.randn(len(positions), width, generator=generator)
        cache[blocks[positions // block_size].long(), positions % block_size] = latents
    tokens = int(query_start[-1]) + padding
    query = torch.randn(tokens, num_heads, query_width or width, generator=generator)
    return query.to(dtype), cache.to(dtype), block_table, query_start, seq_lens


def _latent_attention_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows as (query tokens, tokens in the cache), N, L, F, S, padding
    cases: list[tuple[list[tuple[int, int]], int, int, int, int, int]] = [
        # no rows; rows without tokens
        ([], 2, 16, 8, 16, 0),
        ([(0, 0)], 2, 16, 8, 16, 0),
        ([(0, 5), (0, 17)], 2, 16, 8, 16, 3),
        # one token that sees itself
        ([(1, 1)], 1, 8, 8, 16, 0),
        # decoding: numbers of heads around those of lanes; contexts around block edges and beyond one split
        ([(1, 16), (1, 17), (1, 15), (1, 300)], 4, 32, 16, 16, 0),
        ([(1, 33), (1, 1), (1, 700)], 16, 64, 32, 32, 1),
        ([(1, 1500), (1, 64)], 9, 40, 8, 64, 0),
        ([(1, 127), (1, 129)], 128, 104, 24, 128, 0),
        ([(1, 90)], 16, 512, 64, 32, 0),
        ([(1, 600)], 20, 128, 64, 16, 0),
        # chunks, prompts, mixtures, more than a work item
        ([(5, 5)], 2, 16, 8, 16, 0),
        ([(33, 161), (2, 40)], 6, 72, 24, 32, 2),
        ([(40, 700)], 5, 48, 16, 64, 0),
        ([(1, 50), (0, 9), (20, 70), (1, 1), (1, 600), (37, 37), (0, 0), (2, 18)], 8, 48, 16, 16, 1),
    ]
    for seed, (rows, heads, width, rotary, block_size, padding) in enumerate(cases):
        problem = make_latent_problem(
            dtype,
            rows,
            num_heads=heads,
            latent_width=width,
            rotary_width=rotary,
            block_size=block_size,
            padding=padding,
            seed=seed,
        )
        yield *problem, (width + rotary) ** -0.5, width
        query, cache, *step = problem
        byte_rows, *scales = latent_bytes(cache, width, *_BYTE_CACHES[seed % len(_BYTE_CACHES)])
        yield query, byte_rows, *step, (width + rotary) ** -0.5, width, *scales


def latent_bytes(
    cache: torch.Tensor, latent_width: int, dtype: torch.dtype, has_scales: bool, row_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor | None, float]:
    """A cache of `make_latent_problem` in bytes; what no row may read is the largest byte, or NaN.

    Args:
        cache: [P, S, W].
        latent_width: L.
        dtype: one of `kv_bytes.BYTE_DTYPES`.
        has_scales: its rows have scales of their own.
        row_scale: of all if they have not.

    Returns:
        Rows, their scales, and the scale of all.
    """
    blocks, block_size, width = cache.shape
    rows, scales = _byte_cache(blocks, block_size, width, dtype, has_scales=has_scales)
    slots = (~cache[..., 0].isnan()).flatten().nonzero()[:, 0]
    _write_rows(cache.flatten(0, 1)[slots], rows, slots, scales, row_scale, latent_width)
    return rows, scales, row_scale


def _attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last tokens of a sequence, [q, N, D], to all: keys [N, k, D], values [N, k, V]."""
    count, total = len(query), keys.shape[1]
    masked = torch.ones(count, total, dtype=torch.bool, device=query.device).triu(total - count + 1)
    scores = (query.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(masked, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32))
    return (weights.to(values.dtype) @ values).transpose(0, 1)


@define_op(inputs=_latent_attention_inputs, tolerance=2e-5, devices=("cpu",), recordable=True)
def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    value_width: int,
    row_scales: torch.Tensor | None = None,
    row_scale: float = 1.0,
) -> torch.Tensor:
    """Causal attention of each row's absorbed queries to the rows of the cache.

    Row r has tokens query_start[r] … query_start[r+1]-1, and the last of them is at position seq_lens[r]-1. A token
    at position p attends to positions 0 … p. The kernel reads a row of the cache once for all heads. A row's result
    does not depend on the other rows, the order of its blocks in the cache or the number of threads.

    Args:
        query: [T, N, W]; tokens and heads may be strided; W is a multiple of 8.
        cache: [P, S, W] in query's dtype or of bytes, as `store_latent`'s; S is 16, 32, 64 or 128.
        block_table: [R, B] int32, block of each S positions; entries that a row does not attend to are not read.
        query_start: [R+1] int32, ascending.
        seq_lens: [R] int32.
        scale: factor on query·key, greater than 0.
        value_width: L, a multiple of 8: the value of a position is the first L numbers of its row.
        row_scales: as `store_latent`'s. Numbers times their scale are rounded to query's dtype.
        row_scale: likewise.

    Returns:
        [T, N, L] in query's dtype, contiguous; zero for tokens that belong to no row.
    """
    output = torch.zeros(*query.shape[:2], value_width, dtype=query.dtype, device=query.device)
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if start < end:
            blocks = block_table[row, : -(-seq_len // cache.shape[1])].long()
            keys = _read_rows(cache, blocks, seq_len, row_scales, row_scale, value_width, query.dtype)[None]
            output[start:end] = _attend(query[start:end], keys, keys[..., :value_width], scale)
    return output


def _expanded_attention_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows as (query tokens, tokens in the cache), N, L, F, Q, V, S, padding
    cases: list[tuple[list[tuple[int, int]], int, int, int, int, int, int, int]] = [
        ([], 2, 16, 8, 8, 8, 16, 0),
        ([(0, 5)], 2, 16, 8, 8, 16, 16, 1),
        ([(1, 1)], 1, 8, 8, 8, 8, 16, 0),
        ([(5, 5)], 2, 16, 8, 16, 16, 16, 0),
        ([(200, 200)], 2, 64, 16, 32, 32, 16, 0),
        ([(97, 333), (2, 40)], 3, 40, 8, 24, 40, 32, 1),
        ([(40, 700)], 5, 128, 32, 64, 48, 64, 0),
        ([(20, 150)], 2, 512, 64, 128, 128, 128, 0),
        ([(1, 50), (20, 70), (4, 9), (37, 37)], 4, 48, 16, 32, 16, 16, 1),
    ]
    for seed, (rows, heads, width, rotary, nope, values, block_size, padding) in enumerate(cases):
        query, cache, *step = make_latent_problem(
            dtype,
            rows,
            num_heads=heads,
            latent_width=width,
            rotary_width=rotary,
            block_size=block_size,
            query_width=nope + rotary,
            padding=padding,
            seed=seed,
        )
        generator = torch.Generator().manual_seed(seed)
        weights = [
            pack_heads((torch.randn(heads, size, width, generator=generator) / math.sqrt(width)).to(dtype))
            for size in (nope, values)
        ]
        out = torch.zeros(len(query), heads, values, dtype=dtype)
        yield query, cache, *weights, *step, (nope + rotary) ** -0.5, out
        byte_rows, *scales = latent_bytes(cache, width, *_BYTE_CACHES[seed % len(_BYTE_CACHES)])
        yield query, byte_rows, *weights, *step, (nope + rotary) ** -0.5, out.clone(), *scales


@define_op(inputs=_expanded_attention_inputs, mutates=("out",), tolerance=2e-5, devices=("cpu",))
def expanded_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    row_scales: torch.Tensor | None = None,
    row_scale: float = 1.0,
) -> None:
    """Causal attention of rows with many query tokens, to keys and values that are made of the cache first.

    A head's key is [its product with the latent | the rotated key of the cache]; rows are as in `latent_attention`.

    Args:
        query: [T, N, Q + F], the last F columns rotated; tokens and heads may be strided; Q + F is a multiple of 8.
        cache: as in `latent_attention`.
        keys: the weight [N, Q, L] of keys as `pack_heads` returns it, query's dtype.
        values: likewise, the weight [N, V, L] of values.
        block_table: as in `latent_attention`.
        query_start: likewise.
        seq_lens: likewise.
        scale: factor on query·key, greater than 0.
        out: [T, N, V] in query's dtype, contiguous; V is a multiple of 8; written, but for tokens that belong to
            no row.
        row_scales: as in `latent_attention`.
        row_scale: likewise.
    """
    width = keys.shape[2] * (keys.shape[4] if keys.dim() == 5 else 1)
    rotary = cache.shape[2] - width
    key_weight = _wide(unpack_heads(keys, width, query.shape[2] - rotary))
    value_weight = _wide(unpack_heads(values, width, out.shape[2]))
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, seq_len in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        blocks = block_table[row, : -(-seq_len // cache.shape[1])].long()
        rows = _read_rows(cache, blocks, seq_len, row_scales, row_scale, width, query.dtype)
        latents = _wide(rows[:, :width])
        expanded = (latents @ key_weight.transpose(1, 2)).to(rows.dtype)
        all_keys = torch.cat([expanded, rows[:, width:].expand(len(expanded), -1, -1)], dim=-1)
        all_values = (latents @ value_weight.transpose(1, 2)).to(rows.dtype)
        out[start:end] = _attend(query[start:end], all_keys, all_values, scale)


load_native_library()
