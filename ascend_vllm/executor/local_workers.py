"""Processes of workers on this machine, as the process that started them sees them."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

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
        """Ends the process if it has not ended, and closes its pipe and descriptor."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        os.close(self.death)


class LocalWorkers:
    """Starts the workers of an engine that run on this machine. One thread takes answers, another may write orders.

    Args:
        config: of the engine.
        meetings: where each of them meets the others, by its rank.
        search_path: where they find modules beside their own places.

    Attributes:
        speakers: a descriptor for each worker, readable when an answer has come.
        deaths: a descriptor for each worker, readable when its process has ended.
    """

    def __init__(self, config: EngineConfig, meetings: Mapping[int, Rendezvous], search_path: Sequence[str]) -> None:
        orders = RingEnds.create(len(meetings))
        self._rings = [orders]
        self._orders = RingWriter(orders)
        workers = []
        for reader, (rank, meeting) in enumerate(meetings.items()):
            answers = RingEnds.create(1)
            self._rings.append(answers)
            setup = WorkerSetup(config, rank, meeting, orders.of_reader(reader), answers, list(search_path))
            workers.append(_WorkerProcess(rank, setup, answers))
        self._workers = workers
        self.speakers = {worker.answers.descriptor: worker for worker in workers}
        self.deaths = {worker.death: worker for worker in workers}

    def write(self, record: bytes, is_abandoned: Callable[[], bool]) -> None:
        """Writes a record for all of them; waits for room in the ring.

        Args:
            record: for every worker.
            is_abandoned: asked while there is no room; true ends the waiting.

        Raises:
            RingAbandonedError: there will be no room.
        """
        self._orders.write(record, is_abandoned)

    def take(self, ready: Collection[int]) -> list[tuple[int, bytes]]:
        """Takes complete records of the workers of readable descriptors, with their ranks."""
        said = [(self.speakers[descriptor], self.speakers[descriptor].answers.take()) for descriptor in ready]
        return [(worker.rank, record) for worker, record in said if record is not None]

    def describe_end(self, death: int) -> str:
        """How the worker of a readable descriptor of `deaths` ended."""
        return self.deaths[death].describe_end()

    def find_death(self, timeout_s: float) -> str | None:
        """How a worker ended; None if none has within the time."""
        poll = select.poll()
        for descriptor in self.deaths:
            poll.register(descriptor, select.POLLIN)
        ended = poll.poll(timeout_s * 1000)
        return self.describe_end(ended[0][0]) if ended else None

    def wait(self, timeout_s: float) -> None:
        """Returns when all have ended, or not within the time."""
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """Kills them."""
        for worker in self._workers:
            worker.process.kill()

    def bury(self) -> None:
        """Ends those that have not ended, and closes rings, pipes and descriptors."""
        for worker in self._workers:
            worker.bury()
        for ring in self._rings:
            ring.close()
