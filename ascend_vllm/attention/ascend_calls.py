"""The two families of attention operators of torch_npu, behind one interface.

Both compute causal attention of a part's rows, [t, N, D], over a layer's new keys or its paged cache. The
meaning of the arguments is taken from the documentation of the operators in torch_npu.

Letters: t tokens and r rows of a part, T tokens of the step, B maximum blocks of a row, N query heads, K KV heads,
D head size, P blocks of the cache, S tokens of a block.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ascend_vllm.attention.ascend_plan import Part, RowKind
from ascend_vllm.attention.backend import AttentionSpec

# values of sparse_mode: all keys of a row, without a mask; attention at and below the diagonal that ends in the lower
# right corner; the same, limited to pre_tokens before it
_ALL = 0
_CAUSAL = 3
_BAND = 4
# added to sparse_mode for high precision in npu_prompt_flash_attention, which has no argument for it
_PROMPT_HIGH_PRECISION = 10
# values of inner_precise
_HIGH_PRECISION = 0
_HIGH_PERFORMANCE = 1
_UNLIMITED = 2147483647
# side of the compressed mask, which the operators extend to any length
_MASK_SIZE = 2048


@functools.cache
def compressed_mask(device: torch.device) -> torch.Tensor:
    """[2048, 2048] int8 with 1 above the diagonal, for sequences of any length."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.int8).triu_(1).to(device)


