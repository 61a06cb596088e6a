"""Norms, rotation and the write of keys and values by custom operators.

Letters: as in `ascend_calls`.
"""

from __future__ import annotations

import torch

from ascend_vllm.attention.backend import AttentionSpec, HeadNorms, RotaryStep

# layout of the caches: the heads of a token are contiguous
_LAYOUT = "ND"


def store_kv_custom(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """See `ascend_calls.store_kv`."""
    torch.ops.ascend_vllm_npu.store_kv(key, value, *kv_cache.unbind(0), slots, _LAYOUT)


# What a core's memory holds of a token: (query heads + 2 * KV heads) * head size, at least 128.
_MAX_TOKEN_WIDTH = 10240


def norm_rope_store(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    rotary: RotaryStep | None,
    norms: HeadNorms | None,
    *,
    keeps_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Normalises and rotates heads, and stores keys and values.

    Args:
        spec: of the layer.
        query: [T, N*D]; key and value: [T, K*D]. Rows may be strided.
        kv_cache: [2, P, S, K, D], written.
        slots: [T] int64.
        rotary: of the step.
        norms: of the layer; None: none.
        keeps_keys: attention reads new keys and values beside the cache.

    Returns:
        [T, N, D] and, with `keeps_keys`, [T, K, D] twice, all contiguous; None if the operator does not support this.
    """
    size = spec.head_size
    if rotary is None or not rotary.is_neox or rotary.cos_sin.shape[1] % 16:
        return None
    if (spec.num_heads + 2 * spec.num_kv_heads) * max(size, 128) > _MAX_TOKEN_WIDTH:
        return None
    parts = (part.view(part.shape[0], -1, size) for part in (query, key, value))
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.ascend_vllm_npu.norm_rope_store(
        *parts,
        None if norms is None else norms.query_weight,
        None if norms is None else norms.key_weight,
        0.0 if norms is None else norms.epsilon,
        rotary.positions,
        rotary.cos_sin,
        *kv_cache.unbind(0),
        slots,
        keeps_keys,
    )
    return found
