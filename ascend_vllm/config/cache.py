"""The KV cache's section of the configuration."""

from __future__ import annotations

import msgspec

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.types.kv_cache import KV_CACHE_FORMATS, KVCacheFormat, KVCacheSpec


class CacheConfig(msgspec.Struct, frozen=True):
    """Size and layout of the paged KV cache.

    Attributes:
        block_size: tokens of a block.
        gpu_memory_utilization: share of the device's memory for weights, activations and cache (NPU).
        kv_cache_memory_bytes: explicit size; None: the platform decides.
        num_gpu_blocks_override: explicit number of blocks; None: from the size.
        swap_space_gib: CPU memory for swapped blocks per device, in GiB.
        cache_dtype: "auto" (the model's), a dtype's name or one of `KV_CACHE_FORMATS`.
        scale_dtype: of scales in a cache of `KV_CACHE_FORMATS`; the device's.
        layer_scales: scales of keys and values of each layer, for each tensor-parallel rank; None: no file has them.
        has_checkpoint_scales: the checkpoint has scales of int8 keys and values.
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
    scale_dtype: str = "bfloat16"
    layer_scales: tuple[tuple[float, ...], ...] | None = None
    has_checkpoint_scales: bool = False
    enable_prefix_caching: bool = False
    sliding_window: int | None = None

    @property
    def format(self) -> KVCacheFormat | None:
        """Of a cache in one byte per number; None: it is in the model's dtype."""
        found = KV_CACHE_FORMATS.get(self.cache_dtype)
        is_measured = self.layer_scales is not None or (self.has_checkpoint_scales and self.cache_dtype == "int8")
        if found is None or is_measured:
            return found and KVCacheFormat(found.dtype)
        return msgspec.structs.replace(found, scale_dtype=self.scale_dtype)


def kv_cache_specs(model: ModelConfig, cache: CacheConfig, tensor_parallel_size: int = 1) -> list[KVCacheSpec]:
    """What the layers of a model will report by their plans, on one of the workers that share each layer.

    Returns:
        One per layer.
    """
    # a worker has one KV head at least
    num_heads = max(1, model.arch.num_kv_heads // tensor_parallel_size)
    sizes = (cache.block_size, num_heads, model.arch.head_size, model.dtype, cache.format)
    return [plan.kv_cache.spec(*sizes) for plan in model.arch.layers]
