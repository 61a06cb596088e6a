"""Workers in processes of their own, as the process that started them sees them: asked, listened to, buried.

One thread listens: to what each worker says, and for the end of each process.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Rendezvous, listen
from ascend_vllm.distributed.shm_ring import RingAbandonedError, RingEnds, RingReader, RingWriter
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.executor import wire
from ascend_vllm.executor.device_thread import SHUTDOWN_GRACE_S, shut_down_error
from ascend_vllm.executor.remote_workers import RemoteWorkers
from ascend_vllm.executor.wire import WorkerSetup

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


class WorkerGroup(RemoteWorkers):
    """Starts the workers of an engine.

    Args:
        config: of the engine; it says how many there are.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.parallel.world_size)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
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

    def _send(self, record: bytes) -> None:
        try:
            self._orders.write(record, self._is_over)
        except RingAbandonedError:
            raise EngineDeadError(str(self._error)) from None

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

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()

    # ---- the listening thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            self._listen_until_the_end()
        except Exception as error:
            self._not_understood(error)

    def _listen_until_the_end(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        speakers = {worker.answers.descriptor: worker for worker in self._workers}
        dying = {worker.death: worker for worker in self._workers}
        for descriptor in (*speakers, *dying):
            poll.register(descriptor, select.POLLIN)
        while self._error is None:
            ready = [descriptor for descriptor, _ in poll.poll()]
            # what a worker said before its end comes first: it may say why
            said = [speakers[descriptor] for descriptor in ready if descriptor in speakers]
            for worker in said:
                self._hear(worker)
            if self._wake in ready:
                return
            for descriptor in ready if not said else ():
                if self._is_stopping:
                    poll.unregister(descriptor)
                    continue
                self._die(EngineDeadError(dying[descriptor].describe_end()))
                return

    def _hear(self, worker: _WorkerProcess) -> None:
        record = worker.answers.take()
        # nobody waits for anything any more when it is over
        if record is not None and self._error is None:
            self._take(worker.rank, record)

    def _find_death(self) -> EngineDeadError | None:
        poll = select.poll()
        by_descriptor = {worker.death: worker for worker in self._workers}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(_LAST_WORDS_S * 1000):
            return EngineDeadError(by_descriptor[descriptor].describe_end())
        return None
