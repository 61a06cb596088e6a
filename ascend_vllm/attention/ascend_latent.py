"""Latent attention (MLA) on Ascend NPUs, over torch_npu's fused operators.

Rows of few tokens are computed in the latent space ("absorbed"): all heads share one key per token, the cached latent
with its rotary key, and the latent is the value too. For prompts and long chunks that costs more than expanding the
latents to keys and values of each head, of long sequences in chunks whose results are merged.

Letters: T tokens of a step, t tokens and r rows of a part, B maximum blocks of a row, N query heads, L latent width
(512), F rotary width (64), W = L+F, Q width of the part of a head that is not rotated (128), V value width (128),
P blocks of the cache, S tokens of a block.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ascend_vllm.attention.ascend_calls import compressed_mask, copy_blocks
from ascend_vllm.attention.ascend_plan import LatentPart, split_latent_rows
from ascend_vllm.attention.backend import AttentionBackend, AttentionSpec, ForwardBatch, LatentWeights, RotaryStep
from ascend_vllm.types.kv_cache import LATENT, KVCacheSpec

# the only sizes that the operators support
_LATENT_WIDTH = 512
_ROTARY_WIDTH = 64
_HEAD_WIDTH = 128
# most query heads of the absorbed form, whose number is a power of two
_MAX_HEADS = 128
# values of sparse_mode: no mask; causal, with the diagonal that ends in the lower right corner
_NO_MASK = 0
_CAUSAL = 3

# most results that one call merges
_MAX_MERGED = 16

# latents [P, S, 1, L] and rotary keys [P, S, 1, F]
LatentCache: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def _rotate_and_store(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    latent_cache: torch.Tensor,
    rotary_cache: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Rotates queries, and stores normed latents and rotated keys.

    Args:
        query: [T, N, 1, F], contiguous.
        latent: [T, 1, 1, W], contiguous.
        norm: [L].
        cos: [T, 1, 1, F].
        sin: likewise.
        slots: [T] int64, all different.
        latent_cache: [P, S, 1, L]; written.
        rotary_cache: [P, S, 1, F]; written.
        eps: of the norm.

    Returns:
        [T, N, 1, F]: the queries.
    """
    npu = torch.ops.npu
    npu.npu_kv_rmsnorm_rope_cache(
        latent, norm, cos, sin, slots, rotary_cache, latent_cache, epsilon=eps, cache_mode="PA"
    )
    rotated: torch.Tensor = npu.npu_interleave_rope(query, cos, sin)
    return rotated


