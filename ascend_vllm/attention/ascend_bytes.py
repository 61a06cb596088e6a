"""Attention on Ascend NPUs over keys and values in int8.

Each head of each token has a scale of its own, or a layer has one for keys and one for values. These two become
factors on scores and on results, so that the operators get a scale of 1.

Letters: T tokens of a step, R rows of a step, t tokens and r rows of a part, N query heads, K KV heads, D head size,
P blocks of the cache, S tokens of a block, B maximum blocks of a row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from ascend_vllm.attention.ascend_base import AscendBackend
from ascend_vllm.attention.ascend_calls import copy_blocks, packed_attention, window_masks
from ascend_vllm.attention.ascend_plan import BytePart, split_byte_rows
from ascend_vllm.attention.backend import AttentionSpec, ForwardBatch, RotaryStep
from ascend_vllm.types.kv_cache import KEY_VALUE, KVCacheSpec

# values of key_antiquant_mode and value_antiquant_mode: one scale; scales of tokens and heads in blocks, as the keys
_ONE_SCALE = 0
_PAGED_SCALES = 5


class Int8Cache(NamedTuple):
    """One layer's cache: keys, then values. A number is a byte times its scale."""

    # [2, P, K, S, D] int8
    numbers: torch.Tensor
    # [2, P, K, S] float32; None: the layer has one scale for all keys, and one for all values
    scales: torch.Tensor | None


def _store_int8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor | None,
    rows: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> torch.Tensor:
    """Rounds keys and values and writes them to a layer's cache.

    Args:
        query: [T, N*D].
        key: [T, K*D]; rows may be strided.
        value: likewise.
        numbers: of an `Int8Cache`; written.
        scales: likewise.
        rows: [2, T*K] int64 of the keys' and of the values' heads among all [2*P*K*S], all different.
        k_scale: of all keys, if there are no others.
        v_scale: likewise.

    Returns:
        A contiguous copy of the query, which attention needs anyway.
    """
    block_size, head_size = numbers.shape[3:]
    shape = (2, -1, 1, head_size)
    if scales is None:
        ratios = (key.float() / k_scale, value.float() / v_scale)
        new_numbers = torch.stack(ratios).round().clamp(-128, 127).to(torch.int8).view(shape)
    else:
        new_numbers, new_scales = torch.ops.npu.npu_dynamic_quant(torch.stack((key, value)).view(shape))
        scales.view(-1).index_copy_(0, rows.view(-1), new_scales.view(-1))
    # to the operator each head of a block is a block of one head
    key_cache, value_cache = numbers.view(2, -1, block_size, 1, head_size)
    torch.ops.npu.npu_scatter_pa_kv_cache(
        new_numbers[0], new_numbers[1], key_cache, value_cache, rows[0], cache_mode="Norm"
    )
    return query.clone(memory_format=torch.contiguous_format)


