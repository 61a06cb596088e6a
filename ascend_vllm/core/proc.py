"""The engine-core process: ``python -m ascend_vllm.core.proc --input ipc://… --output ipc://…``.

Started by the API-server process, which binds both sockets. The wire:

- stdin: four bytes, big-endian, the length; then so many bytes, the EngineConfig in msgpack. It stays open;
  its end means that the parent is gone, and ends this process.
- --input: PULL, one CoreInbound message a frame.
- --output: PUSH, one CoreOutbound message a frame; the first is EngineReady or EngineFailed.

One thread does everything; the others sleep: zmq's own, and one that waits for the end of stdin. SIGINT is
ignored, since a terminal sends it to the parent too, which then sends Shutdown or SIGTERM.
"""

from __future__ import annotations

import argparse
import gc
import os
import select
import signal
import sys
import threading
import time
from types import FrameType

import msgspec
import psutil
import zmq

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.engine_core import EngineCore, build
from ascend_vllm.errors import AscendVllmError, EngineDeadError, RequestError
from ascend_vllm.logger import init_logger, name_process
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

# how long the last messages may take to be fetched, and a step to end when the parent is gone
_LINGER_MS = 2000
# how long messages may be handled between two steps, but for the last of them
_RECEIVE_S = 0.02
_GRACE_S = 5.0


class CoreLoop:
    """Feeds an engine core from one socket and sends what it says to another.

    Args:
        core: ready for requests; stays the caller's to shut down.
        inbound: PULL.
        outbound: PUSH.
    """

    def __init__(self, core: EngineCore, inbound: zmq.Socket[bytes], outbound: zmq.Socket[bytes]) -> None:
        self._core = core
        self._inbound = inbound
        self._outbound = outbound
        self._decoder = msgspec.msgpack.Decoder(CoreInbound)
        self._encoder = msgspec.msgpack.Encoder()
        # results of workers' methods may be anything
        self._result_encoder = msgspec.msgpack.Encoder(enc_hook=str)
        self._stopping = False
        # what there is to wait for when there is nothing to do
        self._poller = zmq.Poller()
        self._poller.register(inbound, zmq.POLLIN)
        if core.death_descriptor is not None:
            self._poller.register(core.death_descriptor, zmq.POLLIN)

    def run(self) -> int:
        """Works until Shutdown comes, a step fails or the workers are gone. Returns the exit code."""
        while True:
            try:
                self._receive()
                if self._stopping:
                    return 0
                outputs = self._core.step() if self._core.has_unfinished() else None
            except Exception as error:
                self._die(error)
                return 1
            if outputs is not None:
                self._send(outputs)

    def _receive(self) -> None:
        """Handles the messages that are there; waits for one if there is nothing else to do.

        Many or large ones are handled a part at a time: requests that run take their steps in between.

        Raises:
            EngineDeadError: the workers are gone.
        """
        if not self._core.has_unfinished():
            self._poller.poll()
            self._core.check_health()
        deadline = time.monotonic() + _RECEIVE_S
        while not self._stopping and (time.monotonic() < deadline or not self._core.has_unfinished()):
            try:
                frame = self._inbound.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(frame)

    def _handle(self, frame: bytes) -> None:
        """Handles one message; nothing that it holds can end the loop."""
        try:
            message = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            self._refuse(frame, error)
            return
        if isinstance(message, EngineCoreRequest):
            self._add_request(message)
        elif isinstance(message, SequencesOfRequest):
            for request in message.requests():
                self._add_request(request)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.request_ids)
        elif isinstance(message, UtilityCall):
            self._call_utility(message)
        else:
            self._stopping = True

    def _add_request(self, message: EngineCoreRequest) -> None:
        try:
            self._core.add_request(message)
        except RequestError as error:
            # no answer: it would reach the request of the same id that lives
            logger.error("Request ignored: %s", error)

    def _refuse(self, frame: bytes, error: Exception) -> None:
        """Logs a message that cannot be read, and answers it if it was a request."""
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
                # with the first of several sequences all end
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

    def _die(self, error: Exception) -> None:
        """Tells every request and then the parent that the engine is dead."""
        logger.exception("A step failed; the engine core ends")
        text = f"The engine core failed: {type(error).__name__}: {error}"
        self._send(self._core.fail_requests(text))
        self._send(EngineFailed(EngineDeadError.__name__, text))

    def _send(self, message: CoreOutbound) -> None:
        self._outbound.send(self._encoder.encode(message))


def read_config(fd: int) -> EngineConfig:
    """Reads the length-prefixed configuration.

    Raises:
        EOFError: the stream ends before.
        msgspec.MsgspecError: it is no EngineConfig.
    """
    # os.read and not sys.stdin: a buffered reader in use by a thread blocks the interpreter's end
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
    """Ends the process when a stream ends: as SIGTERM would, and by force if a step does not come back."""
    while os.read(fd, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)


def _is_at_end(fd: int) -> bool:
    """Whether a stream that nothing more is written to has ended: the parent is gone."""
    return bool(select.select([fd], [], [], 0)[0])


def _exit_on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    # no limit: dropping a message is never right, and waiting for a slow reader would stall all requests
    socket.set_hwm(0)
    socket.linger = _LINGER_MS
    socket.connect(address)
    return socket


def _start(fd: int) -> tuple[EngineCore | None, EngineReady | EngineFailed | None]:
    """Builds the engine core from the configuration on a stream; None with the reason if that fails.

    No reason if the parent is gone: nobody is there to be told, and nothing is wrong here.
    """
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
    # what is there now stays: no collection need look at it again
    gc.collect()
    gc.freeze()
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
    parser.add_argument("--input", required=True, metavar="ADDRESS", help="socket to take messages from")
    parser.add_argument("--output", required=True, metavar="ADDRESS", help="socket to send messages to")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    with zmq.Context() as context:
        inbound = _connect(context, zmq.PULL, args.input)
        outbound = _connect(context, zmq.PUSH, args.output)
        core: EngineCore | None = None
        try:
            core, greeting = _start(sys.stdin.fileno())
            if greeting is not None:
                outbound.send(msgspec.msgpack.encode(greeting))
            code = 1 if core is None else CoreLoop(core, inbound, outbound).run()
            if core is not None and code:
                core.note_failure("the engine core has failed")
            return code
        finally:
            # a second reason to end must not cut the ending short
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if core is not None:
                if _is_at_end(sys.stdin.fileno()):
                    core.note_failure("its server is gone")
                core.shutdown()
            inbound.close(linger=0)
            outbound.close(linger=_LINGER_MS)


if __name__ == "__main__":
    sys.exit(main())
