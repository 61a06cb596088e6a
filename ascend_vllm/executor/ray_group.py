"""Workers in actors of Ray, on any machine of a cluster, as the process that started them sees them.

Each has a call under way that never ends, whose failure tells of its death; nobody polls. One thread takes whatever
comes from the actors, in the order it comes in. As in `WorkerGroup`, what goes wrong in a step, and the death of any
worker, is the end of all of them.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Machine, Rendezvous
from ascend_vllm.errors import AscendVllmError, ConfigError, EngineDeadError
from ascend_vllm.executor import wire
from ascend_vllm.executor.device_thread import SHUTDOWN_GRACE_S, shut_down_error
from ascend_vllm.executor.ray_cluster import RayCluster, Seat
from ascend_vllm.executor.ray_worker import RayWorker, RayWorkerFacts, RayWorkerSetup
from ascend_vllm.executor.wire import RecordKind
from ascend_vllm.executor.worker_group import GroupCall
from ascend_vllm.executor.worker_process import START_CALL
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.host import LOOPBACK
from ascend_vllm.types.step import SchedulerOutput, StepOutput

logger = init_logger(__name__)

# when a worker dies the others fail, too, and may be heard first
_LAST_WORDS_S = 2.0
# what is told of a death, of all that Ray says
_MAX_REASON_LENGTH = 400


@dataclasses.dataclass(frozen=True)
class _Actor:
    """One worker.

    Attributes:
        rank: of the worker.
        seat: where it is.
        handle: Ray's.
        facts: who it is.
    """

    rank: int
    seat: Seat
    handle: Any
    facts: RayWorkerFacts

    def describe_end(self, reason: BaseException) -> str:
        """A sentence from what Ray says, which is many lines, some of them about the actor's names."""
        said = " ".join(line for line in str(reason).splitlines() if line and not line.startswith("\t"))
        if len(said) > _MAX_REASON_LENGTH:
            said = said[:_MAX_REASON_LENGTH] + " ..."
        return f"worker {self.rank} (process {self.facts.pid} on {self.seat.address}) is gone: {said}"


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What came of a call of an actor.

    Attributes:
        actor: of whom it was asked.
        result: done.
        is_watch: it is the call that never ends.
    """

    actor: _Actor
    result: Future[bytes | None]
    is_watch: bool


class RayGroup:
    """Starts the workers of an engine.

    Args:
        config: of the engine; it says how many there are.

    Attributes:
        death_descriptor: readable when the workers are gone without having been told to stop.

    Raises:
        ConfigError: Ray is not installed, its cluster does not answer, or has too little.
        EngineDeadError: a worker died.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._size = config.parallel.world_size
        # the order of what is sent, and what is waited for
        self._lock = threading.Lock()
        self._steps: collections.deque[Future[StepOutput]] = collections.deque()
        self._calls: dict[int, GroupCall] = {START_CALL: GroupCall(self._size)}
        self._next_call = START_CALL + 1
        self._made = self._calls[START_CALL].future
        # why the workers are gone
        self._error: Exception | None = None
        self._is_stopping = False
        self._answers: queue.SimpleQueue[_Answer | None] = queue.SimpleQueue()
        self._cluster = RayCluster(config.device.device, self._size)
        self._ray = self._cluster.ray
        self._actors: list[_Actor] = []
        self.death_descriptor = os.eventfd(0, os.EFD_CLOEXEC)
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
        # resolved here: `ray` is known when it is needed only
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
        """Tells the actors who they are; START_CALL is answered when they have found each other."""
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
        """Has what comes of a call of an actor told to the listening thread."""
        reference.future().add_done_callback(lambda result: self._answers.put(_Answer(actor, result, is_watch)))

    def wait_until_made(self) -> None:
        """Returns when every worker has its device and has found the others.

        Raises:
            ConfigError: the devices cannot be used.
            Exception: whatever a worker failed with.
        """
        self._made.result()

    def step(self, step: SchedulerOutput) -> Future[StepOutput]:
        """Sends a step to all workers; what it gives comes from one of them."""
        future: Future[StepOutput] = Future()
        try:
            record = wire.encode_step(step)
            with self._lock:
                self._check()
                self._steps.append(future)
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
        with self._lock:
            call_id = self._next_call
            record = wire.encode_call(call_id, method, args, kwargs)
            self._next_call += 1
            self._check()
            self._calls[call_id] = call
            self._send(record)
        return call.future

    def _send(self, record: bytes) -> None:
        for actor in self._actors:
            self._ask(actor, actor.handle.run.remote(record))

    def check(self) -> None:
        """Returns if the workers are there.

        Raises:
            EngineDeadError: they are not.
        """
        with self._lock:
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if self._is_stopping:
            raise shut_down_error()

    def close(self) -> None:
        """Ends the workers, by force if they do not end by themselves; may be called again."""
        with self._lock:
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
                # nobody waits for it any more
                continue
            try:
                self._hear(answer)
            except Exception as error:  # without this thread nobody would get an answer any more
                logger.exception("What the workers say cannot be understood")
                self._die(EngineDeadError(f"what the workers say cannot be understood: {error!r}"))

    def _hear(self, answer: _Answer) -> None:
        death = answer.result.exception()
        if answer.is_watch or death is not None:
            self._die(EngineDeadError(answer.actor.describe_end(death or RuntimeError("it ended by itself"))))
            return
        record = answer.result.result()
        if record is None:
            return
        match record[0]:
            case RecordKind.STEP_OUTPUT:
                with self._lock:
                    step = self._steps.popleft()
                step.set_result(wire.decode_output(record))
            case RecordKind.RESULT:
                self._take_result(answer.actor, record)
            case RecordKind.FAILURE:
                self._take_failure(answer.actor, wire.decode_failure(record))

    def _take_result(self, actor: _Actor, record: bytes) -> None:
        try:
            result = wire.decode_pickled(record)
        except Exception as error:
            result = error
        self._answer(wire.call_id_of(record), actor.rank, result)

    def _answer(self, call_id: int, rank: int, result: Any) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.take(rank, result):
            with self._lock:
                self._calls.pop(call_id, None)

    def _take_failure(self, actor: _Actor, failure: wire.Failure) -> None:
        if failure.call_id not in (None, START_CALL):
            self._answer(failure.call_id, actor.rank, failure.error())
            return
        error = (self._find_death() if failure.call_id is None else None) or failure.error()
        if not isinstance(error, AscendVllmError):
            what = "failed in a step" if failure.call_id is None else "failed to start"
            logger.error("Worker %d %s:\n%s", actor.rank, what, failure.trace)
        self._die(error)

    def _find_death(self) -> EngineDeadError | None:
        """A worker that has died, or is about to: its end is why others fail."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                answer = self._answers.get(timeout=left)
            except queue.Empty:
                return None
            if answer is None:
                # for the loop, which this is called from
                self._answers.put(None)
                return None
            death = answer.result.exception()
            if death is not None:
                return EngineDeadError(answer.actor.describe_end(death))
        return None

    def _die(self, error: Exception) -> None:
        """The end of all workers."""
        if isinstance(error, EngineDeadError):
            logger.error("The workers are gone: %s", error)
        self._error = error
        self._end(error)
        os.eventfd_write(self.death_descriptor, 1)
        self._kill()

    def _end(self, error: Exception) -> None:
        """Everything that is waited for gets an error."""
        with self._lock:
            if self._error is None:
                self._error = error
            waiting: list[Future[Any]] = [*self._steps, *(call.future for call in self._calls.values())]
            self._steps.clear()
            self._calls.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
