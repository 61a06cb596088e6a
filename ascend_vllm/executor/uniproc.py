"""The executor whose only worker is in the engine core's process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.executor.base import Executor, call_worker
from ascend_vllm.executor.device_thread import CallersThread, ComputeThread, DeviceThread, shut_down_error
from ascend_vllm.platforms.weight_reserve import reserve_for
from ascend_vllm.types.step import SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from ascend_vllm.worker.worker import Worker


class UniProcExecutor(Executor):
    """One worker in the engine core's process.

    With async_scheduling everything the worker does happens in a thread of its own: `execute_model` returns at
    once, and done-callbacks of its futures run in that thread. Otherwise a step is computed while
    `execute_model` is called.

    Raises:
        ConfigError: the device cannot be used.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._thread: ComputeThread = DeviceThread() if config.scheduler.async_scheduling else CallersThread()
        self._worker: Worker | None = None
        try:
            self._worker = self._thread.submit(_make_worker, config).result()
        except BaseException:
            self._thread.close(lambda: None)
            raise
        # A thread that still computes when the interpreter ends would crash it. Made last: at the end this is called
        # before what torch, which the worker has imported, does then.
        self._end = weakref.finalize(self, self._thread.close, lambda: None)

    def execute_model(self, step: SchedulerOutput) -> Future[StepOutput]:
        if self._worker is None:
            future: Future[StepOutput] = Future()
            future.set_exception(shut_down_error())
            return future
        return self._thread.submit(self._worker.execute_model, step)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        return [self._thread.submit(call_worker, self._require_worker(), method, args, kwargs or {}).result(timeout)]

    def check_health(self) -> None:
        self._require_worker()

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and self._end.detach() is not None:
            self._thread.close(worker.shutdown)

    def _require_worker(self) -> Worker:
        if self._worker is None:
            raise shut_down_error()
        return self._worker


def _make_worker(config: EngineConfig) -> Worker:
    # before torch is imported
    reserve = reserve_for(config)
    # imported here, so that executors with workers in other processes do not load torch into this one
    from ascend_vllm.worker.worker import Worker

    return Worker(config, reserve=reserve)
