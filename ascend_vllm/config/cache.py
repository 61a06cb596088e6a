"""The KV cache's section of the configuration."""

from __future__ import annotations

import msgspec


class CacheConfig(msgspec.Struct, frozen=True):
    """Size and layout of the paged KV cache.

    Attributes:
        block_size: tokens of a block.
        gpu_memory_utilization: share of the device's memory for weights, activations and cache (NPU).
        kv_cache_memory_bytes: explicit size; None: the platform decides.
        num_gpu_blocks_override: explicit number of blocks; None: from the size.
        swap_space_gib: CPU memory for swapped blocks per device, in GiB.
        cache_dtype: "auto" (the model's) or a dtype's name.
        enable_prefix_caching: reuse blocks with equal contents.
        sliding_window: tokens that every layer looks back on, so that older blocks are of no use; None: a layer
            sees everything.
    """

    block_size: int
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space_gib: float = 4.0
    cache_dtype: str = "auto"
    enable_prefix_caching: bool = False
    sliding_window: int | None = None
