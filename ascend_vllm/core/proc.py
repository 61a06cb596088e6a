"""The engine-core process: ``python -m ascend_vllm.core.proc --input ipc://… --output ipc://…``.

Started by the API-server process, which binds both sockets. The protocol:

- stdin: a length (4 bytes, big-endian), then the EngineConfig in that many bytes of msgpack. stdin stays open; when
  it is closed, the parent has died, and this process ends.
- --input: PULL, one CoreInbound message per frame.
- --output: PUSH, one CoreOutbound message per frame; the first is EngineReady or EngineFailed.

With --api-server-count both are given once per API-server process; see `core/clients.py`.

One thread does all the work; besides there are zmq's threads and one that waits for the end of stdin. SIGINT is
ignored: a terminal sends it to the parent, too, which then sends Shutdown or SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import msgspec
import psutil
import zmq

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.clients import Clients
from ascend_vllm.core.engine_core import EngineCore, build
from ascend_vllm.errors import AscendVllmError, EngineDeadError, RequestError
from ascend_vllm.logger import init_logger, name_process
from ascend_vllm.process_memory import settle
from ascend_vllm.types.messages import (
    AbortRequests,
    CoreInbound,
    CoreOutbound,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineFailed,
    EngineReady,
    FinishReason,
    SequencesOfRequest,
    UtilityCall,
    UtilityResult,
)

logger = init_logger("ascend_vllm.core.proc")

# how long to wait at the end until the last messages have been received
_LINGER_MS = 2000
# after this time between two steps no further message is handled
_RECEIVE_S = 0.02
# how long a step may last after the parent has died
_GRACE_S = 5.0


class CoreLoop:
    """Passes messages of its clients, the API-server processes, to an engine core, and its outputs to them.

    Args:
        core: ready for requests; the caller shuts it down.
        inbound: PULL, of the only client or the first of several.
        outbound: PUSH, of the same.
        further: both for each other client.
    """

    def __init__(
        self,
        core: EngineCore,
        inbound: zmq.Socket[bytes],
        outbound: zmq.Socket[bytes],
        further: Sequence[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = (),
    ) -> None:
        self._core = core
        # with several clients: the one whose message is handled
        self._inbound = inbound
        self._outbound = outbound
        self._clients = Clients([(inbound, outbound), *further]) if further else None
        self._decoder = msgspec.msgpack.Decoder(CoreInbound)
        self._encoder = msgspec.msgpack.Encoder()
        # workers' methods may return any type
        self._result_encoder = msgspec.msgpack.Encoder(enc_hook=str)
        self._stopping = False
        # waited for when there is nothing to do
        self._poller = zmq.Poller()
        for socket in (inbound,) if self._clients is None else self._clients.sockets:
            self._poller.register(socket, zmq.POLLIN)
        if core.death_descriptor is not None:
            self._poller.register(core.death_descriptor, zmq.POLLIN)

    def run(self) -> int:
        """Runs until Shutdown arrives, a step fails or workers have died. Returns the exit code."""
        while True:
            try:
                self._core.await_long_step()
                self._receive()
                if self._stopping:
                    return 0
                outputs = None
                if self._core.has_unfinished():
                    outputs = self._core.step()
                    self._core.make_next_step()
            except Exception as error:
                self._fail(error)
                return 1
            if outputs is not None:
                self._send_outputs(outputs)

    def _receive(self) -> None:
        """Handles messages that have arrived; waits for one if there is nothing else to do.

        After _RECEIVE_S the rest is left for the next call, so that running requests do not wait.

        Raises:
            EngineDeadError: workers have died.
        """
        if not self._core.has_unfinished():
            if self._clients is not None:
                self._report_idle(self._clients)
            self._poller.poll()
            self._core.check_health()
        deadline = time.monotonic() + _RECEIVE_S
        while not self._stopping and (time.monotonic() < deadline or not self._core.has_unfinished()):
            if self._clients is not None:
                if not self._receive_of_each(self._clients):
                    return
                continue
            try:
                frame = self._inbound.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(frame)

    def _receive_of_each(self, clients: Clients) -> bool:
        """Handles at most one message of each client; False: there was none."""
        for client in clients.newly_gone():
            lost = clients.release(client)
            if lost:
                logger.error("API server %d is gone: its %d requests are aborted", client.index, len(lost))
                self._core.abort_requests(lost)
        found = False
        for client in clients.living:
            with contextlib.suppress(zmq.Again):
                frame = client.inbound.recv(zmq.NOBLOCK)
                found = True
                self._outbound, clients.current = client.outbound, client
                self._handle(frame)
        return found

    def _report_idle(self, clients: Clients) -> None:
        """Tells the first client the state when no steps follow: it cannot know of the others' aborts."""
        if clients.has_changed:
            clients.has_changed = False
            clients.first.send(self._encoder.encode(EngineCoreOutputs([], self._core.idle_stats())))

    def _handle(self, frame: bytes) -> None:
        """Handles one message; invalid ones do not raise."""
        try:
            message = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            self._reject(frame, error)
            return
        if isinstance(message, EngineCoreRequest):
            self._add_request(message)
        elif isinstance(message, SequencesOfRequest):
            for request in message.requests():
                self._add_request(request)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids)
            if self._clients is not None:
                self._clients.forget(message.request_ids)
        elif isinstance(message, UtilityCall):
            self._call_utility(message)
        else:
            self._stopping = True

    def _add_request(self, message: EngineCoreRequest) -> None:
        try:
            self._core.add_request(message)
        except RequestError as error:
            # not answered: that would reach the unfinished request with the same id
            logger.error("Request ignored: %s", error)
        else:
            if self._clients is not None:
                self._clients.own(message.request_id)

    def _reject(self, frame: bytes, error: Exception) -> None:
        """Logs a message that cannot be decoded, and answers it if it was a request or a call."""
        logger.error("Message of %d bytes ignored: %s", len(frame), error)
        try:
            fields = msgspec.msgpack.decode(frame)
        except msgspec.MsgspecError:
            return
        match fields:
            case [EngineCoreRequest.__name__, str(request_id), *_] | [
                SequencesOfRequest.__name__,
                [EngineCoreRequest.__name__, str(request_id), *_],
                *_,
            ]:
                # an error of the first sequence ends all of them
                output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=str(error))
                self._send(EngineCoreOutputs([output]))
            case [UtilityCall.__name__, int(call_id), *_]:
                self._send(UtilityResult(call_id, error=str(error)))

    def _call_utility(self, call: UtilityCall) -> None:
        try:
            result = UtilityResult(call.call_id, self._core.call_utility(call.method, call.args))
            frame = self._result_encoder.encode(result)
        except RequestError as error:
            frame = self._encoder.encode(UtilityResult(call.call_id, error=str(error), is_request_error=True))
        except Exception as error:
            if not isinstance(error, AscendVllmError):
                logger.exception("Utility %s failed", call.method)
            frame = self._encoder.encode(UtilityResult(call.call_id, error=f"{type(error).__name__}: {error}"))
        self._outbound.send(frame)

    def _fail(self, error: Exception) -> None:
        """Sends an error for each request, then EngineFailed."""
        logger.exception("A step failed; the engine core ends")
        text = f"The engine core failed: {type(error).__name__}: {error}"
        self._send_outputs(self._core.fail_requests(text))
        frame = self._encoder.encode(EngineFailed(EngineDeadError.__name__, text))
        for outbound in (self._outbound,) if self._clients is None else self._clients.outbounds:
            outbound.send(frame)

    def _send_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Sends the outputs of a step, to each client those of its requests."""
        if self._clients is None:
            self._send(outputs)
            return
        for client, part in self._clients.split(outputs):
            client.send(self._encoder.encode(part))

    def _send(self, message: CoreOutbound) -> None:
        self._outbound.send(self._encoder.encode(message))


def read_config(fd: int) -> EngineConfig:
    """Reads the length-prefixed configuration.

    Raises:
        EOFError: the stream ends too early.
        msgspec.MsgspecError: it is not an EngineConfig.
    """
    # not sys.stdin: the interpreter cannot exit while a thread reads from a buffered reader
    length = int.from_bytes(_read_exactly(fd, 4), "big")
    return msgspec.msgpack.decode(_read_exactly(fd, length), type=EngineConfig)


def _read_exactly(fd: int, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = os.read(fd, count - len(data))
        if not part:
            raise EOFError("the configuration on stdin ends early")
        data += part
    return bytes(data)


def _watch_parent(fd: int) -> None:
    """Ends the process when a stream ends: by SIGTERM, and after _GRACE_S by force."""
    while os.read(fd, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


def _is_at_end(fd: int) -> bool:
    """Whether a stream has ended, that is, the parent has died; nothing more is written to it."""
    return bool(select.select([fd], [], [], 0)[0])


def _exit_on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # no limit: messages must not be dropped, and waiting for a slow reader would stall all requests
    socket.set_hwm(0)
    socket.linger = _LINGER_MS
    socket.connect(address)
    return socket


def _start(fd: int) -> tuple[EngineCore | None, EngineReady | EngineFailed | None]:
    """Returns the engine core, None if it cannot start, and the first message, None if the parent has died."""
    try:
        config = read_config(fd)
    except EOFError as error:
        logger.info("The engine core does not start: %s", error)
        return None, None
    try:
        threading.Thread(target=_watch_parent, args=(fd,), name="watch-parent", daemon=True).start()
        if config.parallel.data_parallel_size > 1:
            name_process(f"EngineCore_DP{config.parallel.data_parallel_rank}")
        core = build(config)
    except AscendVllmError as error:
        return None, EngineFailed(type(error).__name__, str(error))
    except Exception as error:
        logger.exception("The engine core cannot start")
        return None, EngineFailed(EngineDeadError.__name__, f"{type(error).__name__}: {error}")
    settle()
    gc.enable()
    return core, EngineReady(
        num_gpu_blocks=core.num_blocks,
        block_size=config.cache.block_size,
        max_model_len=config.scheduler.max_model_len,
        load_time_s=time.time() - psutil.Process().create_time(),
        num_cpu_blocks=core.num_cpu_blocks,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ascend_vllm.core.proc", description="The engine core.")
    kind: dict[str, Any] = {"required": True, "action": "append", "metavar": "ADDRESS"}
    parser.add_argument("--input", **kind, help="socket to take messages from; one for each client")
    parser.add_argument("--output", **kind, help="socket to send messages to; one for each client")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    # a tenth of the time in which torch is imported; `_start` turns it on again
    gc.disable()
    with zmq.Context() as context:
        pairs = [
            (_connect(context, zmq.PULL, inbound), _connect(context, zmq.PUSH, outbound))
            for inbound, outbound in zip(args.input, args.output, strict=True)
        ]
        core: EngineCore | None = None
        try:
            core, greeting = _start(sys.stdin.fileno())
            if greeting is not None:
                for _, outbound in pairs:
                    outbound.send(msgspec.msgpack.encode(greeting))
            code = 1 if core is None else CoreLoop(core, *pairs[0], pairs[1:]).run()
            if core is not None and code:
                core.note_failure("the engine core has failed")
            return code
        finally:
            # a second signal must not interrupt the shutdown
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if core is not None:
                if _is_at_end(sys.stdin.fileno()):
                    core.note_failure("its server is gone")
                core.shutdown()
            for inbound, outbound in pairs:
                inbound.close(linger=0)
                outbound.close(linger=_LINGER_MS)


if __name__ == "__main__":
    if (code := main()) != 0:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # without taking apart what torch has made, which takes 0.1 s of processor time
    os._exit(0)
