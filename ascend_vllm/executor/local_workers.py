"""Processes of workers on this machine, as the process that started them sees them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Rendezvous
from ascend_vllm.distributed.shm_ring import RingEnds, RingReader, RingWriter
from ascend_vllm.executor.wire import WorkerSetup


class _WorkerProcess:
    """One worker's process, and the ring of its answers."""

    def __init__(self, rank: int, setup: WorkerSetup, answers: RingEnds) -> None:
        self.rank = rank
        self.answers = RingReader(answers)
        inherited = [*setup.orders.descriptors, *setup.answers.descriptors]
        if setup.rendezvous.listening_socket is not None:
            inherited.append(setup.rendezvous.listening_socket)
        command = [sys.executable, "-m", "ascend_vllm.executor.worker_process"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited)
        self.pidfd = os.pidfd_open(self.process.pid)
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

    def close(self) -> None:
        """Ends the process if it has not ended, and closes its pipe and descriptor."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        os.close(self.pidfd)


class LocalWorkers:
    """Starts the workers of an engine that run on this machine. One thread may read answers while another writes.

    Args:
        config: of the engine.
        rendezvous: rank → where that worker meets the others.
        search_path: entries to add to their sys.path.

    Attributes:
        orders: ring that all of them read.
        answer_descriptors: descriptor → worker; readable when an answer has come.
        pidfds: descriptor → worker; readable when its process has ended.
    """

    def __init__(
        self, config: EngineConfig, rendezvous: Mapping[int, Rendezvous], search_path: Sequence[str]
    ) -> None:
        orders = RingEnds.create(len(rendezvous))
        self._rings = [orders]
        self.orders = RingWriter(orders)
        workers = []
        for reader, (rank, address) in enumerate(rendezvous.items()):
            answers = RingEnds.create(1)
            self._rings.append(answers)
            setup = WorkerSetup(config, rank, address, orders.of_reader(reader), answers, list(search_path))
            workers.append(_WorkerProcess(rank, setup, answers))
        self._workers = workers
        self.answer_descriptors = {worker.answers.descriptor: worker for worker in workers}
        self.pidfds = {worker.pidfd: worker for worker in workers}

    def take(self, ready: Collection[int]) -> list[tuple[int, bytes]]:
        """Ranks and complete records, read from readable `answer_descriptors`."""
        workers = [self.answer_descriptors[descriptor] for descriptor in ready]
        return [(worker.rank, record) for worker in workers if (record := worker.answers.take()) is not None]

    def describe_end(self, pidfd: int) -> str:
        """How a worker's process ended, given its readable pidfd."""
        return self.pidfds[pidfd].describe_end()

    def find_death(self, timeout_s: float) -> str | None:
        """How the first worker to end within `timeout_s` ended; None: none has."""
        poll = select.poll()
        for descriptor in self.pidfds:
            poll.register(descriptor, select.POLLIN)
        ended = poll.poll(timeout_s * 1000)
        return self.describe_end(ended[0][0]) if ended else None

    def wait(self, timeout_s: float) -> None:
        """Waits until all have ended, for `timeout_s` at most."""
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Sends SIGKILL to all of them."""
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        """Ends those that have not ended, and closes rings, pipes and descriptors."""
        for worker in self._workers:
            worker.close()
        for ring in self._rings:
            ring.close()
