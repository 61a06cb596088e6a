"""Attention on CPUs, over the paged ops and those of latent attention."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ascend_vllm.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    ForwardBatch,
    LatentSpec,
    LatentWeights,
    RotaryStep,
)
from ascend_vllm.ops.kv_bytes import BYTE_DTYPES, ByteCache, LatentByteCache
from ascend_vllm.ops.latent import (
    EXPANDED_MIN_TOKENS,
    expanded_attention,
    heads_linear,
    latent_attention,
    pays_to_expand,
    store_latent,
)
from ascend_vllm.ops.paged import BLOCK_SIZES, HEAD_SIZES, paged_attention, rotary_store_kv, store_kv
from ascend_vllm.ops.registry import FLOAT_DTYPES
from ascend_vllm.types.kv_cache import KEY_VALUE, LATENT, KVCacheSpec

# a layer's cache of bytes
_Bytes: TypeAlias = ByteCache | LatentByteCache
# those of rows in a cache of latents, or None, and of all of them
_RowScales: TypeAlias = tuple[torch.Tensor | None, float]
_NO_SCALES: _RowScales = (None, 1.0)

_BYTE_FORMATS = tuple(str(dtype).removeprefix("torch.") for dtype in BYTE_DTYPES)


class CpuAttention(AttentionBackend):
    """A layer's cache is [2, P, K, S, D] in the model's dtype: keys or values of a head are contiguous in blocks.

    That of latent attention is [P, S, W]; those of a byte per number are `ByteCache` and `LatentByteCache`.
    """

    name = "cpu"
    dtypes = FLOAT_DTYPES
    head_sizes = HEAD_SIZES
    block_sizes = BLOCK_SIZES
    changes_scores = True
    supports_latent = True

    @classmethod
    def _unsupported_sizes_reason(cls, spec: AttentionSpec) -> str | None:
        reason = super()._unsupported_sizes_reason(spec)
        return reason or (None if spec.latent is None else _odd_width(spec.latent))

    @classmethod
    def unsupported_cache_reason(cls, cache: KVCacheSpec, dtype: torch.dtype) -> str | None:
        if cache.kind in (KEY_VALUE, LATENT) and cache.dtype in _BYTE_FORMATS:
            return None
        return super().unsupported_cache_reason(cache, dtype)

    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        _, block_size, num_kv_heads, head_size = cache.block_shape
        if cache.kind == LATENT:
            return (num_blocks, block_size, head_size)
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    def make_cache(self, memory: torch.Tensor, num_blocks: int, cache: KVCacheSpec) -> torch.Tensor | _Bytes:
        if cache.dtype not in _BYTE_FORMATS:
            made: torch.Tensor = super().make_cache(memory, num_blocks, cache)
            return made
        _, block_size, num_kv_heads, head_size = cache.block_shape
        dtype = getattr(torch, cache.dtype)
        if cache.kind == LATENT:
            return LatentByteCache.over(memory.view(num_blocks, -1), block_size, head_size, dtype)
        planes = memory.view(2, num_blocks, num_kv_heads, -1)
        return ByteCache.over(planes, block_size, head_size, dtype)

    def host_planes(self, kv_cache: torch.Tensor | _Bytes) -> Sequence[torch.Tensor]:
        cache = _bytes_of(kv_cache).view(torch.uint8)
        planes = (cache,) if _block_dim(cache) == 0 else cache.unbind(0)
        return [plane.flatten(1) for plane in planes]

    def copy_blocks(
        self,
        source: torch.Tensor | _Bytes,
        source_blocks: torch.Tensor,
        target: torch.Tensor | _Bytes,
        target_blocks: torch.Tensor,
    ) -> None:
        source, target = _bytes_of(source), _bytes_of(target)
        dim = _block_dim(source)
        blocks = source.index_select(dim, source_blocks)
        target.index_copy_(dim, target_blocks, blocks.to(target.device))

    def prepare(self, batch: ForwardBatch) -> None:
        """Returns None: the op reads the batch's tensors, and computing its plan costs less than passing one."""

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | ByteCache,
        batch: ForwardBatch,
        metadata: None,  # noqa: ARG002 - nothing is prepared
        rotary: RotaryStep | None = None,
    ) -> torch.Tensor:
        num_tokens = query.shape[0]
        if isinstance(kv_cache, ByteCache):
            _, key_cache, value_cache, *of_numbers = kv_cache
            scales: tuple[Any, ...] = (*of_numbers, spec.k_scale, spec.v_scale)
        else:
            key_cache, value_cache = kv_cache.unbind(0)
            scales = ()
        if rotary is None:
            # views of the fused projection, not copies
            shape = (num_tokens, spec.num_kv_heads, spec.head_size)
            store_kv(key.view(shape), value.view(shape), key_cache, value_cache, batch.slot_mapping, *scales)
        else:
            rows = (rotary.positions, query, key, value, rotary.cos_sin, rotary.is_neox)
            rotary_store_kv(*rows, key_cache, value_cache, batch.slot_mapping, *scales)
        output: torch.Tensor = paged_attention(
            query.view(num_tokens, spec.num_heads, spec.head_size),
            key_cache,
            value_cache,
            batch.block_table,
            batch.query_start,
            batch.seq_lens,
            spec.scale,
            spec.sliding_window or 0,
            spec.soft_cap or 0.0,
            spec.alibi_slopes,
            *scales,
        )
        return output.view(num_tokens, spec.num_heads * spec.head_size)

    def forward_latent(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        latent: torch.Tensor,
        weights: LatentWeights,
        kv_cache: torch.Tensor | LatentByteCache,
        batch: ForwardBatch,
        metadata: None,  # noqa: ARG002 - nothing is prepared
        rotary: RotaryStep,
    ) -> torch.Tensor:
        """Makes keys and values for the rows for which `pays_to_expand` says so."""
        sizes = spec.latent
        assert sizes is not None
        num_tokens, num_heads = query.shape[0], spec.num_heads
        query = query.view(num_tokens, num_heads, sizes.nope_width + sizes.rotary_width)
        angles = (rotary.cos_sin, rotary.is_neox)
        norm = (weights.norm, weights.norm_eps)
        rotated = query[..., sizes.nope_width :]
        scales = _NO_SCALES
        if isinstance(kv_cache, LatentByteCache):
            # a scale of the layer is that of its keys, as in vLLM
            scales = kv_cache.scales, spec.k_scale
        cache = kv_cache.rows if isinstance(kv_cache, LatentByteCache) else kv_cache
        store_latent(rotary.positions, rotated, latent, *norm, *angles, cache, batch.slot_mapping, *scales)
        step = (batch.block_table, batch.query_start, batch.seq_lens)
        if batch.max_query_len < EXPANDED_MIN_TOKENS:
            output = _absorbed(spec, sizes, query, weights, cache, scales, *step)
            return output.view(num_tokens, num_heads * sizes.value_width)
        # every token belongs to a row
        output = query.new_empty(num_tokens, num_heads, sizes.value_width)
        matrices = (weights.expand, weights.output)
        for rows, is_expanded in _runs_of_rows(batch, sizes):
            first, last = batch.query_start_np[[rows.start, rows.stop]].tolist()
            starts = batch.query_start[rows.start : rows.stop + 1] - first
            part = (batch.block_table[rows], starts, batch.seq_lens[rows])
            if is_expanded:
                inputs = (query[first:last], cache, *matrices, *part, spec.scale)
                expanded_attention(*inputs, output[first:last], *scales)
            else:
                output[first:last] = _absorbed(spec, sizes, query[first:last], weights, cache, scales, *part)
        return output.view(num_tokens, num_heads * sizes.value_width)


