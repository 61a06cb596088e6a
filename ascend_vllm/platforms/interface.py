"""What the engine asks of a device: facts and device calls, never class names of layers above."""

from __future__ import annotations

import abc

import torch

from ascend_vllm.config.cache import CacheConfig


class Platform(abc.ABC):
    """One kind of device.

    Attributes:
        name: as in --device.
        device_type: torch's name of it.
        dtypes: dtypes a model can run in, the preferred one for float32 checkpoints under --dtype auto first.
        block_sizes: allowed --block-size values.
        default_block_size: the fastest of them.
    """

    name: str
    device_type: str
    dtypes: tuple[torch.dtype, ...]
    block_sizes: tuple[int, ...]
    default_block_size: int

    @abc.abstractmethod
    def initialize(self, local_rank: int) -> torch.device:
        """Binds this process to its device and returns it; called once, before anything is allocated."""

    @abc.abstractmethod
    def kv_cache_bytes(self, config: CacheConfig, peak_bytes: int) -> int:
        """Bytes the KV cache may take on this device.

        Args:
            config: the cache's section of the configuration.
            peak_bytes: memory a profiling run of the model needed beyond its weights.
        """

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """[num_bytes] uint8 of zeros, for big buffers that live as long as the worker."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