# As one op for compilers, whose schema does not declare that it writes the cache: see `ascend_calls`.
_library: Any = torch.library.Library("ascend_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "ascend_store_int8(Tensor query, Tensor key, Tensor value, Tensor numbers, Tensor? scales, Tensor rows, "
    "float k_scale, float v_scale) -> Tensor"
)
_library.impl("ascend_store_int8", _store_int8, "PrivateUse1")
_library.impl(
    "ascend_store_int8",
    lambda query, *_: torch.empty_like(query, memory_format=torch.contiguous_format),
    "Meta",
)


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedPart:
    """A part whose tokens are computed like rows of one token, over the cached bytes."""

    tokens: slice
    # [t] tokens that each token sees
    seq_lens: list[int]
    # [t, B] int32
    block_table: torch.Tensor
    # window → [t, 1, 1, B*S] bool: positions before the window
    window_masks: dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class GatheredPart:
    """A part whose keys and values are made floats."""

    part: BytePart
    # K → [2, kv*K] int64: where the heads of all tokens of its rows are, see `_store_int8`
    rows: dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Int8Step:
    """What all layers of a step share."""

    # K → [2, T*K] int64, see `_store_int8`
    rows: dict[int, torch.Tensor]
    # in the order of the step's rows
    parts: list[DecodedPart | GatheredPart]
    # the step is being compiled
    is_compiled: bool = False


class AscendInt8Attention(AscendBackend):
    """A layer's cache is an `Int8Cache`; the last blocks are spare, see `AscendBackend`.

    The fused operator takes bytes in blocks for one token a row only. For prompts and chunks all tokens of a row are
    read from the cache and made floats, those of the step too, so that results do not depend on how a prompt is cut.
    """

    name = "ascend_int8"
    head_sizes = range(32, 257, 32)

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        # made by `bind`: K → [2, 1, K] int64, rows of the heads of slot 0
        self._first_rows: dict[int, torch.Tensor] = {}
        # likewise: dtype of queries → [1], the scale of numbers without scales
        self._one: dict[torch.dtype, torch.Tensor] = {}

    @classmethod
    def unsupported_cache_reason(
        cls,
        cache: KVCacheSpec,
        dtype: torch.dtype,  # noqa: ARG003 - bytes of every dtype are cached
    ) -> str | None:
        known = KVCacheSpec(KEY_VALUE, cache.block_shape, "int8")
        if cache in (known, msgspec.structs.replace(known, scale_shape=cache.block_shape[:-1])):
            return None
        return f"it caches keys and values in int8 with float32 scales, not {cache.kind} in {cache.dtype}"

    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        _, block_size, num_kv_heads, head_size = cache.block_shape
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    def make_cache(self, memory: torch.Tensor, num_blocks: int, cache: KVCacheSpec) -> Int8Cache:
        shape = self.kv_cache_shape(num_blocks, cache)
        if cache.scale_shape is None:
            return Int8Cache(memory[: math.prod(shape)].view(torch.int8).view(shape), None)
        num_bytes, num_scale_bytes = math.prod(shape), math.prod(shape[:-1]) * torch.float32.itemsize
        numbers, scales = memory[: num_bytes + num_scale_bytes].split_with_sizes((num_bytes, num_scale_bytes))
        return Int8Cache(numbers.view(torch.int8).view(shape), scales.view(torch.float32).view(shape[:-1]))

    def bind(self, specs: Sequence[AttentionSpec], kv_caches: Sequence[Int8Cache], num_blocks: int) -> None:
        numbers = kv_caches[0].numbers
        self._reserve(specs, numbers.shape[1], num_blocks, numbers.device)
        self._one = {dtype: torch.ones(1, dtype=dtype, device=numbers.device) for dtype in self.dtypes}
        for numbers, _ in kv_caches:
            _, num_all, num_heads, block_size, _ = numbers.shape
            halves = torch.arange(2, device=numbers.device) * (num_all * num_heads * block_size)
            heads = torch.arange(num_heads, device=numbers.device) * block_size
            self._first_rows[num_heads] = halves[:, None, None] + heads

    def copy_blocks(
        self, source: Int8Cache, source_blocks: torch.Tensor, target: Int8Cache, target_blocks: torch.Tensor
    ) -> None:
        for part, target_part in zip(source, target, strict=True):
            if part is None or target_part is None:
                continue
            for half, target_half in zip(part.unbind(0), target_part.unbind(0), strict=True):
                copy_blocks(half, source_blocks, target_half, target_blocks)

    def describe(self) -> str:
        return f"{self.name}, {self.precision}"

    def replay_arguments(self, seq_lens: list[int], query_len: int = 1) -> dict[str, list[int]] | None:
        return {"actual_seq_lengths_kv": _lengths_of_tokens(seq_lens, [query_len] * len(seq_lens))}

    def prepare_compiled(self, batch: ForwardBatch, seq_lens: list[int]) -> Int8Step:
        num_rows, query_len = len(seq_lens), batch.max_query_len
        num_tokens = num_rows * query_len
        slots = self._stored_slots(batch.slot_mapping, num_tokens)
        part = self._decoded(batch, slice(0, num_rows), slice(0, num_tokens), seq_lens, [query_len] * num_rows)
        return Int8Step(self._rows(slots), [part], is_compiled=True)

    def prepare(self, batch: ForwardBatch) -> Int8Step:
        slots = self._stored_slots(batch.slot_mapping, batch.slot_mapping.shape[0])
        parts: list[DecodedPart | GatheredPart] = []
        for part in split_byte_rows(batch.query_start_np, batch.seq_lens_np, self.precision):
            if part.is_decoded:
                parts.append(self._decoded(batch, part.rows, part.tokens, part.seq_lens, part.query_lens))
            else:
                of_part = slots[part.tokens] if part.is_fresh else self._cached_slots(batch, part)
                parts.append(GatheredPart(part, self._rows(of_part)))
        return Int8Step(self._rows(slots), parts)

    def _rows(self, slots: torch.Tensor) -> dict[int, torch.Tensor]:
        """K → [2, n*K]: where the heads of tokens in slots [n] are."""
        blocks = slots.div(self.block_size, rounding_mode="floor")
        return {
            num_heads: ((slots + blocks * (self.block_size * (num_heads - 1)))[:, None] + first_rows).view(2, -1)
            for num_heads, first_rows in self._first_rows.items()
        }

    def _cached_slots(self, batch: ForwardBatch, part: BytePart) -> torch.Tensor:
        """[kv] int64: slots of all tokens of a part's rows."""
        width = -(-max(part.seq_lens) // self.block_size)
        blocks = batch.block_table[part.rows, :width].long() * self.block_size
        offsets = torch.arange(self.block_size, device=blocks.device)
        slots = (blocks[..., None] + offsets).flatten()
        # a row's blocks have room for more tokens than it has
        room = width * self.block_size
        kept = np.flatnonzero(np.arange(room) < np.array(part.seq_lens)[:, None])
        return slots.index_select(0, torch.from_numpy(kept).to(slots.device))

    def _decoded(
        self, batch: ForwardBatch, rows: slice, tokens: slice, seq_lens: list[int], query_lens: list[int]
    ) -> DecodedPart:
        block_table, lens = batch.block_table[rows], batch.seq_lens[rows]
        lengths = _lengths_of_tokens(seq_lens, query_lens)
        query_len = max(query_lens)
        if query_len > 1 and min(query_lens) == query_len:
            # without anything from the host: graphs repeat it
            block_table = block_table.repeat_interleave(query_len, 0)
            lens = (lens[:, None] + torch.arange(1 - query_len, 1, dtype=lens.dtype, device=lens.device)).view(-1)
        elif query_len > 1:
            row_of_token = np.repeat(np.arange(len(query_lens)), query_lens)
            block_table = block_table.index_select(0, torch.from_numpy(row_of_token).to(lens.device))
            lens = torch.tensor(lengths, dtype=lens.dtype).to(lens.device)
        masks = window_masks(self._windows, lens, block_table.shape[1], self.block_size)
        return DecodedPart(tokens, lengths, block_table, masks)

    def forward(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Int8Cache,
        batch: ForwardBatch,  # noqa: ARG002 - `prepare` has read it
        metadata: Int8Step,
        rotary: RotaryStep | None = None,
    ) -> torch.Tensor:
        if self._mask is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        if rotary is not None:
            rotary.rotate(query, key, spec.head_size)
        store = torch.ops.ascend_vllm.ascend_store_int8 if metadata.is_compiled else _store_int8
        query = store(query, key, value, *kv_cache, metadata.rows[spec.num_kv_heads], spec.k_scale, spec.v_scale)
        query = query.view(-1, spec.num_heads, spec.head_size)
        outputs = []
        for part in metadata.parts:
            if isinstance(part, DecodedPart):
                output = self._decode(spec, query[part.tokens], kv_cache, part)
            else:
                output = _attend_gathered(spec, query[part.part.tokens], kv_cache, part, self._mask)
            outputs.append(output.view(-1, spec.num_heads * spec.head_size))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if spec.v_scale == 1 else output * spec.v_scale

    def _decode(
        self, spec: AttentionSpec, query: torch.Tensor, kv_cache: Int8Cache, part: DecodedPart
    ) -> torch.Tensor:
        """query [t, N, D] → [t, N, 1, D]."""
        (keys, values), scales = kv_cache.numbers.unbind(0), kv_cache.scales
        key_scale, value_scale = [self._one[query.dtype]] * 2 if scales is None else scales.unbind(0)
        mode = _ONE_SCALE if scales is None else _PAGED_SCALES
        # the kernels for one token know no window but that of a mask
        mask = None if spec.sliding_window is None else part.window_masks[spec.sliding_window]
        output: torch.Tensor = torch.ops.npu.npu_fused_infer_attention_score(
            query[:, :, None],
            keys,
            values,
            atten_mask=mask,
            actual_seq_lengths_kv=part.seq_lens,
            key_antiquant_scale=key_scale,
            value_antiquant_scale=value_scale,
            block_table=part.block_table,
            num_heads=spec.num_heads,
            num_key_value_heads=spec.num_kv_heads,
            scale=spec.scale * spec.k_scale,
            input_layout="BNSD",
            block_size=self.block_size,
            key_antiquant_mode=mode,
            value_antiquant_mode=mode,
        )[0]
        return output


def _attend_gathered(
    spec: AttentionSpec, query: torch.Tensor, kv_cache: Int8Cache, gathered: GatheredPart, mask: torch.Tensor
) -> torch.Tensor:
    """query [t, N, D] → [t, N, D]."""
    part, rows = gathered.part, gathered.rows[spec.num_kv_heads].view(-1)
    numbers = kv_cache.numbers.view(-1, spec.head_size).index_select(0, rows)
    is_precise = part.high_precision
    if kv_cache.scales is None:
        floats = numbers.to(query.dtype)
        # products with bytes may be beyond float16
        spec, is_precise = dataclasses.replace(spec, scale=spec.scale * spec.k_scale), True
    else:
        scales = kv_cache.scales.view(-1).index_select(0, rows)
        floats = (numbers * scales[:, None]).to(query.dtype)
    key, value = floats.view(2, -1, spec.num_kv_heads, spec.head_size).unbind(0)
    return packed_attention(spec, query, key, value, mask, part.query_ends, part.kv_ends, high_precision=is_precise)


def _lengths_of_tokens(seq_lens: Sequence[int], query_lens: Iterable[int]) -> list[int]:
    """Tokens that each token of rows sees, itself included; the last of a row sees all of it."""
    return [
        seq_len - behind
        for seq_len, query_len in zip(seq_lens, query_lens, strict=True)
        for behind in range(query_len - 1, -1, -1)
    ]
