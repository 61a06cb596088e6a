"""What the engine asks of a device: facts and device calls, never class names of layers above."""

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
    """Work of a device that was captured and can be done again at one call."""

    @abc.abstractmethod
    def replay(self, host_arguments: Mapping[str, list[int]]) -> None:
        """Does it again, behind what the current stream has been given, with what its tensors hold by then.

        Args:
            host_arguments: lists in the place of those that operators were called with, by the arguments' names.
        """


class GraphRecorder(abc.ABC):
    """Captures graphs, all of which work in the same memory and so never at the same time."""

    @abc.abstractmethod
    def capture(self, work: Callable[[], None]) -> DeviceGraph:
        """Captures what a function launches; nothing is computed. It must not wait for the device."""


class GraphCompiler(abc.ABC):
    """Compiles functions to graphs of the device and keeps the results on disk."""

    @abc.abstractmethod
    def compile(self, method: types.MethodType, directory: pathlib.Path) -> Callable[..., torch.Tensor]:
        """A method of a torch.nn.Module as a function that is compiled at its first call, or read from disk then.

        Args:
            method: takes tensors of fixed shapes and lists of integers that may be any.
            directory: of the results.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets what was compiled in this process."""

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Of everything that results depend on."""


class Platform(abc.ABC):
    """One kind of device.

    Attributes:
        name: as in --device.
        device_type: torch's name of it.
        dtypes: dtypes a model can run in, the preferred one for float32 checkpoints under --dtype auto first; known
            once the platform is initialised.
        block_sizes: allowed --block-size values.
        default_block_size: the fastest of them.
        distributed_backend: torch.distributed's name of what connects several of these devices.
        needs_store_later: workers may connect with the store again after they are connected with each other.
        shares_host_memory: tensors on the device are in host memory, so that reading them needs no copy and no
            waiting.
        sums_in_rank_order: collectives add the ranks' tensors in rank order, so that a row's sum does not depend on
            the other rows of the batch. Otherwise the order is that of the device's library.
        cache_size_flags: what sets the size of the KV cache, for the text of an error.
        op_modules: prefix of the op modules that hold kernels for this device alone; None: there are none.
    """

    name: str
    device_type: str
    dtypes: tuple[torch.dtype, ...]
    block_sizes: tuple[int, ...]
    default_block_size: int
    distributed_backend: str
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
            address: of this machine, at which workers on other ones reach it.
            num_engines: engines with so many workers that share this machine's cores and memory.

        Raises:
            ConfigError: the device cannot be used; the text says what to do.
        """

    @abc.abstractmethod
    def process_groups(
        self, store: Store, rank: int, partitions: Sequence[Sequence[Sequence[int]]], timeout: datetime.timedelta
    ) -> list[Any]:
        """Connects this worker with others; called once, behind `initialize`.

        Args:
            store: where all workers exchange addresses.
            rank: number of this worker.
            partitions: of all workers into groups, the same on all of them. Ranks in a group are places in it.
            timeout: of a collective.

        Returns:
            Of each partition the group that this worker is in: what has the collectives of torch's process groups.

        Raises:
            RuntimeError: the others do not come.
        """

    @abc.abstractmethod
    def peak_bytes(self, largest_step: Callable[[], None]) -> int:
        """Memory that the largest step needs beyond what is allocated now.

        Args:
            largest_step: computes it. It is not called where the size of the cache does not depend on it.
        """

    @abc.abstractmethod
    def kv_cache_bytes(self, config: CacheConfig, peak_bytes: int) -> int:
        """Bytes the KV cache may take on this device.

        Args:
            config: the cache's section of the configuration.
            peak_bytes: memory that is not allocated now and will be needed for other things.

        Raises:
            ConfigError: an explicit size is wrong, or is not there.
        """

    @abc.abstractmethod
    def expected_kv_cache_bytes(
        self, config: CacheConfig, weight_bytes: int, num_workers: int = 1, num_engines: int = 1
    ) -> int:
        """What `kv_cache_bytes` will about be on the first device, said before it is initialised or a model loaded.

        Args:
            config: the cache's section of the configuration.
            weight_bytes: of the whole model.
            num_workers: workers that share the model on this machine.
            num_engines: engines with so many workers, and a model each, on this machine.

        Raises:
            ConfigError: the device cannot be asked, or an explicit size is wrong.
        """

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""

    def release_memory(self) -> None:  # noqa: B027 - most devices have nothing to do
        """Gives memory back that tensors of this process have been in and are no longer."""

    def make_graph_recorder(self) -> GraphRecorder | None:
        """What captures graphs, with a pool of memory of its own; None: the device has no graphs."""
        return None

    def make_graph_compiler(self) -> GraphCompiler | None:
        """What compiles graphs; None: nothing does on this device.

        Raises:
            ConfigError: it is not installed.
        """
        return None

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """[num_bytes] uint8 of zeros, for big buffers that live as long as the worker."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 of zeros in CPU memory, whose pages are taken when first written.

        It is not pinned, which would take all of it at once and for good: copies to a device pass through a small
        pinned buffer.
        """
        return allocate_on_first_use(num_bytes)
