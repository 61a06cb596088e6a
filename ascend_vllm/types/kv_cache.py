"""What attention layers keep of the tokens they have seen. No torch: sizes are known before a model is built.

Letters: S tokens of a block, K KV heads, D head size.
"""

from __future__ import annotations

import math

import msgspec

# keys and values of each KV head, one number each
KEY_VALUE = "key_value"

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_SCALE_BYTES = 4
# A block's bytes are a multiple of this, so that caches of different dtypes can lie one behind another.
_ALIGNMENT = 64


class KVCacheSpec(msgspec.Struct, frozen=True):
    """One attention layer's part of a KV block, as the layer reports it. Layers of a model may differ.

    How a block lies in memory is the attention backend's business.

    Attributes:
        kind: KEY_VALUE, or what else a layer and the backend that serves it agree on.
        block_shape: numbers that are cached; KEY_VALUE: (2, S, K, D).
        dtype: of these numbers, as torch names it; need not be the model's.
        scale_shape: float32 scales of a block; None: there are none.

    Example:
        >>> KVCacheSpec.of_heads(16, num_kv_heads=2, head_size=64, dtype="bfloat16").block_bytes
        8192
    """

    kind: str
    block_shape: tuple[int, ...]
    dtype: str
    scale_shape: tuple[int, ...] | None = None

    @classmethod
    def of_heads(cls, block_size: int, num_kv_heads: int, head_size: int, dtype: str) -> KVCacheSpec:
        """Of a layer that caches keys and values as they are."""
        return cls(KEY_VALUE, (2, block_size, num_kv_heads, head_size), dtype)

    @property
    def block_bytes(self) -> int:
        """Memory of a block in this layer, a multiple of 64."""
        num_bytes = math.prod(self.block_shape) * _DTYPE_BYTES[self.dtype]
        if self.scale_shape is not None:
            num_bytes += math.prod(self.scale_shape) * _SCALE_BYTES
        return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
