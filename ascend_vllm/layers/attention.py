"""The attention layer, from queries and what is cached on; the same for all models."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ascend_vllm.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    ForwardBatch,
    HeadNorms,
    LatentWeights,
    LayerCache,
    RotaryStep,
)
from ascend_vllm.layers.base import Layer
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES, KVCacheFormat, KVCachePlan, KVCacheSpec


@dataclasses.dataclass(slots=True)
class ForwardContext:
    """State that the layers of a model share in one forward step.

    Attributes:
        batch: the step's tokens and rows.
        kv_caches: one cache per attention layer, as the backend made them.
        backend: computes attention.
        metadata: result of `AttentionBackend.prepare`.
        rotary: positions and cos/sin table of this step; None for models without rotary embedding.
        local_rotary: the same for layers with rotary positions of their own.
        output_indices: [S], the tokens that the layer goes on with behind attention; None: all.
    """

    batch: ForwardBatch
    kv_caches: list[LayerCache]
    backend: AttentionBackend
    metadata: Any
    rotary: RotaryStep | None = None
    local_rotary: RotaryStep | None = None
    output_indices: torch.Tensor | None = None

    def of_outputs(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, …] → [S, …], the rows of the tokens that the layer goes on with."""
        return x if self.output_indices is None else x[self.output_indices]


@dataclasses.dataclass(frozen=True, slots=True)
class ChannelScales:
    """Of keys and values in int8, as ModelSlim measures them: byte = number / scale + offset.

    Attributes:
        scales: [2, K*D] float32, of keys (after their rotation) and values of this rank's heads.
        offsets: likewise.
    """

    scales: torch.Tensor
    offsets: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _FoldedScales:
    """Attention over bytes by channel: kernels see numbers that are bytes already, with a scale of 1.

    Scales of keys become factors on queries; offsets of keys add the same to all scores of a query, which a softmax
    does not see. Sums of values are scaled, and their offsets subtracted: weights add up to 1.
    """

    channels: ChannelScales
    # [N*D] in the queries' dtype
    of_queries: torch.Tensor
    # [N*D] float32
    of_outputs: torch.Tensor
    output_offsets: torch.Tensor

    @classmethod
    def of(cls, channels: ChannelScales, spec: AttentionSpec, dtype: torch.dtype) -> _FoldedScales:
        group = spec.num_heads // spec.num_kv_heads

        def each_head(of_kv_heads: torch.Tensor) -> torch.Tensor:
            return of_kv_heads.view(-1, spec.head_size).repeat_interleave(group, 0).flatten()

        keys, values = map(each_head, channels.scales)
        return cls(channels, keys.to(dtype), values, each_head(channels.offsets[1]))


class Attention(Layer):
    """One attention layer over the paged KV cache.

    Args:
        spec: heads, scale and window.
        index: of the layer's cache in `ForwardContext.kv_caches`.
        dtype: of keys and values, and of the cache unless `kv_cache` has another, or `set_cache_format` is called.
        kv_cache: what the layer caches per token, see `LayerPlan`.
        is_local: rotates by `ForwardContext.local_rotary`.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        index: int,
        dtype: torch.dtype,
        kv_cache: KVCachePlan = KEYS_AND_VALUES,
        *,
        is_local: bool = False,
    ) -> None:
        self.spec = spec
        self.index = index
        self.dtype = dtype
        self._kv_cache = kv_cache
        self._is_local = is_local
        self._cache_format: KVCacheFormat | None = None
        self._folded: _FoldedScales | None = None

    def set_cache_format(
        self, cache_format: KVCacheFormat | None, k_scale: float = 1.0, v_scale: float = 1.0
    ) -> None:
        """Sets how the layer caches keys and values, before there is a cache.

        Args:
            cache_format: None: in their dtype.
            k_scale: of all keys, for formats without scales of their own.
            v_scale: of all values.
        """
        self._cache_format = cache_format
        self.spec = dataclasses.replace(self.spec, k_scale=k_scale, v_scale=v_scale)

    def set_channel_scales(self, channels: ChannelScales) -> None:
        """Sets the scales, on the model's device, of a cache in int8 without scales of its own."""
        self._folded = _FoldedScales.of(channels, self.spec, self.dtype)

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What the layer caches per block of tokens; subclasses may differ from the layer's plan."""
        spec, dtype = self.spec, str(self.dtype).removeprefix("torch.")
        return self._kv_cache.spec(block_size, spec.num_kv_heads, spec.head_size, dtype, self._cache_format)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context: ForwardContext,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """query [T, N*D], key and value [T, K*D] → [T, N*D].

        Normalises the heads of query and key, rotates them, and stores key and value.
        """
        cache = context.kv_caches[self.index]
        rotary = context.local_rotary if self._is_local else context.rotary
        folded, step = self._folded, (cache, context.batch, context.metadata)
        if norms is not None:
            if folded is None and context.backend.norms_heads:
                return context.backend.forward_normed(self.spec, query, key, value, *step, rotary, norms)
            query, key = norms.apply(query, key)
        if folded is None:
            return context.backend.forward(self.spec, query, key, value, *step, rotary)
        if rotary is not None:
            rotary.rotate(query, key, self.spec.head_size)
        key_scales, value_scales = folded.channels.scales
        key_offsets, value_offsets = folded.channels.offsets
        sums = context.backend.forward(
            self.spec,
            query * folded.of_queries,
            key / key_scales + key_offsets,
            value / value_scales + value_offsets,
            *step,
        )
        return ((sums - folded.output_offsets) * folded.of_outputs).to(query.dtype)

    def forward_latent(
        self, query: torch.Tensor, latent: torch.Tensor, weights: LatentWeights, context: ForwardContext
    ) -> torch.Tensor:
        """query [T, N*(Q+F)], latent [T, W] → [T, N*V]; see `AttentionBackend.forward_latent`.

        Raises:
            RuntimeError: the model has no rotary positions.
        """
        if context.rotary is None:
            raise RuntimeError("latent attention needs rotary positions")
        cache, batch, metadata = context.kv_caches[self.index], context.batch, context.metadata
        return context.backend.forward_latent(
            self.spec, query, latent, weights, cache, batch, metadata, context.rotary
        )
