"""Workers in other processes, as an executor sees them: steps and calls under way, and the futures of their results.

Subclasses carry the records. A failure in a step, and the death of any worker, end all workers: they compute each
step together.
"""

from __future__ import annotations

import abc
import collections
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ascend_vllm.errors import AscendVllmError, EngineDeadError
from ascend_vllm.executor import wire
from ascend_vllm.executor.device_thread import shut_down_error
from ascend_vllm.executor.wire import START_CALL, RecordKind
from ascend_vllm.logger import init_logger
from ascend_vllm.types.step import SchedulerOutput, StepOutput

logger = init_logger(__name__)


class _GroupCall:
    """A call that the workers have not all answered."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[Any]] = Future()
        self._results: list[Any] = [None] * size
        self._num_missing = size

    def take(self, rank: int, result: Any) -> bool:
        """Stores one worker's result or exception; returns whether all workers have answered."""
        self._num_missing -= 1
        if isinstance(result, Exception):
            if not self.future.done():
                self.future.set_exception(result)
        else:
            self._results[rank] = result
        if self._num_missing == 0 and not self.future.done():
            self.future.set_result(self._results)
        return self._num_missing == 0


class RemoteWorkers(abc.ABC):
    """All workers of an engine. Any thread may call them; one thread of the subclass reads their answers.

    Once the workers are gone, steps and calls raise `EngineDeadError`, or their futures do.

    Attributes:
        made: completed when every worker has its device and has found the others; otherwise what one failed with.
        death_descriptor: readable when the workers have ended without a stop order.
        failure_reason: sent to the other nodes when the workers end; None: the end is an ordinary shutdown.
    """

    # some of them are on other machines, with which nothing is pickled
    _sends_plain_calls = False

    def __init__(self, size: int) -> None:
        self._size = size
        self.death_descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        # keeps the order of records; a send may wait for room in a ring
        self._sending = threading.Lock()
        # of steps and calls under way
        self._waiting = threading.Lock()
        self._steps: collections.deque[Future[StepOutput]] = collections.deque()
        self._calls: dict[int, _GroupCall] = {START_CALL: _GroupCall(size)}
        self._next_call = START_CALL + 1
        self.made = self._calls[START_CALL].future
        # why the workers are gone
        self._error: Exception | None = None
        self._is_stopping = False
        self.failure_reason: str | None = "it has ended before the engine was ready"

    # ---- what subclasses do --------------------------------------------------------------------------------

    @abc.abstractmethod
    def _send(self, record: bytes) -> None:
        """Sends a record to every worker; called under `_sending`."""

    @abc.abstractmethod
    def _find_death(self) -> EngineDeadError | None:
        """Waits briefly for the death of another worker that may explain a failure. For the listening thread."""

    @abc.abstractmethod
    def _kill(self) -> None:
        """Ends the workers by force."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the workers, by force if they do not end by themselves; may be called again."""

    # ---- from any thread -----------------------------------------------------------------------------------

    def step(self, step: SchedulerOutput) -> Future[StepOutput]:
        """Sends a step to all workers; the first worker of the last stage returns the output."""
        future: Future[StepOutput] = Future()
        try:
            record = wire.encode(RecordKind.STEP, step)
            with self._sending:
                self._expect(lambda: self._steps.append(future))
                self._send(record)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        return future

    def call(
        self, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Future[list[Any]]:
        """Calls a method of every worker after the steps already sent; the results are ordered by rank.

        Raises:
            RequestError: it cannot be sent.
        """
        call = _GroupCall(self._size)
        with self._sending:
            call_id = self._next_call
            record = wire.encode_call(call_id, method, args, kwargs, is_plain=self._sends_plain_calls)
            self._next_call += 1
            self._expect(lambda: self._calls.update({call_id: call}))
            self._send(record)
        return call.future

    def _expect(self, note: Callable[[], None]) -> None:
        """Registers a future that the workers will complete, if they are alive."""
        with self._waiting:
            self._check()
            note()

    def check(self) -> None:
        """Raises EngineDeadError if the workers are gone."""
        with self._waiting:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if self._is_stopping:
            raise shut_down_error()

    # ---- from the listening thread -------------------------------------------------------------------------

    def _take(self, rank: int, record: bytes) -> None:
        """Handles a record that a worker sent; a failed step ends all workers."""
        match record[0]:
            case RecordKind.STEP_OUTPUT:
                with self._waiting:
                    step = self._steps.popleft()
                step.set_result(wire.decode(record))
            case RecordKind.RESULT | RecordKind.PLAIN_RESULT:
                self._take_result(rank, record)
            case RecordKind.FAILURE:
                self._take_failure(rank, wire.decode(record))

    def _take_result(self, rank: int, record: bytes) -> None:
        try:
            result = wire.decode_call(record)
        except Exception as error:
            result = error
        self._answer(wire.call_id_of(record), rank, result)

    def _answer(self, call_id: int, rank: int, result: Any) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.take(rank, result):
            with self._waiting:
                self._calls.pop(call_id, None)

    def _take_failure(self, rank: int, failure: wire.Failure) -> None:
        if failure.call_id not in (None, START_CALL):
            self._answer(failure.call_id, rank, failure.error())
            return
        error = (self._find_death() if failure.call_id is None else None) or failure.error()
        if not isinstance(error, AscendVllmError):
            what = "failed in a step" if failure.call_id is None else "failed to start"
            logger.error("Worker %d %s", rank, what, exc_info=error)
        self._die(error)

    def _fail_listening(self, error: Exception) -> None:
        """Ends the workers after an error in the listening thread: nobody would read their answers any more."""
        logger.exception("What the workers say cannot be understood")
        self._die(EngineDeadError(f"what the workers say cannot be understood: {error!r}"))

    def _die(self, error: Exception) -> None:
        """Ends all workers because of an error."""
        if isinstance(error, EngineDeadError):
            logger.error("The workers are gone: %s", error)
        # set first: it ends the wait of a sender whose ring is full
        self._error = error
        self._end(error)
        os.eventfd_write(self.death_descriptor, 1)
        self._kill()

    def _end(self, error: Exception) -> None:
        """Fails the futures of all steps and calls under way."""
        with self._waiting:
            if self._error is None:
                self._error = error
            waiting: list[Future[Any]] = [*self._steps, *(call.future for call in self._calls.values())]
            self._steps.clear()
            self._calls.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
