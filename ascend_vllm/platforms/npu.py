"""The Ascend NPU platform. torch_npu is imported when a worker is bound to a device."""

from __future__ import annotations

import datetime
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ascend_vllm import envs
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import NPU, CannFacts, npu_facts, npu_unusable_reason, probe_npus, too_few_npus
from ascend_vllm.platforms.host import LOOPBACK, usable_cores
from ascend_vllm.platforms.interface import Platform
from ascend_vllm.platforms.npu_compiler import NpuGraphCompiler
from ascend_vllm.platforms.npu_graphs import NpuGraphRecorder

logger = init_logger(__name__)

GIB = 1 << 30
# share of the device's memory for activations in estimates before anything is measured
_EXPECTED_ACTIVATIONS_SHARE = 0.05
_WHAT_TO_DO = "See `ascend-vllm doctor` for what is wrong with the installation, or use --device cpu."


class NpuPlatform(Platform):
    """Computes on one NPU of those that ASCEND_RT_VISIBLE_DEVICES leaves.

    Attributes:
        soc: the runtime's name of the device, such as "Ascend910B3"; known once it is initialised.
        num_cube_cores: number of matrix cores.
        num_vector_cores: number of vector cores.
    """

    name = "npu"
    device_type = "npu"
    dtypes = tuple(getattr(torch, name) for name in NPU.dtypes)
    cache_size_flags = "--gpu-memory-utilization or --kv-cache-memory-bytes"
    op_modules = "ascend"

    def __init__(self) -> None:
        self.soc = ""
        self.num_cube_cores = 0
        self.num_vector_cores = 0
        # torch_npu.npu, once it is imported; Any: the module has no annotations
        self._npu: Any = None
        self._device = torch.device("cpu")
        # free memory before this process allocated any on the device
        self._free_at_start = 0

    def initialize(
        self,
        local_rank: int,
        num_workers: int = 1,
        address: str = LOOPBACK,  # noqa: ARG002 - HCCL finds the address itself
        num_engines: int = 1,
    ) -> torch.device:
        """Binds to the NPU of a rank.

        Raises:
            ConfigError: torch_npu or CANN is missing or broken, there is no such NPU, or models do not run on it.
        """
        self._npu = _import_torch_npu().npu
        if refusal := CannFacts.of(str(self._npu.utils.get_cann_version())).refusal:
            raise ConfigError(f"--device npu: {refusal}")
        count = self._npu.device_count()
        if max(local_rank + 1, num_workers) > count:
            raise ConfigError(too_few_npus(max(local_rank + 1, num_workers), count))
        if num_workers > 1 and envs.hccl_op_expansion_mode() is None:
            # collectives that are kernels are captured as such; others take streams of the device in each graph
            envs.export({"HCCL_OP_EXPANSION_MODE": "AIV"}, {})
        logger.info(
            "CANN: %s; NPU memory allocator: %s; CPU affinity of the workers: %s; HCCL's expansion mode: %s",
            envs.ascend_home_path() or "from the library path",
            envs.pytorch_npu_alloc_conf(),
            envs.cpu_affinity_conf(),
            envs.hccl_op_expansion_mode() or "its own choice",
        )
        self._device = torch.device("npu", local_rank)
        try:
            self._npu.set_device(self._device)
            # allow weights in the layout of the matrix cores (NZ)
            self._npu.config.allow_internal_format = True
            # the first allocation creates the context
            torch.zeros(1, device=self._device)
            self._npu.synchronize()
            properties = self._npu.get_device_properties(self._device)
            self._free_at_start, total = self._npu.mem_get_info(self._device)
        except RuntimeError as error:
            raise ConfigError(f"--device npu: NPU {local_rank} does not answer: {error}. {_WHAT_TO_DO}") from error
        if warning := CannFacts.of(str(self._npu.utils.get_cann_version())).warning:
            logger.warning("%s", warning)
        self._take_facts(properties)
        torch.set_num_threads(
            envs.omp_num_threads() or max(1, usable_cores() // (max(count, num_workers) * num_engines))
        )
        logger.info(
            "NPU worker %d: %s, %d cube and %d vector cores, %.2f of %.2f GiB free",
            local_rank,
            self.soc,
            self.num_cube_cores,
            self.num_vector_cores,
            self._free_at_start / GIB,
            total / GIB,
        )
        return self._device

    def _take_facts(self, properties: Any) -> None:
        facts = npu_facts(properties.name)
        if facts is None:
            raise ConfigError(npu_unusable_reason() or f"--device npu: models do not run on {properties.name}.")
        if facts.refusal:
            raise ConfigError(facts.refusal)
        self.soc = facts.model
        self.dtypes = tuple(getattr(torch, name) for name in facts.dtypes)
        self.num_cube_cores = properties.cube_core_num
        self.num_vector_cores = properties.vector_core_num

    def process_groups(
        self, store: Store, rank: int, partitions: Sequence[Sequence[Sequence[int]]], timeout: datetime.timedelta
    ) -> list[Any]:
        """HCCL groups; HCCL reads its own settings (HCCL_*) from the environment."""
        size = sum(map(len, partitions[0]))
        dist.init_process_group("hccl", store=store, rank=rank, world_size=size, timeout=timeout)
        groups = [self._group_of(rank, partition, timeout) for partition in partitions]
        for group in groups:
            # the first collective allocates the buffers of a communicator, HCCL_BUFFSIZE MB each: before memory for
            # the KV cache is measured
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        self._npu.synchronize()
        return groups

    def _group_of(self, rank: int, partition: Sequence[Sequence[int]], timeout: datetime.timedelta) -> Any:
        if len(partition) == 1:
            return dist.group.WORLD
        # new_group is collective: all workers call it for each group
        groups = [dist.new_group(list(ranks), timeout, "hccl") for ranks in partition]
        return next(group for ranks, group in zip(partition, groups, strict=True) if rank in ranks)

    def peak_bytes(self, largest_step: Callable[[], None]) -> int:
        """What can be released after the step, which is more than tensors: segments and operators' workspaces too.

        Never less than the allocator's peak. Buffers that stay, as those of collectives, are not free afterwards, and
        not counted here.
        """
        self.release_memory()
        allocated, before = int(self._npu.memory_allocated(self._device)), self.free_bytes()
        self._npu.reset_peak_memory_stats(self._device)
        largest_step()
        self._npu.synchronize()
        peak = int(self._npu.max_memory_allocated(self._device)) - allocated
        free = self.free_bytes()
        self.release_memory()
        # neither what the step leaves nor what was garbage before it and is collected during it
        return max(peak, min(before, self.free_bytes()) - free)

    def kv_cache_bytes(self, config: CacheConfig, peak_bytes: int) -> int:
        """--kv-cache-memory-bytes, else what --gpu-memory-utilization leaves beside weights and activations."""
        free, total = self._npu.mem_get_info(self._device)
        # 0 if other processes have freed more memory than this one uses
        used = max(0, self._free_at_start - free)
        size = size_of_cache(config, free, total, used, peak_bytes)
        logger.info(
            "NPU memory: %.2f GiB in all, %.2f GiB free; %.2f GiB for weights and runtime, %.2f GiB for activations, "
            "%.2f GiB for the KV cache",
            total / GIB,
            free / GIB,
            used / GIB,
            peak_bytes / GIB,
            size / GIB,
        )
        return size

    def expected_kv_cache_bytes(
        self,
        config: CacheConfig,
        weight_bytes: int,
        num_workers: int = 1,
        num_engines: int = 1,  # noqa: ARG002 - engines do not share NPUs
    ) -> int:
        """Estimates by the memory of the first NPU, and a fixed share for activations."""
        found = probe_npus(with_memory=True)
        if found.error or not found.total_bytes:
            raise ConfigError(f"--device npu: {found.error or 'there is no NPU'}. {_WHAT_TO_DO}")
        activations = int(found.total_bytes * _EXPECTED_ACTIVATIONS_SHARE)
        part = weight_bytes // num_workers
        return size_of_cache(config, found.free_bytes - part, found.total_bytes, part, activations)

    def free_bytes(self) -> int:
        return int(self._npu.mem_get_info(self._device)[0])

    def release_memory(self) -> None:
        self._npu.synchronize()
        self._npu.empty_cache()

    def make_graph_recorder(self) -> NpuGraphRecorder:
        return NpuGraphRecorder(self._npu)

    def make_graph_compiler(self) -> NpuGraphCompiler:
        return NpuGraphCompiler(_import_torch_npu(), self.soc)


def size_of_cache(config: CacheConfig, free: int, total: int, used: int, peak_bytes: int) -> int:
    """Bytes for the KV cache; 0 or less if there is no room.

    Args:
        config: the cache's section of the configuration.
        free: bytes of the device that are free now.
        total: bytes of the device.
        used: bytes that this process has allocated.
        peak_bytes: bytes that it will need beside the cache.

    Raises:
        ConfigError: an explicit size is not positive, or more than is free.
    """
    available = free - peak_bytes
    size = config.kv_cache_memory_bytes
    if size is None:
        share = int(total * config.gpu_memory_utilization)
        if share - used > free:
            logger.warning(
                "--gpu-memory-utilization %g asks for %.2f GiB of the NPU, but other processes leave %.2f GiB; "
                "the KV cache gets what is there",
                config.gpu_memory_utilization,
                share / GIB,
                (free + used) / GIB,
            )
        return min(share - used - peak_bytes, available)
    if size <= 0:
        raise ConfigError(f"--kv-cache-memory-bytes must be positive, got {size} bytes.")
    if size > available:
        raise ConfigError(
            f"--kv-cache-memory-bytes asks for a KV cache of {size / GIB:.2f} GiB, but only "
            f"{max(0, available) / GIB:.2f} GiB of the NPU's memory are free beside the model and its activations: "
            "lower it, or leave it out and set --gpu-memory-utilization."
        )
    return size


def _import_torch_npu() -> Any:
    """Imports torch_npu, with its environment variables set.

    Raises:
        ConfigError: it is missing or cannot be loaded.
    """
    envs.pytorch_npu_alloc_conf()
    envs.cpu_affinity_conf()
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        # the probe may know the cause; otherwise torch_npu and torch are probably incompatible
        reason = npu_unusable_reason() or f"--device npu: torch_npu cannot be loaded: {error}. {_WHAT_TO_DO}"
        raise ConfigError(reason) from error
