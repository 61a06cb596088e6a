"""The API server's client of its engine cores, of which there are --data-parallel-size."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.core_process import AttachedCore, CoreProcess, make_core_processes
from ascend_vllm.engine.core_receiver import CoreReceiver, LoopTask
from ascend_vllm.engine.request_router import RequestRouter
from ascend_vllm.errors import AscendVllmError, ConfigError, EngineDeadError, ModelLoadError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import FACTS
from ascend_vllm.types.controls import CONTROLS
from ascend_vllm.types.messages import (
    AbortRequests,
    CoreInbound,
    CoreOutbound,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFailed,
    EngineReady,
    SequencesOfRequest,
    Shutdown,
    UtilityCall,
    UtilityResult,
)

if TYPE_CHECKING:
    from ascend_vllm.engine.api_group import ApiGroup

logger = init_logger(__name__)

# for a core to finish its step and close its workers after a Shutdown message
_SHUTDOWN_GRACE_S = 5.0
# for a hanging core to exit after SIGTERM, before it is killed
_HANG_GRACE_S = 2.0
# for messages that are still in transit after the process's end
_LAST_MESSAGES_S = 0.3
# The timeout is this many ticks in a row without a message. A late tick counts once only, so that a pause of this
# process or its event loop is not blamed on the core.
_NUM_TICKS = 8

_START_ERRORS: dict[str, type[AscendVllmError]] = {
    "ConfigError": ConfigError,
    "UnsupportedFlagError": ConfigError,
    "ModelLoadError": ModelLoadError,
}


class CoreClient:
    """Starts the engine cores, each in a process of its own, and exchanges messages with them.

    All sequences of a request, and its abort, go to the core that a `RequestRouter` chooses. Utility calls go to all
    cores. When one core dies, all others are ended; from then on every method that needs them raises
    `EngineDeadError`.

    `start` needs no event loop and returns at once, so that a program can go on importing while the model loads;
    `ready` waits for the cores. All other methods belong to the event loop of `ready`. A core's messages are read and
    processed in its output thread, which `ready` starts; see `CoreReceiver`.

    Args:
        config: of the engine.
        on_outputs: called in the output thread with the outputs of a core's step, and the core's rank; returns a
            callable for the event loop.
        on_death: called once if a core that has started hangs or ends unexpectedly.
        group: this process's, whose parent starts and ends the cores; None: they are this process's own.
        processes: the cores of this process, by rank, if they have been made already.

    Raises:
        ConfigError: VLLM_ENGINE_ITERATION_TIMEOUT_S is no number of seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[EngineCoreOutputs, int], LoopTask],
        on_death: Callable[[EngineDeadError], None],
        group: ApiGroup | None = None,
        processes: Sequence[CoreProcess] | None = None,
    ) -> None:
        self._timeout_s = envs.engine_iteration_timeout_s(FACTS[config.device.device].iteration_timeout_s)
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._call_ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: AscendVllmError | None = None
        self._is_closed = False
        size = config.parallel.data_parallel_size
        # one core needs no choice
        self._router = (
            RequestRouter(
                size,
                config.cache.block_size,
                by_prefix=config.cache.enable_prefix_caching,
                counts=None if group is None else group.counts,
            )
            if size > 1
            else None
        )
        self._gets_all_stats = group is not None and group.is_first
        self._owns_cores = group is None
        self._cores: list[_Core] = []
        try:
            cores: Sequence[CoreProcess | AttachedCore] = processes or []
            if group is not None:
                cores = group.cores
            elif processes is None:
                cores = make_core_processes(config)
            for rank, process in enumerate(cores):
                self._cores.append(_Core(config, rank, process, self._take, self._reject))
        except BaseException:
            self.shutdown()
            raise

    @property
    def error(self) -> AscendVllmError | None:
        """Why the cores are gone; None while they live."""
        return self._error

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the cores, by their numbers; None before `start`."""
        return [core.process.pid for core in self._cores]

    def start(self) -> None:
        for core in self._cores:
            core.process.start(functools.partial(self._notice_exit, core))

    async def ready(self) -> list[EngineReady]:
        """Waits until all cores have loaded their models; returns their EngineReady messages by rank.

        Raises:
            ConfigError: flags that do not fit the model or the machine.
            ModelLoadError: the model's directory cannot be served.
        """
        if self._loop is None:
            if self._error is not None:  # it was shut down before anybody waited
                raise self._error
            self._loop = asyncio.get_running_loop()
            for core in self._cores:
                core.listen(self._loop, self._timeout_s, functools.partial(self._handle_timeout, core))
                if core.process.exit_code is not None:
                    self._expect_last_messages(core, core.process.exit_code)
        sizes = await asyncio.gather(*(asyncio.shield(core.ready) for core in self._cores if core.ready is not None))
        if self._router is not None:
            self._router.set_capacities(size.num_gpu_blocks for size in sizes)
        return sizes

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Sends the sequences of a request, one or more, to one of the cores."""
        self._check_alive()
        core = self._cores[0]
        if self._router is not None:
            # all are routed to the first one's core
            rank, *_ = [self._router.route(request) for request in requests]
            core = self._cores[rank]
        core.open_ids.update([request.request_id for request in requests])
        try:
            core.send(requests[0] if len(requests) == 1 else SequencesOfRequest.of(requests))
        except EngineDeadError:
            self._release(core, [request.request_id for request in requests])
            raise
        core.update_watchdog()

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests early, in the cores that have them; does nothing once these are dead."""
        if not request_ids:
            return
        for core in self._cores:
            ids = [request_id for request_id in request_ids if request_id in core.open_ids]
            if ids:
                if self._error is None:
                    with contextlib.suppress(EngineDeadError):
                        core.send(AbortRequests(ids))
                self._release(core, ids)

    def rank_of(self, request_id: str) -> int:
        """The rank of the core that has a request; 0 if none has it."""
        return next((core.rank for core in self._cores if request_id in core.open_ids), 0)

    def is_idle(self, rank: int) -> bool:
        """Whether a core has no request of this client, and so sends it no statistics; the first gets all of them."""
        return not (self._gets_all_stats or self._cores[rank].open_ids)

    def expect_steps(self, expected: bool) -> None:
        """Sets whether cores with requests must send outputs; paused cores need not, and are not timed out."""
        for core in self._cores:
            core.expects_steps = expected
            core.update_watchdog()

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a control of every core (see `CONTROLS`), and merges the results.

        Raises:
            RequestError: a core refuses the call, or has no such control.
            AscendVllmError: the call failed, with the core's message.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and loop is not self._loop:
            raise RuntimeError("the engine belongs to another event loop, the one in which it became ready")
        self._check_alive()
        control = CONTROLS.get(method)
        if self._router is not None and control is not None and control.forgets_prefixes(args):
            self._router.forget_prefixes()
        futures = [core.call(UtilityCall(next(self._call_ids), method, list(args)), loop) for core in self._cores]
        # waits for all even if one fails, so that no core is still executing the call afterwards
        results = await asyncio.gather(*futures, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results[0] if control is None or len(results) == 1 else control.merge(results)

    def shutdown(self) -> None:
        """Ends the cores, all at the same time, and removes what was made for them.

        Takes seconds at most; may be called again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        were_alive = self._error is None
        self._fail(EngineDeadError("the engine was shut down"))
        if self._owns_cores:
            for core in self._cores:
                core.begin_shutdown(were_alive)
        for core in self._cores:
            core.close()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))

    def _take(self, message: CoreOutbound, core: _Core) -> LoopTask:
        """Processes a message; called in the core's output thread."""
        if self._error is not None:
            return lambda: None  # all waiters have got the error
        task: LoopTask
        match message:
            case EngineCoreOutputs():
                task = functools.partial(self._finish_step, core, message, self._on_outputs(message, core.rank))
            case UtilityResult():
                task = functools.partial(core.resolve_call, message)
            case EngineReady():
                task = functools.partial(core.note_ready, message)
            case EngineFailed():
                kind = _START_ERRORS.get(message.error_class, EngineDeadError)
                task = functools.partial(self._fail, kind(message.message), core)
        return functools.partial(self._run, core, task)

    def _reject(self, error: Exception, core: _Core) -> LoopTask:
        """Fails the engine after a message that cannot be processed: some request would never get its output."""
        logger.error("The engine core's outputs cannot be processed", exc_info=error)
        dead = EngineDeadError(f"the engine core's outputs cannot be processed: {error!r}")
        return functools.partial(self._fail, dead, core)

    def _run(self, core: _Core, task: LoopTask) -> None:
        """Runs a message's task on the event loop."""
        try:
            task()
        except Exception as error:
            self._reject(error, core)()

    def _finish_step(self, core: _Core, outputs: EngineCoreOutputs, task: LoopTask) -> None:
        if self._router is not None and outputs.stats is not None:
            self._router.take_stats(core.rank, outputs.stats)
        self._release(core, [output.request_id for output in outputs.outputs if output.finish_reason is not None])
        task()

    def _release(self, core: _Core, request_ids: Sequence[str]) -> None:
        if request_ids:
            core.open_ids.difference_update(request_ids)
            core.update_watchdog()
            if self._router is not None:
                for request_id in request_ids:
                    self._router.release(request_id)

    def _handle_timeout(self, core: _Core) -> None:
        """Fails the engine because a core has sent nothing within the timeout."""
        logger.error(
            "Engine iteration timed out. This should never happen! The engine core sent nothing for %g s; if a step "
            "may take that long here, set VLLM_ENGINE_ITERATION_TIMEOUT_S to more seconds.",
            self._timeout_s,
        )
        self._fail(
            EngineDeadError(
                f"The engine did not finish a step within {self._timeout_s:g} s, the limit that "
                "VLLM_ENGINE_ITERATION_TIMEOUT_S sets, and was ended."
            ),
            core,
        )
        self._terminate(core)

    def _terminate(self, core: _Core) -> None:
        core.process.terminate()
        if self._loop is not None:
            self._loop.call_later(_HANG_GRACE_S, core.process.kill)

    def _notice_exit(self, core: _Core, exit_code: int) -> None:
        """Called in the thread that waits for the process."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._expect_last_messages, core, exit_code)

    def _expect_last_messages(self, core: _Core, exit_code: int) -> None:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        self._fail_once_silent(core, EngineDeadError(f"{core.name} {how}; its log may say why"), -1)

    def _fail_once_silent(self, core: _Core, error: EngineDeadError, num_received: int) -> None:
        """Reports a core's end once all messages that it sent before have been processed.

        Args:
            core: has ended.
            error: how it ended.
            num_received: messages received at the last check.
        """
        receiver = core.receiver
        if self._loop is not None and (receiver.is_busy or receiver.num_received != num_received):
            self._loop.call_later(_LAST_MESSAGES_S, self._fail_once_silent, core, error, receiver.num_received)
        else:
            self._fail(error, core)

    def _fail(self, error: AscendVllmError, core: _Core | None = None) -> None:
        """Fails everything that waits for a core, and ends the other cores. Only the first call has an effect.

        Args:
            error: why.
            core: the one that died; None: the engine is shut down.
        """
        if self._error is not None:
            return
        self._error = error
        was_ready = core is not None and core.is_ready
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        for each in self._cores:
            each.fail(error, dead)
            if core is not None and each is not core:
                self._terminate(each)
        if core is not None and was_ready:
            logger.error("%s is gone: %s", core.name[0].upper() + core.name[1:], error)
            self._on_death(dead)


class _Core:
    """One engine core: its process, sockets, open requests and calls.

    Args:
        config: of the whole engine.
        rank: of the core.
        process: of the core, to be started by the owner.
        take, reject: `take` and `refuse` of `CoreReceiver`, with the core as a second argument.

    Attributes:
        name: for the log and errors; among several cores it contains the rank.
        process: of the core.
        receiver: reads the core's messages.
        ready: resolved with the EngineReady message; None before `listen`.
        open_ids: requests that were sent and have not ended.
        expects_steps: False while the core is paused.
        watchdog: None before `listen`, and once the core is gone.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        process: CoreProcess | AttachedCore,
        take: Callable[[CoreOutbound, _Core], LoopTask],
        reject: Callable[[Exception, _Core], LoopTask],
    ) -> None:
        self.rank = rank
        self.name = "the engine core" if config.parallel.data_parallel_size == 1 else f"engine core {rank}"
        self.process = process
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sender = _bound(zmq.Socket(self._context, zmq.PUSH), self.process.inbound)
        socket = _bound(zmq.Socket(self._context, zmq.PULL), self.process.outbound)
        self.receiver = CoreReceiver(socket, lambda message: take(message, self), lambda error: reject(error, self))
        self._encoder = msgspec.msgpack.Encoder()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self.ready: asyncio.Future[EngineReady] | None = None
        self.open_ids: set[str] = set()
        self.expects_steps = True
        self.watchdog: IterationWatchdog | None = None
        self._num_seen = 0
        self._ends_by_itself = False

    @property
    def is_ready(self) -> bool:
        """Whether it has loaded its model, or failed to."""
        return self.ready is not None and self.ready.done() and not self.ready.cancelled()

    def listen(
        self, loop: asyncio.AbstractEventLoop, timeout_s: float | None, on_timeout: Callable[[], None]
    ) -> None:
        self.ready = loop.create_future()
        self.watchdog = IterationWatchdog(timeout_s, loop, self.has_activity, on_timeout)
        self.receiver.start(loop)

    def send(self, message: CoreInbound) -> None:
        try:
            # Never waits: the queue has no limit.
            self._sender.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the engine core does not take messages") from None

    def call(self, call: UtilityCall, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """Sends a call; returns the future of its result."""
        future: asyncio.Future[Any] = loop.create_future()
        self._calls[call.call_id] = future
        future.add_done_callback(functools.partial(self._end_call, call.call_id))
        try:
            self.send(call)
            self.update_watchdog()
        except EngineDeadError as error:
            future.set_exception(error)
        return future

    def resolve_call(self, result: UtilityResult) -> None:
        future = self._calls.get(result.call_id)
        if future is None or future.done():
            return
        if result.error is not None:
            kind = RequestError if result.is_request_error else AscendVllmError
            future.set_exception(kind(result.error))
        else:
            future.set_result(result.result)

    def note_ready(self, message: EngineReady) -> None:
        self.process.remove_sockets()
        if self.ready is not None and not self.ready.done():
            self.ready.set_result(message)

    def has_activity(self) -> bool:
        """Whether a message has been received since the last call, or is being processed.

        The output thread reads messages as they arrive, unless it is processing one.
        """
        num_received = self.receiver.num_received
        has_come = num_received != self._num_seen
        self._num_seen = num_received
        return has_come or self.receiver.is_busy

    def update_watchdog(self) -> None:
        """Runs the watchdog while an output or a call's result is due; a paused core need not send outputs."""
        if self.watchdog is None:
            return
        if self._calls or (self.open_ids and self.expects_steps):
            self.watchdog.start()
        else:
            self.watchdog.stop()

    def fail(self, error: AscendVllmError, dead: EngineDeadError) -> None:
        """Fails `ready` with `error`, and pending calls with `dead`."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
        if self.ready is not None and not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved: whether anyone waits or not is not an error of its own
        for future in self._calls.values():
            if not future.done():
                future.set_exception(dead)

    def begin_shutdown(self, was_alive: bool) -> None:
        """Sends Shutdown without waiting, so that several cores can end at the same time; see `close`."""
        self._ends_by_itself = was_alive and self.is_ready and self.ready is not None and not self.ready.exception()
        if self._ends_by_itself:
            with contextlib.suppress(zmq.ZMQError):
                self._sender.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
        else:
            # A core that is still loading does not read messages.
            self.process.terminate()

    def close(self) -> None:
        """Waits for the process to end, and closes its sockets."""
        self.process.stop(_SHUTDOWN_GRACE_S if self._ends_by_itself else 0.0)
        self._sender.close(linger=0)
        self.receiver.close(self._context)

    def _end_call(self, call_id: int, _future: asyncio.Future[Any]) -> None:
        del self._calls[call_id]
        self.update_watchdog()


class IterationWatchdog:
    """A timer that runs while a message of the core is due.

    The core sends a message after every step, so a long silence is a step that hangs. Nothing is done per message or
    per request: a few times within the timeout the timer checks whether a message has come.

    Args:
        timeout_s: seconds without a message after which the core counts as hung; None: never.
        loop: on which the timer runs.
        has_activity: whether a message has come since the last call, or is being processed.
        on_timeout: called once, after the watchdog has stopped.

    Example::

        watchdog = IterationWatchdog(60.0, loop, has_activity, declare_dead)
        watchdog.start()  # with every request
        watchdog.stop()  # when the last one is answered
    """

    def __init__(
        self,
        timeout_s: float | None,
        loop: asyncio.AbstractEventLoop,
        has_activity: Callable[[], bool],
        on_timeout: Callable[[], None],
    ) -> None:
        self._tick_s = None if timeout_s is None else timeout_s / _NUM_TICKS
        self._loop = loop
        self._has_activity = has_activity
        self._on_timeout = on_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._num_silent = 0

    def start(self) -> None:
        """Starts the timer, unless it runs."""
        if self._timer is None and self._tick_s is not None:
            self._num_silent = 0
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def stop(self) -> None:
        """Stops the timer: no message is due."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self._num_silent = 0 if self._has_activity() else self._num_silent + 1
        if self._num_silent >= _NUM_TICKS:
            self._on_timeout()
        elif self._tick_s is not None:
            self._timer = self._loop.call_later(self._tick_s, self._tick)


def _bound(socket: zmq.Socket[bytes], address: str) -> zmq.Socket[bytes]:
    # no limit: dropping a message is never right
    socket.set_hwm(0)
    socket.bind(address)
    return socket
