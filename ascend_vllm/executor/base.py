"""How the engine core reaches its workers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ascend_vllm import plugins
from ascend_vllm.config.engine import EXECUTOR_ENTRY_POINTS, EngineConfig
from ascend_vllm.errors import ConfigError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.types.step import KVCacheSize, SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from ascend_vllm.worker.worker import Worker

logger = init_logger(__name__)

# --distributed-executor-backend → "module:Class", imported when chosen; packages add more by entry points
EXECUTORS: dict[str, str] = {
    "uni": "ascend_vllm.executor.uniproc:UniProcExecutor",
    "mp": "ascend_vllm.executor.multiproc:MultiprocExecutor",
    "ray": "ascend_vllm.executor.multiproc:MultiprocExecutor",
}


class Executor(abc.ABC):
    """All workers of an engine, behind one interface."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def initialize(self) -> KVCacheSize:
        """Loads the model and allocates the KV cache. Called once, first.

        Returns:
            KV blocks on the device, and in the pool in CPU memory that rows are swapped to.

        Raises:
            ConfigError: the KV cache cannot hold a sequence of max_model_len (`check_kv_cache_size`).
            ModelLoadError: the model's directory cannot be served.
        """
        self.collective_rpc("load_model")
        size = KVCacheSize(
            # block tables are the same on all workers, so the smallest number counts
            min(self.collective_rpc("determine_num_blocks")),
            min(self.collective_rpc("determine_num_cpu_blocks")),
        )
        check_kv_cache_size(size.num_blocks, self.config)
        self.collective_rpc("initialize_cache", (size.num_blocks, size.num_cpu_blocks))
        return size

    @abc.abstractmethod
    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        """Starts a step; steps are computed in the order of the calls. A failure is the future's exception."""

    @abc.abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls a method of every worker after the steps already started, and waits for all results.

        Args:
            method: its name, or a function that is called with each worker in front of the arguments.
            args: positional arguments.
            kwargs: keyword arguments.
            timeout: seconds to wait; None: without end.

        Returns:
            What each worker returned, in the order of their ranks.

        Raises:
            RequestError: workers have no such method.
            TimeoutError: it takes longer than `timeout`.
            Exception: whatever a worker raised.
        """

    @abc.abstractmethod
    def check_health(self) -> None:
        """Raises EngineDeadError if a worker is gone."""

    @property
    def death_descriptor(self) -> int | None:
        """A descriptor that becomes readable when a worker dies; None if the workers are in this process."""
        return None

    def note_failure(self, reason: str) -> None:
        """Records why the engine fails, before `shutdown`: the other nodes are sent the reason."""
        logger.debug("The engine ends: %s", reason)

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees what they hold; calling it again is fine."""


def create_executor(config: EngineConfig) -> Executor:
    """The executor that --distributed-executor-backend names, not initialised.

    Raises:
        ConfigError: there is none of that name, or the engine is on another node.
    """
    if config.parallel.node_rank > 0:
        raise ConfigError(
            f"--node-rank {config.parallel.node_rank}: the engine is on node 0. Run `ascend-vllm serve` with this "
            "--node-rank here, and this program on the machine of --node-rank 0."
        )
    backend = config.parallel.distributed_executor_backend
    target = EXECUTORS.get(backend) or plugins.entry_points(EXECUTOR_ENTRY_POINTS).get(backend)
    if target is None:
        raise ConfigError(
            f"Unrecognized distributed executor backend {backend}. Supported values are "
            + ", ".join(repr(name) for name in EXECUTORS)
        )
    executor_class: type[Executor] = plugins.import_object(target)
    return executor_class(config)


def call_worker(
    worker: Worker, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a public method, or a function with the worker in front of its arguments.

    Raises:
        RequestError: there is no such method.
    """
    if callable(method):
        return method(worker, *args, **kwargs)
    function = None if method.startswith("_") else getattr(worker, method, None)
    if not callable(function):
        raise RequestError(f"workers have no method {method!r}", "method")
    return function(*args, **kwargs)


def check_kv_cache_size(num_blocks: int, config: EngineConfig) -> None:
    """Checks that one sequence of full length fits, before the workers allocate.

    Raises:
        ConfigError: with vLLM's texts.
    """
    if num_blocks <= 0:
        raise ConfigError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine." + _how_to_size(config)
        )
    num_tokens = num_blocks * config.cache.block_size
    if config.scheduler.max_model_len > num_tokens:
        raise ConfigError(
            f"The model's max seq len ({config.scheduler.max_model_len}) is larger than the maximum number of "
            f"tokens that can be stored in KV cache ({num_tokens}). Try increasing `gpu_memory_utilization` or "
            "decreasing `max_model_len` when initializing the engine." + _how_to_size(config)
        )


def _how_to_size(config: EngineConfig) -> str:
    """The flags that size the cache on CPU, which vLLM's texts do not mention."""
    if config.device.device != "cpu":
        return ""
    return " (On CPU the KV cache is sized by --kv-cache-memory-bytes or VLLM_CPU_KVCACHE_SPACE, in GiB.)"