def store_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes keys and values to a layer's cache.

    Args:
        key: [T, K, D], contiguous.
        value: likewise.
        kv_cache: [2, P, S, K, D]; written.
        slots: [T] int64, all different.
    """
    key_cache, value_cache = kv_cache.unbind(0)
    torch.ops.npu.npu_scatter_pa_kv_cache(key, value, key_cache, value_cache, slots, cache_mode="Norm")


def copy_blocks(
    source: torch.Tensor, source_blocks: torch.Tensor, target: torch.Tensor, target_blocks: torch.Tensor
) -> None:
    """Copies whole blocks of a tensor, see `AttentionBackend.copy_blocks`.

    `index_copy_` along any dimension but the first would transpose the whole tensor on NPUs.

    Args:
        source: [P, …], contiguous.
        source_blocks: [C] int64, on source's device.
        target: likewise, of any number of blocks and on any device; may be `source`.
        target_blocks: [C] int64, on target's device, none twice.
    """
    if source.device == target.device:
        blocks = source.index_select(0, source_blocks)
    else:
        # copies between host and device are fast only through pinned memory
        shape = (source_blocks.shape[0], *source.shape[1:])
        blocks = torch.empty(shape, dtype=source.dtype, pin_memory=True)
        if source.device.type == "cpu":
            blocks = torch.index_select(source, 0, source_blocks, out=blocks)
            blocks = blocks.to(target.device, non_blocking=True)
        else:
            blocks.copy_(source.index_select(0, source_blocks))
    target.index_copy_(0, target_blocks, blocks)


def _store_and_take(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """`store_kv`, and a contiguous copy of the query, which attention needs anyway."""
    store_kv(key, value, kv_cache, slots)
    return query.clone(memory_format=torch.contiguous_format)


# `_store_and_take` as one op, for compilers, which replace in-place operators by functional ones and copy the results
# back: here whole caches, in every step. Therefore the op's schema does not declare that it writes the cache. It runs
# before attention, since attention reads the query that it returns; nothing reads the layer's cache earlier.
_library: Any = torch.library.Library("ascend_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "ascend_store_and_take(Tensor query, Tensor key, Tensor value, Tensor kv_cache, Tensor slots) -> Tensor"
)
_library.impl("ascend_store_and_take", _store_and_take, "PrivateUse1")
_library.impl(
    "ascend_store_and_take",
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
    "Meta",
)


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePart:
    """A part and what its call reads on the device."""

    part: Part
    # [r, B] int32
    block_table: torch.Tensor
    # window → [r, 1, 1, B*S] bool: positions before the window of decoding rows; only for operators that need it
    window_masks: dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerInput:
    """Inputs of attention in one layer."""

    spec: AttentionSpec
    # [T, N, D], contiguous
    query: torch.Tensor
    # [T, K, D], contiguous: of the step's tokens
    key: torch.Tensor
    value: torch.Tensor
    # [P, S, K*D], contiguous: the cache, which has the step's tokens
    key_cache: torch.Tensor
    value_cache: torch.Tensor


class AttentionOps(abc.ABC):
    """A family of operators."""

    # whether rows of different kinds need different operators
    splits_kinds: bool

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def needs_window_mask(self, kind: RowKind) -> bool:  # noqa: ARG002 - most operators support windows
        """Whether a part of a kind reads `DevicePart.window_masks`."""
        return False

    def replay_arguments(
        self,
        seq_lens: list[int],  # noqa: ARG002 - for families that can be replayed
        query_len: int,  # noqa: ARG002
    ) -> dict[str, list[int]] | None:
        return None

    @abc.abstractmethod
    def attend(self, layer: LayerInput, prepared: DevicePart, mask: torch.Tensor) -> torch.Tensor:
        """Attention of a part.

        Args:
            layer: of the whole step.
            prepared: the part.
            mask: `compressed_mask`.

        Returns:
            [t, N, D] or [t, N*D], contiguous.
        """


def _sparse(window: int | None) -> tuple[int, int]:
    """sparse_mode and pre_tokens: a token attends to itself and to pre_tokens before it."""
    return (_CAUSAL, _UNLIMITED) if window is None else (_BAND, window - 1)


class FusedAttention(AttentionOps):
    """npu_fused_infer_attention_score: one call for prompts, chunks and decoding rows alike.

    CANN 9 has two kernels for the layout TND. The faster one, and its variants for decoding, take grouped heads in
    high precision only, and bfloat16 in no other. Only float16 with a key head for each query head has a form in high
    performance. The fastest variant decodes one token a row, without a mask (host tiling of CANN's ops-transformer).
    """

    splits_kinds = False

    def replay_arguments(self, seq_lens: list[int], query_len: int) -> dict[str, list[int]]:
        """The arguments of `attend` that differ from step to step."""
        query_ends = list(range(query_len, query_len * len(seq_lens) + 1, query_len))
        return {"actual_seq_lengths": query_ends, "actual_seq_lengths_kv": seq_lens}

    def attend(self, layer: LayerInput, prepared: DevicePart, mask: torch.Tensor) -> torch.Tensor:
        part, query = prepared.part, layer.query[prepared.part.tokens]
        if part.kinds == {RowKind.PROMPT}:
            # all keys are computed in the step
            key, value = layer.key[part.tokens], layer.value[part.tokens]
            lengths = part.query_ends, part.query_ends
            return packed_attention(layer.spec, query, key, value, mask, *lengths, high_precision=part.high_precision)
        sees_all = part.kinds == {RowKind.DECODE} and layer.spec.sliding_window is None
        return packed_attention(
            layer.spec,
            query,
            layer.key_cache,
            layer.value_cache,
            None if sees_all else mask,
            part.query_ends,
            part.seq_lens,
            high_precision=part.high_precision,
            block_table=prepared.block_table,
            block_size=self.block_size,
        )


def packed_attention(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    query_ends: list[int],
    kv_lens: list[int],
    *,
    high_precision: bool,
    block_table: torch.Tensor | None = None,
    block_size: int = 0,
) -> torch.Tensor:
    """npu_fused_infer_attention_score of rows one after another.

    Args:
        spec: of the layer.
        query: [t, N, D], contiguous.
        key: [keys, K, D], contiguous, or the cache, [P, S, K*D].
        value: likewise.
        mask: `compressed_mask`; None: rows of one token, which see all keys.
        query_ends: tokens up to the end of each row.
        kv_lens: likewise of keys; with a block table keys of each row.
        high_precision: where there is a form in high performance.
        block_table: [r, B] int32 of the cache's blocks.
        block_size: S, with a block table.

    Returns:
        [t, N, D].
    """
    sparse_mode, pre_tokens = (_ALL, _UNLIMITED) if mask is None else _sparse(spec.sliding_window)
    has_performance = query.dtype == torch.float16 and spec.num_heads == spec.num_kv_heads
    output: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        atten_mask=mask,
        actual_seq_lengths=query_ends,
        actual_seq_lengths_kv=kv_lens,
        block_table=block_table,
        num_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        scale=spec.scale,
        pre_tokens=pre_tokens,
        next_tokens=0,
        input_layout="TND",
        sparse_mode=sparse_mode,
        inner_precise=_HIGH_PERFORMANCE if has_performance and not high_precision else _HIGH_PRECISION,
        block_size=block_size,
    )[0]
    return output


class FlashAttention(AttentionOps):
    """npu_prompt_flash_attention and npu_incre_flash_attention, the predecessors of the fused operator.

    The first does not support blocks and pads rows to one length, so that it is called for each row, with the row's
    keys gathered from the cache. The second decodes over blocks.
    """

    splits_kinds = True

    def needs_window_mask(self, kind: RowKind) -> bool:
        """See `AttentionOps.needs_window_mask`: the incremental operator does not support windows."""
        return kind == RowKind.DECODE

    def attend(self, layer: LayerInput, prepared: DevicePart, mask: torch.Tensor) -> torch.Tensor:
        part = prepared.part
        if part.kind == RowKind.DECODE:
            return self._decode(layer, prepared)
        starts = [0, *part.query_ends[:-1]]
        rows = [
            self._prompt(layer, prepared, row, slice(part.tokens.start + start, part.tokens.start + end), mask)
            for row, (start, end) in enumerate(zip(starts, part.query_ends, strict=True))
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _prompt(
        self, layer: LayerInput, prepared: DevicePart, row: int, tokens: slice, mask: torch.Tensor
    ) -> torch.Tensor:
        """[t of the row, N*D]."""
        part, spec = prepared.part, layer.spec
        seq_len = part.seq_lens[row]
        if part.kind == RowKind.PROMPT:
            key, value = layer.key[tokens].flatten(1), layer.value[tokens].flatten(1)
        else:
            blocks = prepared.block_table[row, : -(-seq_len // self.block_size)]
            key, value = (
                cache.index_select(0, blocks).flatten(0, 1)[:seq_len]
                for cache in (layer.key_cache, layer.value_cache)
            )
        sparse_mode, pre_tokens = _sparse(spec.sliding_window)
        output: torch.Tensor = torch.ops.npu.npu_prompt_flash_attention(
            layer.query[tokens].flatten(1)[None],
            key[None],
            value[None],
            atten_mask=mask,
            actual_seq_lengths=[tokens.stop - tokens.start],
            actual_seq_lengths_kv=[seq_len],
            num_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            scale_value=spec.scale,
            pre_tokens=pre_tokens,
            next_tokens=0,
            input_layout="BSH",
            sparse_mode=sparse_mode + (_PROMPT_HIGH_PRECISION if part.high_precision else 0),
        )
        return output[0]

    def _decode(self, layer: LayerInput, prepared: DevicePart) -> torch.Tensor:
        """[t, N*D]."""
        part, spec = prepared.part, layer.spec
        window_mask = None if spec.sliding_window is None else prepared.window_masks[spec.sliding_window]
        output: torch.Tensor = torch.ops.npu.npu_incre_flash_attention(
            layer.query[part.tokens].flatten(1)[:, None],
            layer.key_cache,
            layer.value_cache,
            atten_mask=window_mask,
            actual_seq_lengths=part.seq_lens,
            block_table=prepared.block_table,
            num_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            scale_value=spec.scale,
            input_layout="BSH",
            block_size=self.block_size,
            inner_precise=_HIGH_PRECISION if part.high_precision else _HIGH_PERFORMANCE,
        )
        return output[:, 0]


def window_masks(
    windows: Sequence[int], seq_lens: torch.Tensor, num_blocks: int, block_size: int
) -> dict[int, torch.Tensor]:
    """`DevicePart.window_masks` of rows with one token each.

    Args:
        windows: number of tokens that a token attends to, itself included.
        seq_lens: [r] int32, device.
        num_blocks: B.
        block_size: S.
    """
    if not windows:
        return {}
    positions = torch.arange(num_blocks * block_size, dtype=torch.int32, device=seq_lens.device)
    return {window: (positions < (seq_lens - window)[:, None])[:, None, None] for window in windows}
