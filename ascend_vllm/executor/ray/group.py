"""Workers in actors of Ray, on any machine of a cluster, as the process that started them sees them.

Each actor has one call (`watch`) that never returns, so that its failure reports the actor's death without polling.
One thread reads the answers, for each actor in the order of its calls, even if Ray completes them in another order.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Machine, Rendezvous
from ascend_vllm.errors import ConfigError, EngineDeadError
from ascend_vllm.executor.device_thread import SHUTDOWN_GRACE_S, shut_down_error
from ascend_vllm.executor.ray.cluster import RayCluster, WorkerPlacement
from ascend_vllm.executor.ray.worker import RayWorker, RayWorkerFacts, RayWorkerSetup
from ascend_vllm.executor.remote_workers import RemoteWorkers
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.host import LOOPBACK

logger = init_logger(__name__)

# seconds to look for a dead worker after another one's failure, which may have arrived first
_FIND_DEATH_S = 2.0
# characters of Ray's description of a death that are logged
_MAX_REASON_LENGTH = 400


@dataclasses.dataclass(frozen=True)
class _Actor:
    """One worker.

    Attributes:
        rank: of the worker.
        placement: its machine and reserved device.
        handle: Ray's handle of the actor.
        facts: its process, version and devices.
        pending: futures of calls whose results have not been read, oldest first.
    """

    rank: int
    placement: WorkerPlacement
    handle: Any
    facts: RayWorkerFacts
    pending: collections.deque[Future[bytes | None]] = dataclasses.field(default_factory=collections.deque)

    def describe_end(self, reason: BaseException) -> str:
        """One sentence from Ray's many lines, without the indented ones, which only name the actor."""
        said = " ".join(line for line in str(reason).splitlines() if line and not line.startswith("\t"))
        if len(said) > _MAX_REASON_LENGTH:
            said = said[:_MAX_REASON_LENGTH] + " ..."
        return f"worker {self.rank} (process {self.facts.pid} on {self.placement.address}) is gone: {said}"


@dataclasses.dataclass(frozen=True)
class _Answer:
    """A completed call of an actor.

    Attributes:
        actor: that was called.
        result: a future that is done.
        is_watch: the call is `RayWorker.watch`.
    """

    actor: _Actor
    result: Future[bytes | None]
    is_watch: bool


