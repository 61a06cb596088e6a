"""Attention on Ascend NPUs, over torch_npu's fused operators.

Letters: T tokens of a step, R rows of a step, N query heads, K KV heads, D head size, P blocks of the cache,
S tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ascend_vllm import envs
from ascend_vllm.attention.ascend_base import AscendBackend
from ascend_vllm.attention.ascend_calls import (
    AttentionOps,
    DevicePart,
    FlashAttention,
    FusedAttention,
    LayerInput,
    copy_blocks,
    store_kv,
    window_masks,
)
from ascend_vllm.attention.ascend_custom import norm_rope_store, store_kv_custom
from ascend_vllm.attention.ascend_plan import Part, RowKind, split_rows
from ascend_vllm.attention.backend import AttentionSpec, ForwardBatch, HeadNorms, QueryKeyValue, RotaryStep, Splitter
from ascend_vllm.ops import ascend_custom
from ascend_vllm.types.kv_cache import KVCacheSpec

_FAMILIES: dict[str, type[AttentionOps]] = {"fused": FusedAttention, "flash": FlashAttention}


@dataclasses.dataclass(frozen=True, slots=True)
class AscendStep:
    """What all layers of a step share."""

    # [T] int64, each in [0, P*S): tokens that are not to be stored have slots in the spare blocks
    slots: torch.Tensor
    # in the order of the step's rows
    parts: list[DevicePart]
    # the step is being compiled
    is_compiled: bool = False
    # the step is being captured in pieces
    splitter: Splitter | None = None

    def kept(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> QueryKeyValue:
        """The same, in memory that stays where it is if attention runs between graphs."""
        return (query, key, value) if self.splitter is None else self.splitter.keep(query, key, value)


class AscendAttention(AscendBackend):
    """A layer's cache is [2, P, S, K, D] in the model's dtype: all heads of a token are contiguous."""

    name = "ascend"
    head_sizes = range(16, 257, 16)

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._family = envs.ascend_attention_ops()
        self._ops: AttentionOps = _FAMILIES[self._family](block_size)
        self._custom = ascend_custom.enabled()
        self.norms_heads = "norm_rope_store" in self._custom
        self._store_kv = store_kv_custom if "store_kv" in self._custom else store_kv

    @classmethod
    def can_split(cls, cache: KVCacheSpec, dtype: torch.dtype) -> bool:
        # Subclasses may serve layers of other kinds by a `forward` of their own. Such a layer's attention would be
        # captured, with the rows of the capture.
        return AscendAttention.unsupported_cache_reason(cache, dtype) is None

    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        return (2, num_blocks, *cache.block_shape[1:])

    def replay_arguments(self, seq_lens: list[int], query_len: int = 1) -> dict[str, list[int]] | None:
        return self._ops.replay_arguments(seq_lens, query_len)

    def prepare_compiled(self, batch: ForwardBatch, seq_lens: list[int]) -> AscendStep:
        num_rows, query_len = len(seq_lens), batch.max_query_len
        num_tokens = num_rows * query_len
        slots = self._stored_slots(batch.slot_mapping, num_tokens)
        kind = RowKind.DECODE if query_len == 1 else RowKind.PREFIX
        part = Part(
            kind=kind,
            high_precision=self.precision.decode if query_len == 1 else self.precision.prefix,
            rows=slice(0, num_rows),
            tokens=slice(0, num_tokens),
            query_ends=list(range(query_len, num_tokens + 1, query_len)),
            seq_lens=seq_lens,
            kinds=frozenset((kind,)),
        )
        return AscendStep(slots, [DevicePart(part, batch.block_table, {})], is_compiled=True)

    def prepare_split(self, batch: ForwardBatch, splitter: Splitter) -> AscendStep:
        return AscendStep(self._stored_slots(batch.slot_mapping, batch.slot_mapping.shape[0]), [], splitter=splitter)

    def describe(self) -> str:
        custom = f", custom operators {', '.join(sorted(self._custom))}" if self._custom else ""
        return f"{self.name}, {self._family}, {self.precision}{custom}"

    def bind(self, specs: Sequence[AttentionSpec], kv_caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        self._reserve(specs, kv_caches[0].shape[1], num_blocks, kv_caches[0].device)

    def copy_blocks(
        self, source: torch.Tensor, source_blocks: torch.Tensor, target: torch.Tensor, target_blocks: torch.Tensor
    ) -> None:
        # one half after the other: the blocks must be the first dimension
        for half, target_half in zip(source.unbind(0), target.unbind(0), strict=True):
            copy_blocks(half, source_blocks, target_half, target_blocks)

    def prepare(self, batch: ForwardBatch) -> AscendStep:
        slots = self._stored_slots(batch.slot_mapping, batch.slot_mapping.shape[0])
        parts = split_rows(batch.query_start_np, batch.seq_lens_np, self.precision, by_kind=self._ops.splits_kinds)
        return AscendStep(slots, [self._upload(part, batch) for part in parts])

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: ForwardBatch,  # noqa: ARG002 - `prepare` has read it
        metadata: AscendStep,
        rotary: RotaryStep | None = None,
    ) -> torch.Tensor:
        return self._forward(spec, query, key, value, kv_cache, metadata, rotary, None)

    def forward_normed(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: ForwardBatch,  # noqa: ARG002 - `prepare` has read it
        metadata: AscendStep,
        rotary: RotaryStep | None,
        norms: HeadNorms,
    ) -> torch.Tensor:
        return self._forward(spec, query, key, value, kv_cache, metadata, rotary, norms)

    def _forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AscendStep,
        rotary: RotaryStep | None,
        norms: HeadNorms | None,
    ) -> torch.Tensor:
        if self._mask is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        num_tokens, head_size = query.shape[0], spec.head_size
        if "norm_rope_store" in self._custom and not metadata.is_compiled:
            # a replay of pieces may have prompts
            is_split = metadata.splitter is not None
            keeps_keys = is_split or any(part.part.kind == RowKind.PROMPT for part in metadata.parts)
            stored = norm_rope_store(
                spec, query, key, value, kv_cache, metadata.slots, rotary, norms, keeps_keys=keeps_keys
            )
            if stored is not None:
                return self._attend(spec, *metadata.kept(*stored), kv_cache, metadata)
        if norms is not None:
            query, key = norms.apply(query, key)
        if rotary is not None:
            rotary.rotate(query, key, spec.head_size)
        query, key, value = metadata.kept(query, key, value)
        # the operators take no strided rows, such as those of a fused projection
        key = key.contiguous().view(num_tokens, spec.num_kv_heads, head_size)
        value = value.contiguous().view(num_tokens, spec.num_kv_heads, head_size)
        if metadata.is_compiled:
            query = torch.ops.ascend_vllm.ascend_store_and_take(query, key, value, kv_cache, metadata.slots)
        else:
            self._store_kv(key, value, kv_cache, metadata.slots)
        query = query.contiguous().view(num_tokens, spec.num_heads, head_size)
        return self._attend(spec, query, key, value, kv_cache, metadata)

    def _attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AscendStep,
    ) -> torch.Tensor:
        """[T, N*D]; the arguments are those of `LayerInput`."""
        if self._mask is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        if metadata.splitter is not None:
            return metadata.splitter.split(lambda step: self._attend(spec, query, key, value, kv_cache, step), query)
        key_cache, value_cache = kv_cache.unbind(0)
        layer = LayerInput(spec, query, key, value, key_cache.flatten(2), value_cache.flatten(2))
        width = spec.num_heads * spec.head_size
        outputs = [self._ops.attend(layer, part, self._mask).view(-1, width) for part in metadata.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _upload(self, part: Part, batch: ForwardBatch) -> DevicePart:
        block_table = batch.block_table[part.rows]
        masks: dict[int, torch.Tensor] = {}
        if self._windows and self._ops.needs_window_mask(part.kind):
            masks = window_masks(self._windows, batch.seq_lens[part.rows], block_table.shape[1], self.block_size)
        return DevicePart(part, block_table, masks)
