"""Ascend NPU: its facts. The kernels and device calls are not part of this version, and it says so."""

from __future__ import annotations

import torch

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.platforms.facts import NPU, npu_unusable_reason
from ascend_vllm.platforms.interface import Platform


class NpuPlatform(Platform):
    """Ascend devices through torch_npu."""

    name = "npu"
    device_type = "npu"
    dtypes = tuple(getattr(torch, name) for name in NPU.dtypes)
    block_sizes = NPU.block_sizes
    default_block_size = NPU.default_block_size

    @staticmethod
    def unusable_reason() -> str | None:
        """Why no model can run on an NPU here, as a sentence; None if one can."""
        return npu_unusable_reason()

    def initialize(self, local_rank: int) -> torch.device:  # noqa: ARG002 - the interface's
        """Binds to an NPU.

        Raises:
            ConfigError: no NPU can be used; the text says what is missing.
        """
        raise self._refusal()

    def kv_cache_bytes(self, config: CacheConfig, peak_bytes: int) -> int:  # noqa: ARG002 - the interface's
        """--gpu-memory-utilization of the device's memory, less weights and activations.

        Raises:
            ConfigError: no NPU can be used.
        """
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(self.unusable_reason() or "--device npu: the device did not initialise.")
