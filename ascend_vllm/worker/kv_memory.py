"""Memory of the KV cache: number of blocks, and the caches of all layers, on the device and in CPU memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ascend_vllm.attention.backend import AttentionBackend, LayerCache
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.attention import Attention
from ascend_vllm.platforms.interface import Platform

GIB = 1 << 30


class KVMemory:
    """Sizes and allocates the KV cache of a model. A block has a part in each layer, whose size the layer reports.

    Args:
        config: of the engine.
        platform: of the device.
        device: of the model.
        layers: of the model, in the order of their caches.
        backend: computes attention in all of them.

    Attributes:
        block_bytes: of one block in all layers.
        num_spare_blocks: see `AttentionBackend.num_spare_blocks`.
    """

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        device: torch.device,
        layers: Sequence[Attention],
        backend: AttentionBackend,
    ) -> None:
        self._config = config
        self._platform = platform
        self._device = device
        self._backend = backend
        self._attention_specs = [layer.spec for layer in layers]
        self._specs = [layer.kv_cache_spec(config.cache.block_size) for layer in layers]
        self.block_bytes = sum(spec.block_bytes for spec in self._specs)
        self.num_spare_blocks = backend.num_spare_blocks(
            max((config.scheduler.max_num_seqs * max(config.graphs.query_lens), *config.graphs.piece_sizes))
        )

    def num_blocks(self, other_bytes: int) -> int:
        """Number of blocks that the device has memory for; 1 or more.

        A default size is limited to the blocks that all slots can fill, unless free blocks are useful for prefix
        caching.

        Args:
            other_bytes: memory that is not allocated now but will be needed for other things.

        Raises:
            ConfigError: there is no memory for one block, or for the configured size.
        """
        cache = self._config.cache
        num_bytes = max(0, self._platform.kv_cache_bytes(cache, other_bytes))
        num_blocks = num_bytes // self.block_bytes - self.num_spare_blocks
        if num_blocks < 1:
            beside = f" beside {self.num_spare_blocks} spare ones" if self.num_spare_blocks else ""
            raise ConfigError(
                f"A KV cache of {num_bytes} bytes has no room for one block of {cache.block_size} tokens "
                f"({self.block_bytes} bytes){beside}: set {self._platform.cache_size_flags} higher, or "
                "--block-size lower."
            )
        if cache.kv_cache_memory_bytes is None and not cache.enable_prefix_caching:
            scheduler = self._config.scheduler
            usable = scheduler.max_num_seqs * math.ceil(scheduler.max_model_len / cache.block_size)
            num_blocks = min(num_blocks, usable)
        return num_blocks

    def num_cpu_blocks(self) -> int:
        """Number of blocks that --swap-space has room for in CPU memory."""
        return int(self._config.cache.swap_space_gib * GIB) // self.block_bytes

    def cache_bytes(self, num_blocks: int) -> int:
        """Memory that `allocate` needs for this number of blocks."""
        return (num_blocks + self.num_spare_blocks) * self.block_bytes

    def allocate(self, num_blocks: int, what: str, flags: str) -> list[LayerCache]:
        """Allocates a cache with spare blocks on the device for each layer, and binds them to the backend.

        Args:
            num_blocks: without spare ones.
            what: name of the caches, for error messages.
            flags: that set their size, for error messages.

        Raises:
            ConfigError: the memory is not there.
        """
        kv_caches = self._allocate(num_blocks + self.num_spare_blocks, what, flags)
        self._backend.bind(self._attention_specs, kv_caches, num_blocks)
        return kv_caches

    def allocate_swap_pool(self, num_blocks: int) -> list[LayerCache]:
        """Allocates a cache in CPU memory for each layer; an empty list if there are no blocks.

        Raises:
            ConfigError: the memory is not there.
        """
        return self._allocate(num_blocks, "swap pool", "--swap-space", on_host=True) if num_blocks else []

    def _allocate(self, num_blocks: int, what: str, flags: str, *, on_host: bool = False) -> list[LayerCache]:
        sizes = [num_blocks * spec.block_bytes for spec in self._specs]
        try:
            if on_host:
                memory = self._platform.allocate_host(sum(sizes))
            else:
                memory = self._platform.allocate(sum(sizes), self._device)
        except (OSError, MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"cannot allocate a {what} of {num_blocks} blocks ({sum(sizes) / GIB:.2f} GiB): "
                f"{first_line(error)}; lower {flags}."
            ) from error
        parts = torch.split(memory, sizes)
        return [
            self._backend.make_cache(part, num_blocks, spec) for part, spec in zip(parts, self._specs, strict=True)
        ]


def first_line(error: BaseException) -> str:
    """First line of an error's message, without the tables that follow."""
    return (str(error).splitlines() or [type(error).__name__])[0]
