"""Attention on CPUs, over the paged ops."""

from __future__ import annotations

import torch

from ascend_vllm.attention.backend import AttentionBackend, AttentionSpec, ForwardBatch, RotaryStep
from ascend_vllm.ops.paged import BLOCK_SIZES, HEAD_SIZES, paged_attention, rotary_store_kv, store_kv
from ascend_vllm.ops.registry import FLOAT_DTYPES
from ascend_vllm.types.kv_cache import KVCacheSpec


class CpuAttention(AttentionBackend):
    """A layer's cache is [2, P, K, S, D] in the model's dtype: keys or values of a head are contiguous in blocks."""

    name = "cpu"
    dtypes = FLOAT_DTYPES
    head_sizes = HEAD_SIZES
    block_sizes = BLOCK_SIZES
    changes_scores = True

    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        _, block_size, num_kv_heads, head_size = cache.block_shape
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    def copy_blocks(
        self, source: torch.Tensor, source_blocks: torch.Tensor, target: torch.Tensor, target_blocks: torch.Tensor
    ) -> None:
        blocks = source.index_select(1, source_blocks)
        target.index_copy_(1, target_blocks, blocks.to(target.device))

    def prepare(self, batch: ForwardBatch) -> None:
        """Returns None: the op reads the batch's tensors, and computing its plan costs less than passing one."""

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: ForwardBatch,
        metadata: None,  # noqa: ARG002 - nothing is prepared
        rotary: RotaryStep | None = None,
    ) -> torch.Tensor:
        num_tokens = query.shape[0]
        key_cache, value_cache = kv_cache.unbind(0)
        if rotary is None:
            # views of the fused projection, not copies
            shape = (num_tokens, spec.num_kv_heads, spec.head_size)
            store_kv(key.view(shape), value.view(shape), key_cache, value_cache, batch.slot_mapping)
        else:
            angles = (rotary.cos_sin, rotary.is_neox)
            rotary_store_kv(rotary.positions, query, key, value, *angles, key_cache, value_cache, batch.slot_mapping)
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
        )
        return output.view(num_tokens, spec.num_heads * spec.head_size)
