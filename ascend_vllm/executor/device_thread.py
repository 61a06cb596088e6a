"""The thread in which a worker of this process computes: the caller's, or one of its own.

With a thread of its own the next step can be scheduled while one is computed. Only that thread uses the device:
OpenMP keeps a team of threads for every thread that computes, and two teams would compete for the cores.
"""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from ascend_vllm.errors import EngineDeadError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

T = TypeVar("T")
# the future of a result, the function, its arguments, and whether the call is the last one
_Call: TypeAlias = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], bool]

# how long a step that is being computed may go on when the worker is to end
SHUTDOWN_GRACE_S = 5.0


def shut_down_error() -> EngineDeadError:
    """The error of calls after the shutdown."""
    return EngineDeadError("the worker has been shut down")


class ComputeThread(abc.ABC):
    """One thread that makes calls in the order of their submission."""

    @abc.abstractmethod
    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        """Queues a call. What the function raises becomes the future's exception."""

    @abc.abstractmethod
    def close(self, last: Callable[[], None]) -> None:
        """Makes one last call and ends the thread; calls not begun fail with EngineDeadError. Called once."""


class CallersThread(ComputeThread):
    """Makes each call at once, in the thread that submits it: futures are done when they are returned."""

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self, last: Callable[[], None]) -> None:
        last()


class DeviceThread(ComputeThread):
    """A thread that sleeps while there is nothing to call.

    It is a daemon and registered nowhere, so that a call that never returns cannot keep the process from ending.

    Args:
        grace_s: seconds for which `close` waits for the call that is being made.

    Example::

        thread = DeviceThread()
        future = thread.submit(worker.execute_model, step)
        output = future.result()
        thread.close(worker.shutdown)
    """

    def __init__(self, grace_s: float = SHUTDOWN_GRACE_S) -> None:
        self._grace_s = grace_s
        # its `get` waits on a lock: no polling, and the GIL is free
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        # held while a call is queued, so that none follows the final None
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closing:
                future.set_exception(shut_down_error())
            else:
                self._calls.put((future, function, args, False))
        return future

    def close(self, last: Callable[[], None]) -> None:
        """See `ComputeThread.close`. Returns when the thread has ended, or has not within grace_s.

        Raises:
            Exception: what `last` raised.
        """
        future: Future[None] = Future()
        with self._lock:
            self._closing = True
            self._calls.put((future, last, (), True))
            self._calls.put(None)
        self._thread.join(self._grace_s)
        if self._thread.is_alive():
            logger.warning("The step that is being computed has not ended for %g s; it is left alone", self._grace_s)
        else:
            future.result()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._make(*call)
            # arguments and results are not kept alive while the thread sleeps
            del call

    def _make(self, future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...], is_last: bool) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self._closing and not is_last:
                raise shut_down_error()
            result = function(*args)
        except BaseException as error:
            # of any kind: the future's owner gets it, and this thread goes on
            future.set_exception(error)
        else:
            future.set_result(result)
