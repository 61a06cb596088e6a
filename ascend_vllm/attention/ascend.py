"""Attention on Ascend NPUs, over torch_npu's fused operators.

Letters: T tokens of a step, R rows of a step, N query heads, K KV heads, D head size, P blocks of the cache,
S tokens of a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ascend_vllm import envs
from ascend_vllm.attention.ascend_calls import (
    AttentionOps,
    DevicePart,
    FlashAttention,
    FusedAttention,
    LayerInput,
    compressed_mask,
    copy_blocks,
    store_kv,
    window_masks,
)
from ascend_vllm.attention.ascend_custom import CustomAttention, store_kv_custom
from ascend_vllm.attention.ascend_plan import Part, Precision, RowKind, split_rows
from ascend_vllm.attention.backend import AttentionBackend, AttentionSpec, ForwardBatch, RotaryStep
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.ops import ascend_custom
from ascend_vllm.types.kv_cache import KVCacheSpec

# limits of the operators
_MAX_HEADS = 256
_MAX_GROUP = 64
_MAX_KV_WIDTH = 65535
# the guide to high precision says "long" without a number; this is its number for cached prefixes
_LONG_SEQUENCE = 8192

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


class AscendAttention(AttentionBackend):
    """A layer's cache is [2, P, S, K, D] in the model's dtype: all heads of a token are contiguous.

    The last blocks are spare: the operator that stores keys takes no negative slots, so that each token that is not
    to be stored gets a slot of its own there. No row reads them.
    """

    name = "ascend"
    dtypes = (torch.float16, torch.bfloat16)
    head_sizes = range(16, 257, 16)
    block_sizes = (64, 128)

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.precision = Precision(
            decode=envs.use_ifa_high_precision_mode(),
            prefix=envs.use_prefix_high_precision_mode(),
            prompt=envs.use_pfa_high_precision_mode(),
        )
        self._family = envs.ascend_attention_ops()
        self._ops: AttentionOps = _FAMILIES[self._family](block_size)
        self._custom = ascend_custom.enabled()
        self._store_kv = store_kv_custom if "store_kv" in self._custom else store_kv
        if self._custom:
            self._ops = CustomAttention(self._ops, self._custom, self.precision)
        self._windows: tuple[int, ...] = ()
        # made by `bind`: [spare blocks * S] int64, and the compressed mask
        self._spare_slots: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    @classmethod
    def _unsupported_heads_reason(cls, spec: AttentionSpec) -> str | None:
        if spec.num_heads > _MAX_HEADS or spec.num_heads // spec.num_kv_heads > _MAX_GROUP:
            return (
                f"{spec.num_heads} query heads on {spec.num_kv_heads} KV heads are more than the operators take: "
                f"{_MAX_HEADS}, and {_MAX_GROUP} on each"
            )
        if spec.num_kv_heads * spec.head_size > _MAX_KV_WIDTH:
            return f"{spec.num_kv_heads} KV heads of {spec.head_size} are wider than {_MAX_KV_WIDTH} elements"
        return None

    def advice(self, config: EngineConfig) -> list[str]:
        needs, has = config.model.high_precision, self.precision
        if needs is None:
            return []
        is_long = config.scheduler.max_model_len > _LONG_SEQUENCE
        caches_prefixes = config.cache.enable_prefix_caching
        kinds = (
            (needs.prompt and not has.prompt, "give wrong results with USE_PFA_HIGH_PRECISION_MODE=0: set it to 1."),
            (
                needs.decode and not has.decode and is_long,
                "may give wrong results on long sequences: set USE_IFA_HIGH_PRECISION_MODE=1.",
            ),
            (
                needs.prefix and not has.prefix and caches_prefixes,
                "may give wrong results with --enable-prefix-caching: set USE_PREFIX_HIGH_PRECISION_MODE=1.",
            ),
        )
        return [f"Models like {needs.model} {advice}" for is_needed, advice in kinds if is_needed]

    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        return (2, num_blocks, *cache.block_shape[1:])

    def num_spare_blocks(self, max_num_tokens: int) -> int:
        return -(-max_num_tokens // self.block_size)

    def replay_arguments(self, seq_lens: list[int], query_len: int = 1) -> dict[str, list[int]] | None:
        return self._ops.replay_arguments(seq_lens, query_len)

    def prepare_compiled(self, batch: ForwardBatch, seq_lens: list[int]) -> AscendStep:
        if self._spare_slots is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        num_rows, query_len = len(seq_lens), batch.max_query_len
        num_tokens = num_rows * query_len
        slots = torch.where(batch.slot_mapping < 0, self._spare_slots[:num_tokens], batch.slot_mapping)
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

    def describe(self) -> str:
        custom = f", custom operators {', '.join(sorted(self._custom))}" if self._custom else ""
        return f"{self.name}, {self._family}, {self.precision}{custom}"

    def bind(self, specs: Sequence[AttentionSpec], kv_caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        device, size = kv_caches[0].device, kv_caches[0].shape[1]
        self._windows = tuple(dict.fromkeys(spec.sliding_window for spec in specs if spec.sliding_window is not None))
        self._spare_slots = torch.arange(num_blocks * self.block_size, size * self.block_size, device=device)
        if self._mask is None:
            self._mask = compressed_mask(device)

    def copy_blocks(
        self, source: torch.Tensor, source_blocks: torch.Tensor, target: torch.Tensor, target_blocks: torch.Tensor
    ) -> None:
        # one half after the other: the blocks must be the first dimension
        for half, target_half in zip(source.unbind(0), target.unbind(0), strict=True):
            copy_blocks(half, source_blocks, target_half, target_blocks)

    def prepare(self, batch: ForwardBatch) -> AscendStep:
        if self._spare_slots is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        slots = batch.slot_mapping
        num_tokens = slots.shape[0]
        # only decoding steps have tokens that are not to be stored, and there are spare slots for all of them
        if num_tokens <= self._spare_slots.shape[0]:
            slots = torch.where(slots < 0, self._spare_slots[:num_tokens], slots)
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
        if self._mask is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        if rotary is not None:
            rotary.rotate(query, key, spec.head_size)
        num_tokens, head_size = query.shape[0], spec.head_size
        # the operators take no strided rows, such as those of a fused projection
        key = key.contiguous().view(num_tokens, spec.num_kv_heads, head_size)
        value = value.contiguous().view(num_tokens, spec.num_kv_heads, head_size)
        key_cache, value_cache = kv_cache.unbind(0)
        if metadata.is_compiled:
            query = torch.ops.ascend_vllm.ascend_store_and_take(query, key, value, kv_cache, metadata.slots)
        else:
            self._store_kv(key, value, kv_cache, metadata.slots)
        layer = LayerInput(
            spec,
            query.contiguous().view(num_tokens, spec.num_heads, head_size),
            key,
            value,
            key_cache.flatten(2),
            value_cache.flatten(2),
        )
        outputs = [
            self._ops.attend(layer, part, self._mask).view(-1, spec.num_heads * head_size) for part in metadata.parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _upload(self, part: Part, batch: ForwardBatch) -> DevicePart:
        block_table = batch.block_table[part.rows]
        masks: dict[int, torch.Tensor] = {}
        if self._windows and self._ops.needs_window_mask(part.kind):
            masks = window_masks(self._windows, batch.seq_lens[part.rows], block_table.shape[1], self.block_size)
        starts = batch.query_start[part.rows.start : part.rows.stop + 1]
        if self._custom and part.tokens.start > 0:
            # the custom operators count from the part's first token
            starts = starts - part.tokens.start
        return DevicePart(part, block_table, masks, starts, batch.seq_lens[part.rows])
