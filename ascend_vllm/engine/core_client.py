"""The API-server process's end of the wire to the engine core."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine.core_process import CoreProcess
from ascend_vllm.engine.core_receiver import CoreReceiver, LoopTask
from ascend_vllm.engine.iteration_watch import IterationWatch
from ascend_vllm.errors import AscendVllmError, ConfigError, EngineDeadError, ModelLoadError, RequestError
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.facts import FACTS
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

logger = init_logger(__name__)

# What a core that was told to end gets to finish its step and close its workers.
_SHUTDOWN_GRACE_S = 5.0
# What a core that hangs gets to end by itself before it is killed.
_HANG_GRACE_S = 2.0
# After the process's end, its last words may still be on the way.
_LAST_WORDS_S = 0.3

_START_ERRORS: dict[str, type[AscendVllmError]] = {
    "ConfigError": ConfigError,
    "UnsupportedFlagError": ConfigError,
    "ModelLoadError": ModelLoadError,
}


class AsyncCoreClient:
    """Starts an engine core in a process of its own and talks to it.

    `start` needs no event loop and returns at once, so that a program can go on importing while the model loads;
    `ready` waits for the core. All other methods belong to the event loop of `ready`. What the core sends is read and
    processed in a thread, the output thread, which `ready` starts; see `CoreReceiver`.

    Args:
        config: of the engine.
        on_outputs: called in the output thread with what each step gives back; returns what the event loop is then to
            do.
        on_death: called once if the core ends without having been told to or hangs, after `ready`.
        environment: variables that the core has beside, or instead of, this process's.

    Raises:
        ConfigError: VLLM_ENGINE_ITERATION_TIMEOUT_S is no number of seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[EngineCoreOutputs], LoopTask],
        on_death: Callable[[EngineDeadError], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        parallel = config.parallel
        # among several the log and the clients must learn which one it was
        self._name = (
            "the engine core" if parallel.data_parallel_size == 1 else f"engine core {parallel.data_parallel_rank}"
        )
        self._timeout_s = envs.engine_iteration_timeout_s(FACTS[config.device.device].iteration_timeout_s)
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._process = CoreProcess(config, environment)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sender = _bound(zmq.Socket(self._context, zmq.PUSH), self._process.inbound)
        socket = _bound(zmq.Socket(self._context, zmq.PULL), self._process.outbound)
        self._receiver = CoreReceiver(socket, self._take, self._refuse)
        self._encoder = msgspec.msgpack.Encoder()
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[EngineReady] | None = None
        self._watch: IterationWatch | None = None
        # until the owner says that none is waited for any more
        self._has_requests = False
        # unless the core pauses
        self._expects_steps = True
        self._num_noticed = 0
        self._error: AscendVllmError | None = None
        # it was told to end, and may do so by itself
        self._is_ending = False
        self._is_stopping = False
        self._is_closed = False

    @property
    def error(self) -> AscendVllmError | None:
        """Why the core is gone; None while it lives."""
        return self._error

    @property
    def pid(self) -> int | None:
        """The core's process id; None before `start`."""
        return self._process.pid

    def start(self) -> None:
        """Starts the process."""
        self._process.start(self._notice_exit)

    async def ready(self) -> EngineReady:
        """Waits until the core has loaded its model.

        Raises:
            ConfigError: flags that do not fit the model or the machine.
            ModelLoadError: the model's directory cannot be served.
            EngineDeadError: the core died.
        """
        if self._ready is None:
            if self._error is not None:  # it was shut down before anybody waited
                raise self._error
            self._loop = asyncio.get_running_loop()
            self._ready = self._loop.create_future()
            self._watch = IterationWatch(self._timeout_s, self._loop, self._has_news, self._give_up)
            self._receiver.start(self._loop)
            if self._process.exit_code is not None:
                self._expect_last_words(self._process.exit_code)
        return await asyncio.shield(self._ready)

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Sends the sequences of a request, one or more.

        Raises:
            EngineDeadError: the core is gone.
        """
        self._send(requests[0] if len(requests) == 1 else SequencesOfRequest.of(requests))
        self._has_requests = True
        if self._watch is not None and self._expects_steps:
            self._watch.start()

    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests early; nothing happens if the core is gone."""
        if request_ids:
            with contextlib.suppress(EngineDeadError):
                self._send(AbortRequests(request_ids))

    def note_idle(self) -> None:
        """Takes notice that no request is waited for, so that the core may be silent."""
        self._has_requests = False
        self._stop_watch_if_idle()

    def expect_steps(self, expected: bool) -> None:
        """Says whether the core computes the requests that it has; one that pauses may be silent."""
        self._expects_steps = expected
        if self._watch is not None and expected and self._has_requests:
            self._watch.start()
        self._stop_watch_if_idle()

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a method of the core.

        Raises:
            RequestError: the core refuses the call, or has no such method.
            AscendVllmError: the method failed, with the core's words.
            EngineDeadError: the core is gone.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not None and loop is not self._loop:
            raise RuntimeError("the engine belongs to another event loop, the one in which it became ready")
        call_id = next(self._call_ids)
        future = loop.create_future()
        self._calls[call_id] = future
        try:
            self._send(UtilityCall(call_id, method, list(args)))
            if self._watch is not None:
                self._watch.start()
            return await future
        finally:
            del self._calls[call_id]
            self._stop_watch_if_idle()

    def abandon(self, error: EngineDeadError) -> None:
        """Ends the core for a reason that lies elsewhere: everything that waits for it gets the error.

        Does not wait; `shutdown` is still to be called.
        """
        if self._error is None:
            self._fail(error, expected=True)
            self._terminate()

    def begin_shutdown(self) -> None:
        """Tells the core to end and does not wait, so that several may end at the same time; see `shutdown`."""
        if self._is_stopping:
            return
        self._is_stopping = True
        was_ready = self._ready is not None and self._ready.done() and not self._ready.cancelled()
        self._is_ending = was_ready and self._error is None
        self._fail(EngineDeadError("the engine was shut down"), expected=True)
        if self._is_ending:
            with contextlib.suppress(zmq.ZMQError):
                self._sender.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
        else:
            # A core that is still loading does not read messages.
            self._process.terminate()

    def shutdown(self) -> None:
        """Ends the core and removes everything that was made for it; takes seconds at most; may be called again."""
        if self._is_closed:
            return
        self.begin_shutdown()
        self._is_closed = True
        self._process.stop(_SHUTDOWN_GRACE_S if self._is_ending else 0.0)
        self._sender.close(linger=0)
        self._receiver.close(self._context)

    def _send(self, message: CoreInbound) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        try:
            # Never waits: the queue has no limit.
            self._sender.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDeadError("the engine core does not take messages") from None

    def _take(self, message: CoreOutbound) -> LoopTask:
        """Processes a message; called in the output thread."""
        if self._error is not None:
            return _do_nothing  # everybody who waited was told
        task: LoopTask
        match message:
            case EngineCoreOutputs():
                task = self._on_outputs(message)
            case UtilityResult():
                task = functools.partial(self._resolve_call, message)
            case EngineReady():
                task = functools.partial(self._note_ready, message)
            case EngineFailed():
                kind = _START_ERRORS.get(message.error_class, EngineDeadError)
                task = functools.partial(self._fail, kind(message.message))
        return functools.partial(self._run, task)

    def _refuse(self, error: Exception) -> LoopTask:
        """For messages that cannot be processed: going on without them would leave somebody without an answer."""
        logger.error("The engine core's outputs cannot be processed", exc_info=error)
        return functools.partial(
            self._fail, EngineDeadError(f"the engine core's outputs cannot be processed: {error!r}")
        )

    def _run(self, task: LoopTask) -> None:
        """Does what is left to do of a message."""
        try:
            task()
        except Exception as error:
            self._refuse(error)()

    def _note_ready(self, message: EngineReady) -> None:
        self._process.remove_sockets()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(message)

    def _resolve_call(self, result: UtilityResult) -> None:
        future = self._calls.get(result.call_id)
        if future is None or future.done():
            return
        if result.error is not None:
            kind = RequestError if result.is_request_error else AscendVllmError
            future.set_exception(kind(result.error))
        else:
            future.set_result(result.result)

    def _stop_watch_if_idle(self) -> None:
        awaits_steps = self._has_requests and self._expects_steps
        if self._watch is not None and not awaits_steps and not self._calls:
            self._watch.stop()

    def _has_news(self) -> bool:
        """Whether anything came since this was last asked, or is being processed.

        The output thread reads what is there at once unless it is processing something.
        """
        num_received = self._receiver.num_received
        has_come = num_received != self._num_noticed
        self._num_noticed = num_received
        return has_come or self._receiver.is_busy

    def _give_up(self) -> None:
        """The core hangs: nothing came from it for too long."""
        logger.error(
            "Engine iteration timed out. This should never happen! The engine core sent nothing for %g s; if a step "
            "may take that long here, set VLLM_ENGINE_ITERATION_TIMEOUT_S to more seconds.",
            self._timeout_s,
        )
        self._fail(
            EngineDeadError(
                f"The engine did not finish a step within {self._timeout_s:g} s, the limit that "
                "VLLM_ENGINE_ITERATION_TIMEOUT_S sets, and was ended."
            )
        )
        self._terminate()

    def _terminate(self) -> None:
        self._process.terminate()
        if self._loop is not None:
            self._loop.call_later(_HANG_GRACE_S, self._process.kill)

    def _notice_exit(self, exit_code: int) -> None:
        """Called in the watching thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._expect_last_words, exit_code)

    def _expect_last_words(self, exit_code: int) -> None:
        if self._loop is not None:
            error = EngineDeadError(self._describe_exit(exit_code))
            self._loop.call_later(_LAST_WORDS_S, self._fail_once_silent, error, self._receiver.num_received)

    def _fail_once_silent(self, error: EngineDeadError, num_received: int) -> None:
        """Tells of the core's end when everything that it sent before has been processed.

        Args:
            error: tells how it ended.
            num_received: messages that had come when it was last asked.
        """
        if self._loop is not None and (self._receiver.is_busy or self._receiver.num_received != num_received):
            self._loop.call_later(_LAST_WORDS_S, self._fail_once_silent, error, self._receiver.num_received)
        else:
            self._fail(error)

    def _describe_exit(self, exit_code: int) -> str:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        return f"{self._name} {how}; its log may say why"

    def _fail(self, error: AscendVllmError, expected: bool = False) -> None:
        """The core is gone: everything that waits for it gets the error. Only the first call counts."""
        if self._error is not None:
            return
        self._error = error
        if self._watch is not None:
            self._watch.stop()
        was_ready = self._ready is not None and self._ready.done()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved: whether anyone waits or not is not an error of its own
        dead = error if isinstance(error, EngineDeadError) else EngineDeadError(str(error))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(dead)
        if was_ready and not expected:
            logger.error("%s is gone: %s", self._name[0].upper() + self._name[1:], error)
            self._on_death(dead)


def _do_nothing() -> None:
    """For messages that nobody needs any more."""


def _bound(socket: zmq.Socket[bytes], address: str) -> zmq.Socket[bytes]:
    # no limit: dropping a message is never right
    socket.set_hwm(0)
    socket.bind(address)
    return socket