class RayGroup(RemoteWorkers):
    """Starts the workers of an engine.

    Raises:
        ConfigError: Ray is not installed, its cluster does not answer, or has too few free devices.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config.parallel.world_size)
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        try:
            self._cluster = RayCluster(config.device.device, self._size)
        except BaseException:
            os.close(self.death_descriptor)
            raise
        self._ray = self._cluster.ray
        self._actors: list[_Actor] = []
        try:
            self._actors = self._start_actors()
            self._start_workers(config)
        except BaseException:
            self._free()
            raise
        self._listener = threading.Thread(target=self._listen, name="listen-to-workers", daemon=True)
        self._listener.start()

    def _start_actors(self) -> list[_Actor]:
        """Starts an actor at each placement, and waits for its facts.

        Raises:
            ConfigError: one of them has another version of this package.
            EngineDeadError: one of them cannot be started.
        """
        # resolved here: `ray` is imported only when it is needed
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        make = self._ray.remote(concurrency_groups={"watch": 1})(RayWorker)
        takes = {"num_cpus": 1} if self._cluster.resource == "CPU" else {"num_cpus": 0, "resources": {"NPU": 1}}
        handles = [
            make.options(
                **takes,
                scheduling_strategy=strategy(
                    placement_group=self._cluster.group, placement_group_bundle_index=placement.bundle
                ),
                runtime_env={"env_vars": envs.for_workers()},
            ).remote()
            for placement in self._cluster.placements
        ]
        try:
            answers = self._ray.get([handle.facts.remote() for handle in handles])
        except self._ray.exceptions.RayError as error:
            raise EngineDeadError(f"a worker cannot be started by Ray: {error}") from error
        facts = [msgspec.msgpack.decode(answer, type=RayWorkerFacts) for answer in answers]
        for placement, fact in zip(self._cluster.placements, facts, strict=True):
            if fact.version != ascend_vllm.__version__:
                raise ConfigError(
                    f"--distributed-executor-backend ray: {placement.address} has ascend-vllm {fact.version}, and "
                    f"here is {ascend_vllm.__version__}: install the same on all machines."
                )
        members = zip(self._cluster.placements, handles, facts, strict=True)
        return [_Actor(rank, *member) for rank, member in enumerate(members)]

    def _start_workers(self, config: EngineConfig) -> None:
        """Sends the actors their setups; they answer START_CALL when the workers have met."""
        nodes = [actor.placement.node_id for actor in self._actors]
        is_one_machine = len(set(nodes)) == 1
        port = 0
        host = LOOPBACK if is_one_machine else self._actors[0].placement.address
        if self._size > 1:
            port = self._ray.get(self._actors[0].handle.listen.remote(host))
        for actor in self._actors:
            node = actor.placement.node_id
            place = Machine(nodes[: actor.rank].count(node), nodes.count(node))
            address = LOOPBACK if is_one_machine else actor.placement.address
            neighbours = [other for other in self._actors if other.placement.node_id == node]
            devices = sorted({device for other in neighbours for device in other.facts.devices})
            rendezvous = Rendezvous(port, None, host, address, place) if self._size > 1 else None
            chosen = "OMP_NUM_THREADS" in envs.for_workers()
            setup = RayWorkerSetup(config, actor.rank, rendezvous, devices, sys.path, chosen)
            self._track(actor, actor.handle.start.remote(msgspec.msgpack.encode(setup)))
            watch = actor.handle.watch.options(concurrency_group="watch").remote()
            self._track(actor, watch, is_watch=True)
            logger.info(
                "Worker %d is process %d on %s%s",
                actor.rank,
                actor.facts.pid,
                actor.placement.address,
                f", NPU {', '.join(actor.facts.devices)}" if actor.facts.devices else "",
            )

    def _track(self, actor: _Actor, reference: Any, *, is_watch: bool = False) -> None:
        """Queues the result of an actor's call for the listening thread, once it is there."""
        future = reference.future()
        if not is_watch:
            actor.pending.append(future)
        future.add_done_callback(lambda result: self._answers.put(_Answer(actor, result, is_watch)))

    def _send(self, record: bytes) -> None:
        for actor in self._actors:
            self._track(actor, actor.handle.run.remote(record))

    def close(self) -> None:
        with self._sending:
            if self._is_stopping:
                return
            self._is_stopping = True
        if self._error is None and self._ray.is_initialized():
            stops = [actor.handle.stop.remote() for actor in self._actors]
            self._ray.wait(stops, num_returns=len(stops), timeout=SHUTDOWN_GRACE_S)
        self._answers.put(None)
        self._listener.join()
        self._end(shut_down_error())
        self._free()

    def _free(self) -> None:
        self._kill()
        self._cluster.close()
        os.close(self.death_descriptor)

    def _kill(self) -> None:
        # it may be gone, too
        with contextlib.suppress(Exception):
            for actor in self._actors if self._ray.is_initialized() else ():
                self._ray.kill(actor.handle)

    # ---- the listening thread ------------------------------------------------------------------------------

    def _listen(self) -> None:
        while (answer := self._answers.get()) is not None:
            if self._error is not None or self._is_stopping:
                # all futures have failed already, or `close` fails them
                continue
            try:
                self._take_ready(answer)
            except Exception as error:
                self._fail_listening(error)

    def _take_ready(self, answer: _Answer) -> None:
        death = answer.result.exception()
        if answer.is_watch or death is not None:
            self._die(EngineDeadError(answer.actor.describe_end(death or RuntimeError("it ended by itself"))))
            return
        pending = answer.actor.pending
        # Ray may complete two calls in another order than they were made in; a failed one is handled above
        while pending and pending[0].done() and pending[0].exception() is None:
            record = pending.popleft().result()
            if record is not None:
                self._take(answer.actor.rank, record)

    def _find_death(self) -> EngineDeadError | None:
        deadline = time.monotonic() + _FIND_DEATH_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                return None
            if answer is None:
                # for the loop that this is called from
                self._answers.put(None)
                return None
            death = answer.result.exception()
            if death is not None:
                return EngineDeadError(answer.actor.describe_end(death))
        return None