def _bytes_of(cache: torch.Tensor | _Bytes) -> torch.Tensor:
    """What `copy_blocks` copies: everything of a block, its scales too."""
    return cache.planes if isinstance(cache, _Bytes) else cache


def _block_dim(cache: torch.Tensor) -> int:
    """Where the blocks are: in caches of latents, [P, S, W] or [P, bytes], they come first."""
    return 0 if cache.dim() <= 3 else 1


def _absorbed(
    spec: AttentionSpec,
    sizes: LatentSpec,
    query: torch.Tensor,
    weights: LatentWeights,
    cache: torch.Tensor,
    scales: _RowScales,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """Latent attention without keys and values: query [T, N, Q+F], rotated → [T, N, V]."""
    absorbed = heads_linear(query, weights.absorb, sizes.nope_width, sizes.latent_width)
    step = (block_table, query_start, seq_lens)
    sums = latent_attention(absorbed, cache, *step, spec.scale, sizes.latent_width, *scales)
    values: torch.Tensor = heads_linear(sums, weights.output, sizes.latent_width, sizes.value_width)
    return values


def _runs_of_rows(batch: ForwardBatch, sizes: LatentSpec) -> list[tuple[slice, bool]]:
    """Ranges of consecutive rows, and whether keys and values are made for them."""
    query_lens = np.diff(batch.query_start_np)
    widths = (sizes.nope_width, sizes.value_width, sizes.latent_width)
    expands = pays_to_expand(query_lens, batch.seq_lens_np, *widths)
    edges = [0, *(np.flatnonzero(np.diff(expands)) + 1).tolist(), len(expands)]
    return [(slice(start, stop), bool(expands[start])) for start, stop in itertools.pairwise(edges)]


def _odd_width(sizes: LatentSpec) -> str | None:
    """Which width the ops do not support, as a sentence; None if they support all."""
    widths = {
        "kv_lora_rank": sizes.latent_width,
        "qk_rope_head_dim": sizes.rotary_width,
        "qk_nope_head_dim": sizes.nope_width,
        "v_head_dim": sizes.value_width,
    }
    odd = [f"{name} {width}" for name, width in widths.items() if width % 8]
    return f"{odd[0]} is no multiple of 8" if odd else None
