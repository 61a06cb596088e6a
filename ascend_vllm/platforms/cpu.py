"""The CPU platform, which is the default."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ascend_vllm import envs
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import CPU
from ascend_vllm.platforms.host import LOOPBACK, available_memory_bytes, usable_cores
from ascend_vllm.platforms.host_memory import allocate_on_first_use
from ascend_vllm.platforms.interface import Platform
from ascend_vllm.platforms.listeners import deafen, listening_sockets

logger = init_logger(__name__)

GIB = 1 << 30
DEFAULT_KV_CACHE_BYTES = 4 * GIB
# of the memory that is free once the weights are loaded; the rest is for activations and other processes
DEFAULT_KV_CACHE_SHARE = 0.25

# weights that the cores' caches hold, so that a thread need not wait for memory
_SMALL_MODEL = 1 << 24
# multiplications and additions that take one thread some milliseconds at most
_SMALL_STEP = 1 << 29


def _in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


class CpuPlatform(Platform):
    """Computes on the cores and in the memory of this machine that the process may use."""

    name = "cpu"
    device_type = "cpu"
    dtypes = tuple(getattr(torch, name) for name in CPU.dtypes)
    needs_store_later = False
    shares_host_memory = True
    sums_in_rank_order = True
    cache_size_flags = "--kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE"

    # number of workers of all engines, which share the machine's memory
    _num_workers = 1
    _threads = _threads_in_use = _threads_of_small_steps = 1
    _address = LOOPBACK

    def initialize(
        self, local_rank: int, num_workers: int = 1, address: str = LOOPBACK, num_engines: int = 1
    ) -> torch.device:
        """Sets torch's threads: OMP_NUM_THREADS, or this worker's share of the cores that the process may use."""
        self._num_workers = num_workers * num_engines
        self._address = address
        chosen = envs.omp_num_threads()
        threads = chosen or max(1, usable_cores() // self._num_workers)
        self._threads = self._threads_in_use = self._threads_of_small_steps = threads
        if chosen is None and self._num_workers == 1:
            self._threads_of_small_steps = max(1, threads - 1)
        torch.set_num_threads(threads)
        logger.info("CPU worker %d computes on %d threads", local_rank, threads)
        return torch.device("cpu")

    def begin_step(self, num_tokens: int, num_weights: int) -> None:
        """Leaves a core to the API server in small steps, as decoding with a tiny model is.

        There the server's own work takes as long as the step: compute threads on all cores wait for one another, and
        for it. OMP_NUM_THREADS, if set, is used in all steps. The results are the same with any number of threads.
        """
        is_small = num_weights <= _SMALL_MODEL and num_tokens * num_weights <= _SMALL_STEP
        threads = self._threads_of_small_steps if is_small else self._threads
        if threads != self._threads_in_use:
            torch.set_num_threads(threads)
            self._threads_in_use = threads

    def process_groups(
        self, store: Store, rank: int, partitions: Sequence[Sequence[Sequence[int]]], timeout: datetime.timedelta
    ) -> list[Any]:
        """Gloo groups, over the interface with this machine's address, whatever its host name resolves to."""
        # Any: torch's annotations of it are wrong
        gloo: Any = dist.ProcessGroupGloo
        others = listening_sockets()
        groups = []
        for number, partition in enumerate(partitions):
            options = gloo._Options()
            options._timeout = timeout
            options._devices = [gloo.create_device(hostname=self._address)]
            ranks = next(ranks for ranks in partition if rank in ranks)
            own_store = PrefixStore(f"{number}/{ranks[0]}", store)
            groups.append(gloo(own_store, ranks.index(rank), len(ranks), options))
        # all are connected with each other
        for descriptor in listening_sockets() - others:
            deafen(descriptor)
        return groups

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:  # noqa: ARG002 - the interface's
        """Zeros whose pages are taken when first written."""
        return allocate_on_first_use(num_bytes)

    def free_bytes(self) -> int:
        """Memory of the machine that this process may still allocate."""
        return available_memory_bytes()

    def peak_bytes(self, largest_step: Callable[[], None]) -> int:  # noqa: ARG002 - the interface's
        """0: the KV cache takes a share of the free memory, and activations use the rest."""
        return 0

    def expected_kv_cache_bytes(
        self, config: CacheConfig, weight_bytes: int, num_workers: int = 1, num_engines: int = 1
    ) -> int:
        """The same rule, as if the weights were loaded."""
        self._num_workers = num_workers * num_engines
        return self.kv_cache_bytes(config, weight_bytes * num_engines)

    def kv_cache_bytes(self, config: CacheConfig, peak_bytes: int) -> int:
        """--kv-cache-memory-bytes, else VLLM_CPU_KVCACHE_SPACE, else a share of the free memory, at most 4 GiB.

        Explicit sizes are per worker; the share is divided among all workers.
        """
        available = available_memory_bytes() - peak_bytes
        space_gib = envs.cpu_kvcache_space_gib()
        if config.kv_cache_memory_bytes is not None:
            source, size = "--kv-cache-memory-bytes", config.kv_cache_memory_bytes
        elif space_gib is not None:
            source, size = "VLLM_CPU_KVCACHE_SPACE", int(space_gib * GIB)
        else:
            share = min(DEFAULT_KV_CACHE_BYTES, int(max(0, available) * DEFAULT_KV_CACHE_SHARE))
            return share // self._num_workers
        if size <= 0:
            raise ConfigError(f"{source} must be positive, got {size} bytes.")
        if size > available:
            raise ConfigError(
                f"{source} asks for a KV cache of {_in_gib(size)}, but only {_in_gib(max(0, available))} of memory "
                "are free once the model is loaded: lower it, or leave it out to take a quarter of what is free."
            )
        return size
