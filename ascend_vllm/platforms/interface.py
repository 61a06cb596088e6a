"""The interface of a device: its properties, and calls of its runtime."""

from __future__ import annotations

import abc
import datetime
import pathlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store

from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.platforms.host import LOOPBACK
from ascend_vllm.platforms.host_memory import allocate_on_first_use


class DeviceGraph(abc.ABC):
    """Captured work of a device that one call replays."""

    @abc.abstractmethod
    def replay(self, host_arguments: Mapping[str, list[int]]) -> None:
        """Replays the work on the current stream, with the current contents of its tensors.

        Args:
            host_arguments: new values of the operators' list arguments, by name.
        """


class GraphRecorder(abc.ABC):
    """Captures graphs, which share memory and must not run at the same time."""

    @abc.abstractmethod
    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """Captures what a function launches, without computing it. The function must not wait for the device."""

    @abc.abstractmethod
    def capture_pieces(self, work: Callable[[Callable[[], None]], None]) -> list[DeviceGraph]:
        """As `capture`, but as several graphs without host arguments, in the order of their work.

        Args:
            work: what to capture; it gets a function, and calls it where a graph ends and the next one begins.
        """


class GraphCompiler(abc.ABC):
    """Compiles functions to graphs of the device, and caches the results on disk."""

    @abc.abstractmethod
    def compile(self, method: types.MethodType, directory: pathlib.Path) -> Callable[..., torch.Tensor]:
        """Returns a function that is compiled, or loaded from disk, when it is first called.

        Args:
            method: of a torch.nn.Module; takes tensors of fixed shapes and lists of arbitrary integers.
            directory: of the results.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Discards the functions that were compiled in this process."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of everything that results depend on, by name."""


class Platform(abc.ABC):
    """One kind of device.

    Attributes:
        name: as in --device.
        device_type: torch's name of the device.
        dtypes: dtypes a model can run in, the preferred one for float32 checkpoints under --dtype auto first; known
            once the platform is initialised.
        needs_store_later: workers may connect with the store again after they are connected with each other.
        shares_host_memory: tensors on the device are in host memory, so that reading them needs no copy and no
            waiting.
        sums_in_rank_order: collectives add the ranks' tensors in rank order, so that a row's sum does not depend on
            the other rows of the batch. Otherwise the order is that of the device's library.
        cache_size_flags: flags and variables that set the size of the KV cache, for error messages.
        op_modules: prefix of the op modules with kernels for this device only; None: there are none.
    """

    name: str
    device_type: str
    dtypes: tuple[torch.dtype, ...]
    cache_size_flags: str
    needs_store_later: bool = True
    shares_host_memory: bool = False
    sums_in_rank_order: bool = False
    op_modules: str | None = None

    @abc.abstractmethod
    def initialize(
        self, local_rank: int, num_workers: int = 1, address: str = LOOPBACK, num_engines: int = 1
    ) -> torch.device:
        """Binds this process to its device and returns it; called once, before anything is allocated.

        Args:
            local_rank: number of this worker.
            num_workers: workers of the engine on this machine, each in a process of its own.
            address: of this machine, at which workers on other machines reach it.
            num_engines: engines with this number of workers that share the machine's cores and memory.

        Raises:
            ConfigError: the device cannot be used; the message says what to do.
        """

    @abc.abstractmethod
    def process_groups(
        self, store: Store, rank: int, partitions: Sequence[Sequence[Sequence[int]]], timeout: datetime.timedelta
    ) -> list[Any]:
        """Connects this worker with others; called once, after `initialize`.

        Args:
            store: where all workers exchange addresses.
            rank: number of this worker.
            partitions: of all workers into groups, the same on all workers. A worker's rank in a group is its index.
            timeout: of a collective.

        Returns:
            The worker's group in each partition, with the collectives of torch's process groups.

        Raises:
            RuntimeError: the other workers do not connect in time.
        """

    @abc.abstractmethod
    def peak_bytes(self, largest_step: Callable[[], None]) -> int:
        """Memory that the largest step needs beyond what is allocated now.

        Args:
            largest_step: computes the step; not called if the size of the KV cache does not depend on its memory.
        """

    @abc.abstractmethod
    def kv_cache_bytes(self, config: CacheConfig, peak_bytes: int) -> int:
        """Bytes the KV cache may take on this device.

        Args:
            config: the cache's section of the configuration.
            peak_bytes: memory that is not allocated now but will be needed for other things.

        Raises:
            ConfigError: an explicit size is wrong, or not available.
        """

    @abc.abstractmethod
    def expected_kv_cache_bytes(
        self, config: CacheConfig, weight_bytes: int, num_workers: int = 1, num_engines: int = 1
    ) -> int:
        """Estimates `kv_cache_bytes` of the first device before it is initialised and a model is loaded.

        Args:
            config: the cache's section of the configuration.
            weight_bytes: of the whole model.
            num_workers: workers that share the model on this machine.
            num_engines: engines with this number of workers on this machine, each with a model.

        Raises:
            ConfigError: the memory of the device is unknown, or an explicit size is wrong.
        """

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Free memory of the device."""

    def begin_step(self, num_tokens: int, num_weights: int) -> None:  # noqa: B027 - most devices have nothing to do
        """Prepares the device for a step of so many tokens with a model of so many weights."""

    def release_memory(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Returns cached memory of freed tensors to the device."""

    def make_graph_recorder(self) -> GraphRecorder | None:
        """Makes a recorder with its own memory pool; None: the device has no graphs."""
        return None

    def make_graph_compiler(self) -> GraphCompiler | None:
        """Makes a compiler; None: there is none for the device.

        Raises:
            ConfigError: the compiler is not installed.
        """
        return None

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocates [num_bytes] uint8 of zeros, for large buffers that live as long as the worker."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Allocates [num_bytes] uint8 of zeros in CPU memory, whose pages are taken when first written.

        The memory is not pinned, which would take all pages at once. Copies to a device use a small pinned buffer.
        """
        return allocate_on_first_use(num_bytes)
