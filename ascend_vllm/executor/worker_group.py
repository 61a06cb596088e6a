"""Workers in processes of their own on this machine.

One thread listens for the answers of each worker, and for the end of each process.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Rendezvous, listen
from ascend_vllm.distributed.shm_ring import RingAbandonedError
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.executor import wire
from ascend_vllm.executor.device_thread import SHUTDOWN_GRACE_S, shut_down_error
from ascend_vllm.executor.local_workers import LocalWorkers
from ascend_vllm.executor.remote_workers import RemoteWorkers

# seconds to look for a dead worker after another one's failure, which may have arrived first
_FIND_DEATH_S = 0.5


class WorkerGroup(RemoteWorkers):
    """Starts the workers of an engine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.parallel.world_size)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        try:
            self._local = self._start(config)
        except BaseException:
            self._close_descriptors()
            raise
        for descriptor in (*self._local.answer_descriptors, *self._local.pidfds):
            self._poll.register(descriptor, select.POLLIN)
        self._listener = threading.Thread(target=self._listen, name="listen-to-workers", daemon=True)
        self._listener.start()

    def _start(self, config: EngineConfig) -> LocalWorkers:
        """Starts the processes of this machine's workers."""
        with listen() as socket:
            port = socket.getsockname()[1]
            rendezvous = {rank: Rendezvous(port, None if rank else socket.fileno()) for rank in range(self._size)}
            return LocalWorkers(config, rendezvous, sys.path)

    def _send(self, record: bytes) -> None:
        try:
            self._local.orders.write(record, lambda: self._error is not None)
        except RingAbandonedError:
            raise EngineDeadError(str(self._error)) from None

    def close(self) -> None:
        with self._sending:
            if self._is_stopping:
                return
            self._is_stopping = True
            if self._error is None:
                with contextlib.suppress(EngineDeadError):
                    self._send_stop()
        if self._error is None:
            self._wait_for_exits(SHUTDOWN_GRACE_S)
        os.eventfd_write(self._wake, 1)
        self._listener.join()
        self._end(shut_down_error())
        self._local.close()
        self._close_descriptors()

    def _send_stop(self) -> None:
        """Sends every worker a STOP record."""
        self._send(wire.STOP)

    def _wait_for_exits(self, timeout_s: float) -> None:
        """Waits until every worker has ended, for `timeout_s` at most."""
        self._local.wait(timeout_s)

    def _close_descriptors(self) -> None:
        os.close(self._wake)
        os.close(self.death_descriptor)

    def _kill(self) -> None:
        self._local.kill()

    # ---- the listening thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while self._error is None:
                ready = {descriptor for descriptor, _ in self._poll.poll()}
                # answers sent before the end come first: they may give the reason
                has_answers = self._take_ready(ready)
                if self._wake in ready:
                    return
                if not has_answers:
                    self._take_exits(ready)
        except Exception as error:
            self._fail_listening(error)

    def _take_ready(self, ready: set[int]) -> bool:
        """Handles the answers at readable descriptors; returns whether there were any."""
        answering = ready & self._local.answer_descriptors.keys()
        for rank, record in self._local.take(answering):
            # after an error all futures have failed already
            if self._error is None:
                self._take(rank, record)
        return bool(answering)

    def _take_exits(self, ready: set[int]) -> None:
        for descriptor in ready & self._local.pidfds.keys():
            if self._is_stopping:
                self._poll.unregister(descriptor)
            elif self._error is None:
                self._die(EngineDeadError(self._local.describe_end(descriptor)))

    def _find_death(self) -> EngineDeadError | None:
        end = self._local.find_death(_FIND_DEATH_S)
        return None if end is None else EngineDeadError(end)
