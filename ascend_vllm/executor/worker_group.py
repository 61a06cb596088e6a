"""Workers in processes of their own, as the process that started them sees them: asked, listened to, buried.

One thread listens: to what each worker says, and for the end of each process. Whatever goes wrong in a step, and the
death of any worker, is the end of all of them: what they compute they compute together.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Rendezvous, listen
from ascend_vllm.distributed.shm_ring import RingAbandonedError, RingEnds, RingReader, RingWriter
from ascend_vllm.errors import AscendVllmError, EngineDeadError
from ascend_vllm.executor import wire
from ascend_vllm.executor.device_thread import SHUTDOWN_GRACE_S, shut_down_error
from ascend_vllm.executor.wire import RecordKind, WorkerSetup
from ascend_vllm.executor.worker_process import START_CALL
from ascend_vllm.logger import init_logger
from ascend_vllm.types.step import SchedulerOutput, StepOutput

logger = init_logger(__name__)

# when a worker dies the others fail, too, and may be heard first
_LAST_WORDS_S = 0.5


class _WorkerProcess:
    """One worker's process, and the ring through which it speaks."""

    def __init__(self, rank: int, setup: WorkerSetup, answers: RingEnds) -> None:
        self.rank = rank
        self.answers = RingReader(answers)
        inherited = [*setup.orders.descriptors, *setup.answers.descriptors]
        if setup.rendezvous.listening_socket is not None:
            inherited.append(setup.rendezvous.listening_socket)
        command = [sys.executable, "-m", "ascend_vllm.executor.worker_process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited)
        self.death = os.pidfd_open(self.process.pid)
        payload = msgspec.msgpack.encode(setup)
        # in a thread: the pipe may hold less than the setup, and the process reads when it has started
        threading.Thread(
            target=self._feed, args=(len(payload).to_bytes(4) + payload,), name="feed-worker", daemon=True
        ).start()

    def _feed(self, payload: bytes) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # a process that died early is noticed by its end
                self.process.stdin.write(payload)
                self.process.stdin.flush()

    def describe_end(self) -> str:
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"worker {self.rank} (process {self.process.pid}) {how}"

    def bury(self) -> None:
        """Ends the process if it has not ended, and closes what leads to it."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        os.close(self.death)


class GroupCall:
    """A call that the workers have not all answered."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[Any]] = Future()
        self._results: list[Any] = [None] * size
        self._num_missing = size

    def take(self, rank: int, result: Any) -> bool:
        """Takes a worker's answer, an exception or a result; whether it was the last one."""
        self._num_missing -= 1
        if isinstance(result, Exception):
            if not self.future.done():
                self.future.set_exception(result)
        else:
            self._results[rank] = result
        if self._num_missing == 0 and not self.future.done():
            self.future.set_result(self._results)
        return self._num_missing == 0


class WorkerGroup:
    """Starts the workers of an engine.

    Args:
        config: of the engine; it says how many there are.

    Attributes:
        death_descriptor: readable when the workers are gone without having been told to stop.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.parallel.world_size
        self.death_descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        # the order of what is sent, which may have to wait for room
        self._sending = threading.Lock()
        # what is waited for
        self._waiting = threading.Lock()
        self._steps: collections.deque[Future[StepOutput]] = collections.deque()
        self._calls: dict[int, GroupCall] = {START_CALL: GroupCall(self._size)}
        self._next_call = START_CALL + 1
        self._made = self._calls[START_CALL].future
        # why the workers are gone
        self._error: Exception | None = None
        self._is_stopping = False
        orders = RingEnds.create(self._size)
        self._rings = [orders]
        self._orders = RingWriter(orders)
        self._workers = self._start(config, orders)
        self._listener = threading.Thread(target=self._listen, name="listen-to-workers", daemon=True)
        self._listener.start()

    def _start(self, config: EngineConfig, orders: RingEnds) -> list[_WorkerProcess]:
        workers = []
        with listen() as socket:
            port = socket.getsockname()[1]
            for rank in range(self._size):
                answers = RingEnds.create(1)
                self._rings.append(answers)
                rendezvous = Rendezvous(port, None if rank else socket.fileno())
                setup = WorkerSetup(config, rank, rendezvous, orders.of_reader(rank), answers, sys.path)
                workers.append(_WorkerProcess(rank, setup, answers))
        return workers

    def wait_until_made(self) -> None:
        """Returns when every worker has its device and has found the others.

        Raises:
            ConfigError: the devices cannot be used.
            Exception: whatever a worker failed with.
        """
        self._made.result()

    def step(self, step: SchedulerOutput) -> Future[StepOutput]:
        """Sends a step to all workers; what it gives comes from the first of the last stage."""
        future: Future[StepOutput] = Future()
        try:
            record = wire.encode_step(step)
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
        """Has a method of every worker called, behind the steps that were sent; the results by rank.

        Raises:
            RequestError: it cannot be sent.
            EngineDeadError: the workers are gone.
        """
        call = GroupCall(self._size)
        with self._sending:
            call_id = self._next_call
            record = wire.encode_call(call_id, method, args, kwargs)
            self._next_call += 1
            self._expect(lambda: self._calls.update({call_id: call}))
            self._send(record)
        return call.future

    def _expect(self, note: Callable[[], None]) -> None:
        """Notes what will be waited for.

        Raises:
            EngineDeadError: the workers are gone.
        """
        with self._waiting:
            self._check()
            note()

    def _send(self, record: bytes) -> None:
        try:
            self._orders.write(record, self._is_over)
        except RingAbandonedError:
            raise EngineDeadError(str(self._error)) from None

    def check(self) -> None:
        """Returns if the workers are there.

        Raises:
            EngineDeadError: they are not.
        """
        with self._waiting:
            self._check()

    def close(self) -> None:
        """Ends the workers, by force if they do not end by themselves; may be called again."""
        with self._sending:
            if self._is_stopping:
                return
            self._is_stopping = True
            if self._error is None:
                with contextlib.suppress(EngineDeadError):
                    self._send(wire.encode_stop())
        if self._error is None:
            deadline = time.monotonic() + SHUTDOWN_GRACE_S
            for worker in self._workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        os.eventfd_write(self._wake, 1)
        self._listener.join()
        self._end(shut_down_error())
        for worker in self._workers:
            worker.bury()
        for ring in self._rings:
            ring.close()
        os.close(self._wake)
        os.close(self.death_descriptor)

    def _is_over(self) -> bool:
        return self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if self._is_stopping:
            raise shut_down_error()

    # ---- the listening thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._listen_until_the_end()
        except Exception as error:  # without this thread nobody would get an answer any more
            logger.exception("What the workers say cannot be understood")
            self._die(EngineDeadError(f"what the workers say cannot be understood: {error!r}"))

    def _listen_until_the_end(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        speakers = {worker.answers.descriptor: worker for worker in self._workers}
        dying = {worker.death: worker for worker in self._workers}
        for descriptor in (*speakers, *dying):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poll.poll()]
            # what a worker said before its end comes first: it may say why
            said = [speakers[descriptor] for descriptor in ready if descriptor in speakers]
            if not all(self._hear(worker) for worker in said):
                return
            if self._wake in ready:
                return
            for descriptor in ready if not said else ():
                if self._is_stopping:
                    poll.unregister(descriptor)
                    continue
                error = EngineDeadError(dying[descriptor].describe_end())
                logger.error("The workers are gone: %s", error)
                self._die(error)
                return

    def _hear(self, worker: _WorkerProcess) -> bool:
        """Takes what a worker says; False if it is the last that counts."""
        record = worker.answers.take()
        if record is None:
            return True
        match record[0]:
            case RecordKind.STEP_OUTPUT:
                self._steps.popleft().set_result(wire.decode_output(record))
            case RecordKind.RESULT:
                self._take_result(worker, record)
            case RecordKind.FAILURE:
                return self._take_failure(worker, wire.decode_failure(record))
        return True

    def _take_result(self, worker: _WorkerProcess, record: bytes) -> None:
        try:
            result = wire.decode_pickled(record)
        except Exception as error:
            result = error
        self._answer(wire.call_id_of(record), worker.rank, result)

    def _answer(self, call_id: int, rank: int, result: Any) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.take(rank, result):
            with self._waiting:
                self._calls.pop(call_id, None)

    def _take_failure(self, worker: _WorkerProcess, failure: wire.Failure) -> bool:
        if failure.call_id not in (None, START_CALL):
            self._answer(failure.call_id, worker.rank, failure.error())
            return True
        error = failure.error()
        dead = self._find_dead() if failure.call_id is None else None
        if dead is not None:
            error = EngineDeadError(dead.describe_end())
            logger.error("The workers are gone: %s", error)
        elif not isinstance(error, AscendVllmError):
            what = "failed in a step" if failure.call_id is None else "failed to start"
            logger.error("Worker %d %s:\n%s", worker.rank, what, failure.trace)
        self._die(error)
        return False

    def _find_dead(self) -> _WorkerProcess | None:
        """A worker that has died, or is about to: its end is why others fail."""
        poll = select.poll()
        by_descriptor = {worker.death: worker for worker in self._workers}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(_LAST_WORDS_S * 1000):
            return by_descriptor[descriptor]
        return None

    def _die(self, error: Exception) -> None:
        """The end of all workers."""
        # who waits for room in the ring must see it first
        self._error = error
        self._end(error)
        os.eventfd_write(self.death_descriptor, 1)
        for worker in self._workers:
            worker.process.kill()

    def _end(self, error: Exception) -> None:
        """Everything that is waited for gets an error."""
        with self._waiting:
            if self._error is None:
                self._error = error
            waiting: list[Future[Any]] = [*self._steps, *(call.future for call in self._calls.values())]
            self._steps.clear()
            self._calls.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
