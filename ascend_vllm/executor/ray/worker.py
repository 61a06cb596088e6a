"""The Ray actor that runs a worker. `RayGroup` creates it."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Rendezvous, listen
from ascend_vllm.executor import wire
from ascend_vllm.executor.device_thread import DeviceThread
from ascend_vllm.executor.ray.cluster import import_ray
from ascend_vllm.executor.worker_process import answer_record, quieten

if TYPE_CHECKING:
    from ascend_vllm.worker.worker import Worker


class RayWorkerFacts(msgspec.Struct, frozen=True):
    """What an actor reports about its process.

    Attributes:
        pid: of its process.
        version: of this package on its machine.
        devices: cards that Ray gave it, as ASCEND_RT_VISIBLE_DEVICES counts them.
    """

    pid: int
    version: str
    devices: list[str]


class RayWorkerSetup(msgspec.Struct, frozen=True):
    """What an actor needs to make its worker.

    Attributes:
        config: of the engine.
        rank: of the worker.
        rendezvous: where the workers meet, without the socket; None for a single worker.
        devices: cards of all workers on its machine; empty on CPU.
        search_path: the program's sys.path, for functions that it calls in workers.
        threads_are_chosen: OMP_NUM_THREADS is set in the program's environment.
    """

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous | None
    devices: list[str]
    search_path: list[str]
    threads_are_chosen: bool


class RayWorker:
    """Makes a worker and has it execute records, all in one thread.

    Arguments and results are bytes and plain values: Ray pickles them.
    """

    def __init__(self) -> None:
        # Ray's process on this machine
        parent = os.pidfd_open(os.getppid())
        threading.Thread(target=_end_with, args=(parent,), name="watch-parent", daemon=True).start()
        self._thread = DeviceThread()
        self._worker: Worker | None = None
        self._rank = 0
        self._socket: socket.socket | None = None

    def facts(self) -> bytes:
        """RayWorkerFacts of this process, in msgpack."""
        devices = import_ray().get_runtime_context().get_accelerator_ids().get("NPU", [])
        return msgspec.msgpack.encode(RayWorkerFacts(os.getpid(), ascend_vllm.__version__, devices))

    def listen(self, host: str) -> int:
        """Opens the port of the rendezvous store that this worker will serve, and returns it."""
        self._socket = listen(host)
        return int(self._socket.getsockname()[1])

    def start(self, setup: bytes) -> bytes:
        """Makes the worker of a RayWorkerSetup in msgpack; returns a record of the start or of its failure."""
        try:
            self._thread.submit(self._make, msgspec.msgpack.decode(setup, type=RayWorkerSetup)).result()
        except BaseException as error:
            return wire.encode_failure(error, wire.START_CALL)
        return wire.STARTED

    def _make(self, setup: RayWorkerSetup) -> None:
        if not setup.threads_are_chosen:
            # Ray sets it to the number of CPUs that the actor has reserved, which is one
            envs.forget("OMP_NUM_THREADS")
        if setup.devices:
            envs.export({"ASCEND_RT_VISIBLE_DEVICES": ",".join(setup.devices)}, {})
        sys.path.extend(path for path in setup.search_path if path not in sys.path)
        quieten(setup.rank)
        # imported here: after the environment is set, and where a failure is sent back
        from ascend_vllm.worker.worker import Worker

        rendezvous = setup.rendezvous
        if rendezvous is not None and self._socket is not None:
            rendezvous = msgspec.structs.replace(rendezvous, listening_socket=self._socket.detach())
        self._rank = setup.rank
        self._worker = Worker(setup.config, setup.rank, rendezvous)

    def run(self, record: bytes) -> bytes | None:
        """Executes a record of kind STEP or CALL; see `answer_record`."""
        if self._worker is None:
            raise RuntimeError("the worker has not been made")
        return self._thread.submit(answer_record, self._worker, self._rank, record).result()

    def watch(self) -> None:
        """Never returns; the call fails when this process ends."""
        threading.Event().wait()

    def stop(self) -> None:
        """Ends the worker after the calls that were submitted."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._thread.close(worker.shutdown)


def _end_with(parent: int) -> None:
    """Ends this process when the parent (a pidfd) ends; Ray would wait for `watch` to return."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    os._exit(1)
