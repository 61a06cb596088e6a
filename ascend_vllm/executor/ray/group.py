"""Workers in actors of Ray, on any machine of a cluster, as the process that started them sees them.

Each has a call under way that never ends, and fails when the actor dies; nobody polls. One thread takes the answers,
those of one actor in the order of the calls, even if Ray completes them in another order.
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
from ascend_vllm.executor.ray.cluster import RayCluster, Seat
from ascend_vllm.executor.ray.worker import RayWorker, RayWorkerFacts, RayWorkerSetup
from ascend_vllm.executor.remote_workers import RemoteWorkers
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.host import LOOPBACK

logger = init_logger(__name__)

# when a worker dies the others fail, too, and their failures may arrive first
_LAST_WORDS_S = 2.0
# characters of Ray's description of a death that are logged
_MAX_REASON_LENGTH = 400


@dataclasses.dataclass(frozen=True)
class _Actor:
    """One worker.

    Attributes:
        rank: of the worker.
        seat: where it is.
        handle: Ray's.
        facts: its process, version and devices.
        asked: futures of calls whose results have not been taken, oldest first.
    """

    rank: int
    seat: Seat
    handle: Any
    facts: RayWorkerFacts
    asked: collections.deque[Future[bytes | None]] = dataclasses.field(default_factory=collections.deque)

    def describe_end(self, reason: BaseException) -> str:
        """A sentence from what Ray says, which is many lines, some of them about the actor's names."""
        said = " ".join(line for line in str(reason).splitlines() if line and not line.startswith("\t"))
        if len(said) > _MAX_REASON_LENGTH:
            said = said[:_MAX_REASON_LENGTH] + " ..."
        return f"worker {self.rank} (process {self.facts.pid} on {self.seat.address}) is gone: {said}"


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The result of a call of an actor.

    Attributes:
        actor: that was called.
        result: done.
        is_watch: it is the call that never ends.
    """

    actor: _Actor
    result: Future[bytes | None]
    is_watch: bool


class RayGroup(RemoteWorkers):
    """Starts the workers of an engine.

    Args:
        config: of the engine; it says how many there are.

    Raises:
        ConfigError: Ray is not installed, its cluster does not answer, or has too little.
        EngineDeadError: a worker died.
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
        """An actor on each seat, which answers.

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
                    placement_group=self._cluster.group, placement_group_bundle_index=seat.bundle
                ),
                runtime_env={"env_vars": envs.for_workers()},
            ).remote()
            for seat in self._cluster.seats
        ]
        try:
            answers = self._ray.get([handle.facts.remote() for handle in handles])
        except self._ray.exceptions.RayError as error:
            raise EngineDeadError(f"a worker cannot be started by Ray: {error}") from error
        facts = [msgspec.msgpack.decode(answer, type=RayWorkerFacts) for answer in answers]
        for seat, fact in zip(self._cluster.seats, facts, strict=True):
            if fact.version != ascend_vllm.__version__:
                raise ConfigError(
                    f"--distributed-executor-backend ray: {seat.address} has ascend-vllm {fact.version}, and here is "
                    f"{ascend_vllm.__version__}: install the same on all machines."
                )
        members = zip(self._cluster.seats, handles, facts, strict=True)
        return [_Actor(rank, *member) for rank, member in enumerate(members)]

    def _start_workers(self, config: EngineConfig) -> None:
        """Sends the actors their setups; START_CALL is answered when they have found each other."""
        nodes = [actor.seat.node_id for actor in self._actors]
        is_one_machine = len(set(nodes)) == 1
        port = 0
        host = LOOPBACK if is_one_machine else self._actors[0].seat.address
        if self._size > 1:
            port = self._ray.get(self._actors[0].handle.listen.remote(host))
        for actor in self._actors:
            node = actor.seat.node_id
            place = Machine(nodes[: actor.rank].count(node), nodes.count(node))
            address = LOOPBACK if is_one_machine else actor.seat.address
            devices = sorted(
                {device for other in self._actors if other.seat.node_id == node for device in other.facts.devices}
            )
            rendezvous = Rendezvous(port, None, host, address, place) if self._size > 1 else None
            chosen = "OMP_NUM_THREADS" in envs.for_workers()
            setup = RayWorkerSetup(config, actor.rank, rendezvous, devices, sys.path, chosen)
            self._ask(actor, actor.handle.start.remote(msgspec.msgpack.encode(setup)))
            watch = actor.handle.watch.options(concurrency_group="watch").remote()
            self._ask(actor, watch, is_watch=True)
            logger.info(
                "Worker %d is process %d on %s%s",
                actor.rank,
                actor.facts.pid,
                actor.seat.address,
                f", NPU {', '.join(actor.facts.devices)}" if actor.facts.devices else "",
            )

    def _ask(self, actor: _Actor, reference: Any, *, is_watch: bool = False) -> None:
        """Has the listening thread take the result of a call of an actor."""
        future = reference.future()
        if not is_watch:
            actor.asked.append(future)
        future.add_done_callback(lambda result: self._answers.put(_Answer(actor, result, is_watch)))

    def _send(self, record: bytes) -> None:
        for actor in self._actors:
            self._ask(actor, actor.handle.run.remote(record))

    def close(self) -> None:
        """Ends the workers, by force if they do not end by themselves; may be called again."""
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
                # nothing is waited for any more
                continue
            try:
                self._hear(answer)
            except Exception as error:
                self._not_understood(error)

    def _hear(self, answer: _Answer) -> None:
        death = answer.result.exception()
        if answer.is_watch or death is not None:
            self._die(EngineDeadError(answer.actor.describe_end(death or RuntimeError("it ended by itself"))))
            return
        asked = answer.actor.asked
        # Ray may complete two calls in another order than they were made in; a failed one is handled above
        while asked and asked[0].done() and asked[0].exception() is None:
            record = asked.popleft().result()
            if record is not None:
                self._take(answer.actor.rank, record)

    def _find_death(self) -> EngineDeadError | None:
        deadline = time.monotonic() + _LAST_WORDS_S
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
