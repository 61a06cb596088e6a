"""Attention in high precision and the KV write by custom operators, the rest by a family of torch_npu's operators.

The custom operators compute in float32 and read lengths on the device, so that replays of captured graphs need not
update them.

Letters: as in `ascend_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from ascend_vllm.attention.ascend_calls import AttentionOps, DevicePart, LayerInput
from ascend_vllm.attention.ascend_plan import Precision, RowKind
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


class CustomAttention(AttentionOps):
    """A family of operators, some of which are replaced by custom operators.

    Args:
        family: computes everything else.
        taken: names of the custom operators in use.
        precision: custom operators compute only kinds of rows in high precision.
    """

    def __init__(self, family: AttentionOps, taken: Collection[str], precision: Precision) -> None:
        super().__init__(family.block_size)
        self.family = family
        self._prefix = precision.prefix and "prefix_attention" in taken
        self._decode = precision.decode and "decode_attention" in taken
        # these compute rows of their kind only
        self.splits_kinds = family.splits_kinds or self._prefix or self._decode

    def needs_window_mask(self, kind: RowKind) -> bool:
        return self.family.needs_window_mask(kind)

    def replay_arguments(self, seq_lens: list[int], query_len: int) -> dict[str, list[int]] | None:
        """See `AttentionOps.replay_arguments`; custom operators in a graph do not read them."""
        return self.family.replay_arguments(seq_lens, query_len)

    def attend(self, layer: LayerInput, prepared: DevicePart, mask: torch.Tensor) -> torch.Tensor:
        part = prepared.part
        # compiled graphs have no lengths on the device and do not support these operators
        if prepared.seq_lens is None or prepared.query_start is None or not part.high_precision:
            return self.family.attend(layer, prepared, mask)
        if self._prefix and part.kinds == {RowKind.PREFIX}:
            operator = torch.ops.ascend_vllm_npu.prefix_attention
            return _attention(operator, layer, prepared, prepared.query_start, prepared.seq_lens)
        if self._decode and part.kinds == {RowKind.DECODE}:
            return _attention(torch.ops.ascend_vllm_npu.decode_attention, layer, prepared, prepared.seq_lens)
        return self.family.attend(layer, prepared, mask)


def _attention(
    operator: Callable[..., torch.Tensor], layer: LayerInput, prepared: DevicePart, *lengths: torch.Tensor
) -> torch.Tensor:
    """[t, N, D]; the keys of all kinds of rows are in the cache."""
    spec = layer.spec
    # [P, S, K, D]
    shape = (*layer.key_cache.shape[:2], spec.num_kv_heads, spec.head_size)
    return operator(
        layer.query[prepared.part.tokens],
        layer.key_cache.view(shape),
        layer.value_cache.view(shape),
        prepared.block_table,
        *lengths,
        spec.scale,
        spec.sliding_window or 0,
        spec.num_kv_heads,
        _LAYOUT,
    )
