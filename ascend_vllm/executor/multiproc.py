"""The executor whose workers share the model, each in a process of its own.

They run on this machine, on the nodes of --nnodes, or as actors of Ray on any machine of its cluster.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.executor.base import Executor
from ascend_vllm.executor.nodes.group import NodeGroup
from ascend_vllm.executor.ray.group import RayGroup
from ascend_vllm.executor.remote_workers import RemoteWorkers
from ascend_vllm.executor.worker_group import WorkerGroup
from ascend_vllm.types.step import KVCacheSize, SchedulerOutput, StepOutput


class MultiprocExecutor(Executor):
    """A worker for each rank of --tensor-parallel-size in each stage of --pipeline-parallel-size.

    All workers of the last stage sample the same tokens; the first one returns them. All workers end when this object
    or its process ends, or one of them dies.

    Raises:
        ConfigError: the devices cannot be used, another node does not come or cannot take part, or Ray is not
            installed, or its cluster does not answer or has too little.
        Exception: whatever a worker failed with; its traceback is in the log.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._group: RemoteWorkers
        if config.parallel.distributed_executor_backend == "ray":
            self._group = RayGroup(config)
        else:
            self._group = NodeGroup(config) if config.parallel.nnodes > 1 else WorkerGroup(config)
        self._end = weakref.finalize(self, self._group.close)
        try:
            self._group.made.result()
        except BaseException:
            self.shutdown()
            raise

    def initialize(self) -> KVCacheSize:
        size = super().initialize()
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