# As one op for compilers, whose schema does not declare that it writes the caches: see `ascend_calls`. It runs before
# attention, since attention reads the queries that it returns.
_library: Any = torch.library.Library("ascend_vllm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "ascend_rotate_and_store(Tensor query, Tensor latent, Tensor norm, Tensor cos, Tensor sin, Tensor slots, "
    "Tensor latent_cache, Tensor rotary_cache, float eps) -> Tensor"
)
_library.impl("ascend_rotate_and_store", _rotate_and_store, "PrivateUse1")
_library.impl("ascend_rotate_and_store", lambda query, *_: torch.empty_like(query), "Meta")


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceChunk:
    """Tokens of the cache that are expanded in one call."""

    # host: tokens up to the end of each row, and all of them
    ends: list[int]
    # [r] int32, device: how many of each row, and the first; None: each row's first
    lengths: torch.Tensor
    starts: torch.Tensor | None
    # the last chunk of its rows has the step's own tokens, which attend causally
    is_last: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePart:
    """A part and what its calls read on the device."""

    part: LatentPart
    # [r, B] int32
    block_table: torch.Tensor
    # of a part that is expanded
    chunks: tuple[DeviceChunk, ...] = ()


@dataclasses.dataclass(slots=True)
class LatentStep:
    """What all layers of a step share."""

    # [T] int64, each in [0, P*S): tokens that are not to be stored have slots in the spare blocks
    slots: torch.Tensor
    # in the order of the step's rows
    parts: list[DevicePart]
    # [T, 1, 1, F] in the model's dtype: made by the first layer
    angles: tuple[torch.Tensor, torch.Tensor] | None = None
    # the step is being compiled
    is_compiled: bool = False

    def cos_and_sin(self, rotary: RotaryStep, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The angles of each token, once for the first and once for the second element of pairs."""
        if self.angles is None:
            rows = rotary.cos_sin.index_select(0, rotary.positions).to(dtype)
            cos, sin = rows.chunk(2, -1)
            shape = (-1, 1, 1, rows.shape[-1])
            self.angles = torch.cat((cos, cos), -1).view(shape), torch.cat((sin, sin), -1).view(shape)
        return self.angles


class AscendLatentAttention(AttentionBackend):
    """A layer's cache is a `LatentCache` in the model's dtype; the last blocks are spare, see `AscendAttention`."""

    name = "ascend_latent"
    dtypes = (torch.float16, torch.bfloat16)
    head_sizes = range(_LATENT_WIDTH + _ROTARY_WIDTH, _LATENT_WIDTH + _ROTARY_WIDTH + 1)
    block_sizes = (64, 128)
    supports_latent = True

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        # made by `bind`: [spare blocks * S] int64, and the compressed mask
        self._spare_slots: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    @classmethod
    def _unsupported_sizes_reason(cls, spec: AttentionSpec) -> str | None:
        latent = spec.latent
        if latent is None:
            return "it computes latent attention only"
        sizes = (latent.latent_width, latent.rotary_width, latent.nope_width, latent.value_width)
        if sizes != (_LATENT_WIDTH, _ROTARY_WIDTH, _HEAD_WIDTH, _HEAD_WIDTH):
            return (
                f"its operators need kv_lora_rank {_LATENT_WIDTH}, qk_rope_head_dim {_ROTARY_WIDTH}, "
                f"qk_nope_head_dim {_HEAD_WIDTH} and v_head_dim {_HEAD_WIDTH}, but this model has "
                f"{', '.join(map(str, sizes))}"
            )
        if spec.num_heads > _MAX_HEADS:
            return f"{spec.num_heads} query heads of a device are more than its operators take, {_MAX_HEADS}"
        return None

    @classmethod
    def unsupported_cache_reason(cls, cache: KVCacheSpec, dtype: torch.dtype) -> str | None:
        if cache == KVCacheSpec(LATENT, cache.block_shape, str(dtype).removeprefix("torch.")):
            return None
        return f"it caches latents in {dtype}, not {cache.kind} in {cache.dtype}"

    def kv_cache_shape(self, num_blocks: int, cache: KVCacheSpec) -> tuple[int, ...]:
        """Shape of the numbers of both tensors together."""
        return (num_blocks, *cache.block_shape[1:])

    def make_cache(self, memory: torch.Tensor, num_blocks: int, cache: KVCacheSpec) -> LatentCache:
        numbers = super().make_cache(memory, num_blocks, cache).view(-1)
        tokens = num_blocks * self.block_size
        latents, keys = numbers.split((tokens * _LATENT_WIDTH, tokens * _ROTARY_WIDTH))
        return (
            latents.view(num_blocks, self.block_size, 1, _LATENT_WIDTH),
            keys.view(num_blocks, self.block_size, 1, _ROTARY_WIDTH),
        )

    def num_spare_blocks(self, max_num_tokens: int) -> int:
        return -(-max_num_tokens // self.block_size)

    def bind(
        self,
        specs: Sequence[AttentionSpec],  # noqa: ARG002 - all layers are alike
        kv_caches: Sequence[LatentCache],
        num_blocks: int,
    ) -> None:
        latents = kv_caches[0][0]
        size, device = latents.shape[0] * self.block_size, latents.device
        self._spare_slots = torch.arange(num_blocks * self.block_size, size, device=device)
        if self._mask is None:
            self._mask = compressed_mask(device)

    def copy_blocks(
        self,
        source: LatentCache,
        source_blocks: torch.Tensor,
        target: LatentCache,
        target_blocks: torch.Tensor,
    ) -> None:
        for part, target_part in zip(source, target, strict=True):
            copy_blocks(part, source_blocks, target_part, target_blocks)

    def replay_arguments(self, seq_lens: list[int], query_len: int = 1) -> dict[str, list[int]] | None:
        """The arguments of `_absorbed` that differ from step to step."""
        if query_len == 1:
            return {"actual_seq_lengths_kv": seq_lens}
        query_ends = list(range(query_len, query_len * len(seq_lens) + 1, query_len))
        return {"actual_seq_lengths": query_ends, "actual_seq_lengths_kv": seq_lens}

    def prepare_compiled(self, batch: ForwardBatch, seq_lens: list[int]) -> LatentStep:
        num_rows, query_len = len(seq_lens), batch.max_query_len
        num_tokens = num_rows * query_len
        part = LatentPart(
            is_absorbed=True,
            rows=slice(0, num_rows),
            tokens=slice(0, num_tokens),
            query_ends=list(range(query_len, num_tokens + 1, query_len)),
            seq_lens=seq_lens,
            max_query_len=query_len,
        )
        slots = self._stored_slots(batch.slot_mapping, num_tokens)
        return LatentStep(slots, [DevicePart(part, batch.block_table)], is_compiled=True)

    def prepare(self, batch: ForwardBatch) -> LatentStep:
        parts = split_latent_rows(batch.query_start_np, batch.seq_lens_np)
        slots = self._stored_slots(batch.slot_mapping, batch.slot_mapping.shape[0])
        return LatentStep(slots, [_upload(part, batch) for part in parts])

    def _stored_slots(self, slots: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Slots without negative ones: only decoding steps have those, and there are spare slots for all of them."""
        if self._spare_slots is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        if num_tokens > self._spare_slots.shape[0]:
            return slots
        return torch.where(slots < 0, self._spare_slots[:num_tokens], slots)

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Raises RuntimeError: no layer of a model that this backend serves has keys and values."""
        raise RuntimeError(f"attention backend {self.name} computes latent attention only")

    def forward_latent(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        latent: torch.Tensor,
        weights: LatentWeights,
        kv_cache: LatentCache,
        batch: ForwardBatch,  # noqa: ARG002 - `prepare` has read it
        metadata: LatentStep,
        rotary: RotaryStep,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward_latent`."""
        if self._mask is None:
            raise RuntimeError("the attention backend has no KV cache: call bind first")
        num_tokens = query.shape[0]
        # the operators take no strided rows
        nope, rope = query.view(num_tokens, spec.num_heads, -1).split_with_sizes((_HEAD_WIDTH, _ROTARY_WIDTH), -1)
        nope = nope.contiguous()
        if rotary.is_neox:
            latents, keys = latent.split_with_sizes((_LATENT_WIDTH, _ROTARY_WIDTH), -1)
            rope, latent = _as_neighbours(rope), torch.cat((latents, _as_neighbours(keys)), -1)
        store = torch.ops.ascend_vllm.ascend_rotate_and_store if metadata.is_compiled else _rotate_and_store
        rope = store(
            rope.contiguous().view(num_tokens, spec.num_heads, 1, _ROTARY_WIDTH),
            latent.contiguous().view(num_tokens, 1, 1, _LATENT_WIDTH + _ROTARY_WIDTH),
            weights.norm,
            *metadata.cos_and_sin(rotary, query.dtype),
            metadata.slots,
            *kv_cache,
            weights.norm_eps,
        ).view(num_tokens, spec.num_heads, _ROTARY_WIDTH)
        layer = _Layer(spec, weights, kv_cache, self.block_size, self._mask)
        outputs = [
            (layer.absorbed if prepared.part.is_absorbed else layer.expanded)(
                nope[prepared.part.tokens], rope[prepared.part.tokens], prepared
            )
            for prepared in metadata.parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _as_neighbours(x: torch.Tensor) -> torch.Tensor:
    """x [..., F] with elements i and i+F/2, which are rotated together, as 2i and 2i+1: the operators' order."""
    return x.view(*x.shape[:-1], 2, _ROTARY_WIDTH // 2).transpose(-1, -2).flatten(-2)


def _upload(part: LatentPart, batch: ForwardBatch) -> DevicePart:
    block_table = batch.block_table[part.rows]
    if part.is_absorbed:
        return DevicePart(part, block_table)
    chunks = []
    for start, stop in zip(part.chunk_starts, (*part.chunk_starts[1:], None), strict=True):
        lengths, starts = batch.seq_lens[part.rows], None
        if start:
            starts = torch.full_like(lengths, start)
            lengths = lengths - start
        if stop is not None:
            lengths = torch.full_like(lengths, stop - start)
        counts = [(seq_len if stop is None else stop) - start for seq_len in part.seq_lens]
        chunks.append(DeviceChunk(list(itertools.accumulate(counts)), lengths, starts, is_last=stop is None))
    return DevicePart(part, block_table, tuple(chunks))


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """Attention of one layer over its cache, which has the step's tokens."""

    spec: AttentionSpec
    weights: LatentWeights
    cache: LatentCache
    block_size: int
    # `compressed_mask`
    mask: torch.Tensor

    def absorbed(self, nope: torch.Tensor, rope: torch.Tensor, prepared: DevicePart) -> torch.Tensor:
        """Attention in the latent space.

        Args:
            nope: [t, N, Q], contiguous.
            rope: [t, N, F], contiguous.
            prepared: the part.

        Returns:
            [t, N*V].
        """
        part, num_heads = prepared.part, self.spec.num_heads
        num_tokens = nope.shape[0]
        query = _per_head(nope, self.weights.absorb, (1, 0, 2))
        padded = 1 << (num_heads - 1).bit_length()
        if padded > num_heads:
            query, rope = (torch.nn.functional.pad(x, (0, 0, 0, padded - num_heads)) for x in (query, rope))
        options: dict[str, Any]
        if part.max_query_len == 1:
            query, rope = query[:, :, None], rope[:, :, None]
            options = {"input_layout": "BNSD_NBSD", "sparse_mode": _NO_MASK}
        else:
            options = {
                "input_layout": "TND_NTD",
                "sparse_mode": _CAUSAL,
                "atten_mask": self.mask,
                "actual_seq_lengths": part.query_ends,
            }
        # [P, 1, S, L] and [P, 1, S, F]
        latents, keys = (tensor.transpose(1, 2) for tensor in self.cache)
        output = torch.ops.npu.npu_fused_infer_attention_score(
            query,
            latents,
            latents,
            query_rope=rope,
            key_rope=keys,
            actual_seq_lengths_kv=part.seq_lens,
            block_table=prepared.block_table,
            num_heads=padded,
            num_key_value_heads=1,
            scale=self.spec.scale,
            block_size=self.block_size,
            **options,
        )[0]
        latents_of_heads = output.view(padded, num_tokens, _LATENT_WIDTH)[:num_heads]
        return _per_head(latents_of_heads, self.weights.output, (0, 1, 2)).view(num_tokens, -1)

    def expanded(self, nope: torch.Tensor, rope: torch.Tensor, prepared: DevicePart) -> torch.Tensor:
        """Attention over keys and values of each head; see `absorbed`."""
        num_heads = self.spec.num_heads
        outputs, sums = [], []
        for chunk in prepared.chunks:
            key, value, key_rope = self._expand(chunk, prepared.block_table)
            output, log_sum = torch.ops.npu.npu_fused_infer_attention_score(
                nope,
                key,
                value,
                query_rope=rope,
                key_rope=key_rope,
                atten_mask=self.mask if chunk.is_last else None,
                sparse_mode=_CAUSAL if chunk.is_last else _NO_MASK,
                actual_seq_lengths=prepared.part.query_ends,
                actual_seq_lengths_kv=chunk.ends,
                num_heads=num_heads,
                num_key_value_heads=num_heads,
                scale=self.spec.scale,
                input_layout="TND",
                softmax_lse_flag=len(prepared.chunks) > 1,
            )
            outputs.append(output.view(-1, _HEAD_WIDTH))
            sums.append(log_sum.view(-1))
        return _merged(outputs, sums).view(-1, num_heads * _HEAD_WIDTH)

    def _expand(
        self, chunk: DeviceChunk, block_table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys [n, N, Q], values [n, N, V] and rotary keys [n, N, F] of a chunk of n tokens, contiguous."""
        num_tokens, num_heads = chunk.ends[-1], self.spec.num_heads
        latents, keys = (tensor.new_empty(num_tokens, 1, tensor.shape[-1]) for tensor in self.cache)
        torch.ops.npu.npu_gather_pa_kv_cache(
            *self.cache, block_table, chunk.lengths, latents, keys, seq_offset=chunk.starts
        )
        both = torch.nn.functional.linear(latents.view(num_tokens, _LATENT_WIDTH), self.weights.expand)
        key, value = both.view(num_tokens, num_heads, 2 * _HEAD_WIDTH).chunk(2, -1)
        key_rope = keys.expand(-1, num_heads, -1)
        return key.contiguous(), value.contiguous(), key_rope.contiguous()


def _per_head(x: torch.Tensor, weight: torch.Tensor, order: tuple[int, int, int]) -> torch.Tensor:
    """x, of which `order` makes [N, t, K], times weight [N, K, M] → [t, N, M], contiguous."""
    result: torch.Tensor = torch.ops.npu.npu_transpose_batchmatmul(
        x, weight, perm_x1=order, perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
    )
    return result


def _merged(outputs: list[torch.Tensor], sums: list[torch.Tensor]) -> torch.Tensor:
    """Attention over all chunks.

    Args:
        outputs: [t*N, V] of each chunk.
        sums: [t*N] float32 of each: logarithms of the sums of exponentials.

    Returns:
        [t*N, V], in the dtype of the outputs.
    """
    if len(outputs) == 1:
        return outputs[0]
    dtype = outputs[0].dtype
    outputs = [output.float() for output in outputs]
    while len(outputs) > 1:
        output, log_sum = torch.ops.npu.npu_attention_update(sums[:_MAX_MERGED], outputs[:_MAX_MERGED], 1)
        outputs, sums = [output, *outputs[_MAX_MERGED:]], [log_sum, *sums[_MAX_MERGED:]]
    return outputs[0].to(dtype)
