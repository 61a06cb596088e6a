"""Shapes and sizes of attention layers' KV caches. No torch: sizes are known before a model is built.

Letters: S tokens of a block, K KV heads, D head size.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping

import msgspec

# keys and values of each KV head, one number each
KEY_VALUE = "key_value"
# what latent attention (MLA) caches: one row of numbers that all heads share
LATENT = "latent"

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
# A block's bytes are a multiple of this, so that caches of different dtypes can follow one another in memory.
_ALIGNMENT = 64


class KVCacheSpec(msgspec.Struct, frozen=True):
    """One attention layer's part of a KV block, as the layer reports it. Layers of a model may differ.

    The attention backend decides the layout in memory.

    Attributes:
        kind: KEY_VALUE, LATENT, or another name that a layer and its attention backend agree on.
        block_shape: of the cached numbers; KEY_VALUE: (2, S, K, D); LATENT: (1, S, 1, width of a row).
        dtype: of these numbers, as torch names it; need not be the model's.
        scale_shape: scales of a block; None: there are none.
        scale_dtype: of them.

    Example:
        >>> KVCacheSpec(KEY_VALUE, (2, 16, 2, 64), "bfloat16").block_bytes
        8192
    """

    kind: str
    block_shape: tuple[int, ...]
    dtype: str
    scale_shape: tuple[int, ...] | None = None
    scale_dtype: str = "float32"

    @property
    def block_bytes(self) -> int:
        """Memory of a block in this layer, a multiple of 64."""
        num_bytes = math.prod(self.block_shape) * _DTYPE_BYTES[self.dtype]
        if self.scale_shape is not None:
            num_bytes += math.prod(self.scale_shape) * _DTYPE_BYTES[self.scale_dtype]
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class KVCacheFormat(msgspec.Struct, frozen=True):
    """Keys and values in one byte each, as --kv-cache-dtype asks for them.

    Attributes:
        dtype: of the cached numbers, as torch names it.
        has_scales: each head of each token has scales of its own, computed when it is written; otherwise a layer has
            one for keys and one for values, or one for latents.
        scale_dtype: of such scales, as the device's kernels read them.
    """

    dtype: str
    has_scales: bool = False
    scale_dtype: str = "bfloat16"


# names of --kv-cache-dtype → their formats; int8 has scales of layers where there is a file of them
KV_CACHE_FORMATS: Mapping[str, KVCacheFormat] = types.MappingProxyType(
    {
        "int8": KVCacheFormat("int8", has_scales=True),
        "fp8": KVCacheFormat("float8_e4m3fn"),
        "fp8_e4m3": KVCacheFormat("float8_e4m3fn"),
        "fp8_e5m2": KVCacheFormat("float8_e5m2"),
        "int8_per_token_head": KVCacheFormat("int8", has_scales=True),
        "fp8_per_token_head": KVCacheFormat("float8_e4m3fn", has_scales=True),
    }
)


class KVCachePlan(msgspec.Struct, frozen=True):
    """What a layer caches per token, according to config.json; `spec` adds the engine's flags.

    Attributes:
        kind: see `KVCacheSpec`.
        num_vectors: of a head: 2 are a key and a value.
        num_heads: on every rank; None: the rank's share of the model's KV heads.
        width: numbers of a vector; None: the model's head size.
        dtype: None: the engine's.
        has_scales: there is a scale for each vector.
        scales_per_vector: of vectors that have scales of their own; 2: one of a latent and one of the rotated key
            behind it, whose numbers differ in size.

    Example:
        A latent that all heads share, and keys and values in 8 bits:

        >>> KVCachePlan(LATENT, num_vectors=1, num_heads=1, width=576).spec(16, 8, 128, "bfloat16").block_shape
        (1, 16, 1, 576)
        >>> KVCachePlan("scaled", dtype="int8", has_scales=True).spec(16, 8, 128, "bfloat16").scale_shape
        (2, 16, 8)
    """

    kind: str = KEY_VALUE
    num_vectors: int = 2
    num_heads: int | None = None
    width: int | None = None
    dtype: str | None = None
    has_scales: bool = False
    scales_per_vector: int = 1

    def spec(
        self,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: str,
        cache_format: KVCacheFormat | None = None,
    ) -> KVCacheSpec:
        """What the layer reports.

        Args:
            block_size: S.
            num_kv_heads: K of this rank.
            head_size: D.
            dtype: of the model.
            cache_format: of the engine's KV cache; None: the model's dtype. Plans with a dtype keep it.
        """
        vectors = (self.num_vectors, block_size, self.num_heads or num_kv_heads)
        shape, scale_shape = (*vectors, self.width or head_size), (*vectors[:2], vectors[2] * self.scales_per_vector)
        if cache_format is None or self.dtype is not None:
            return KVCacheSpec(self.kind, shape, self.dtype or dtype, scale_shape if self.has_scales else None)
        if not cache_format.has_scales:
            return KVCacheSpec(self.kind, shape, cache_format.dtype)
        return KVCacheSpec(self.kind, shape, cache_format.dtype, scale_shape, cache_format.scale_dtype)


# of layers that cache keys and values as they are
KEYS_AND_VALUES = KVCachePlan()
