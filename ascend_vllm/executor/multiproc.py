"""The executor whose workers share the model, each in a process of its own, here or on the nodes of --nnodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.executor.base import Executor, check_kv_cache_size
from ascend_vllm.executor.nodes.group import NodeGroup
from ascend_vllm.executor.remote_workers import RemoteWorkers
from ascend_vllm.executor.worker_group import WorkerGroup
from ascend_vllm.types.step import KVCacheSize, SchedulerOutput, StepOutput


class MultiprocExecutor(Executor):
    """A worker for each rank of --tensor-parallel-size in each stage of --pipeline-parallel-size.

    Each step is written once to shared memory and read by all workers. All workers of the last stage sample the same
    tokens; the first one returns them. All workers end when this object or its process ends, or one of them dies.

    Args:
        config: of the whole engine.

    Raises:
        ConfigError: the devices cannot be used.
        Exception: whatever a worker failed with; its traceback is in the log.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._group = self._make_group(config)
        self._end = weakref.finalize(self, self._group.close)
        try:
            self._group.wait_until_made()
        except BaseException:
            self.shutdown()
            raise

    def _make_group(self, config: EngineConfig) -> RemoteWorkers:
        return NodeGroup(config) if config.parallel.nnodes > 1 else WorkerGroup(config)

    def initialize(self) -> KVCacheSize:
        self.collective_rpc("load_model")
        size = KVCacheSize(
            # block tables are the same on all workers, so the smallest number counts
            min(self.collective_rpc("determine_num_blocks")),
            min(self.collective_rpc("determine_num_cpu_blocks")),
        )
        check_kv_cache_size(size.num_blocks, self.config)
        self.collective_rpc("initialize_cache", (size.num_blocks, size.num_cpu_blocks))
        self._group.failure_reason = None
        return size

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        return self._group.step(step)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        results: list[Any] = self._group.call(method, args, kwargs or {}).result(timeout)
        return results

    def check_health(self) -> None:
        self._group.check()

    @property
    def death_descriptor(self) -> int | None:
        return self._group.death_descriptor

    def note_failure(self, reason: str) -> None:
        self._group.failure_reason = reason

    def shutdown(self) -> None:
        self._end()
