"""The engine-core process: its loop over real sockets, and the real process on a tiny checkpoint."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.core.proc import CoreLoop, read_config
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
    Shutdown,
    UtilityCall,
    UtilityResult,
)
from tests.core.memory_executor import assert_all_free, generate_alone, make_core, make_request
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config as make_model_config

TIMEOUT_MS = 60_000


class Peer:
    """The parent's end of both sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inbound: str, outbound: str) -> None:
        self._sender = context.socket(zmq.PUSH)
        self._sender.linger = 0
        self._sender.bind(inbound)
        self._receiver = context.socket(zmq.PULL)
        self._receiver.rcvtimeo = TIMEOUT_MS
        self._receiver.bind(outbound)
        self._decoder = msgspec.msgpack.Decoder(CoreOutbound)

    def send(self, message: CoreInbound) -> None:
        self._sender.send(msgspec.msgpack.encode(message))

    def send_bytes(self, frame: bytes) -> None:
        self._sender.send(frame)

    def receive(self) -> CoreOutbound:
        return self._decoder.decode(self._receiver.recv())

    def receive_end(self, request_id: str) -> tuple[list[int], EngineCoreOutput]:
        """All tokens of a request, and its last output; other requests' outputs are skipped."""
        tokens: list[int] = []
        while True:
            message = self.receive()
            assert isinstance(message, EngineCoreOutputs)
            for output in message.outputs:
                if output.request_id == request_id:
                    tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        return tokens, output

    def call(self, method: str, *args: object) -> UtilityResult:
        """Calls a utility; step outputs before the answer are skipped."""
        self.send(UtilityCall(5, method, list(args)))
        while True:
            message = self.receive()
            if isinstance(message, UtilityResult):
                assert message.call_id == 5
                return message

    def close(self) -> None:
        self._sender.close(linger=0)
        self._receiver.close(linger=0)


# ---- the loop ---------------------------------------------------------------------------------------------


class LoopThread:
    """A CoreLoop on the hash model, in a thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.core, self.executor = make_core(num_blocks=16, max_num_seqs=2)
        self.peer = Peer(context, "inproc://in", "inproc://out")
        self._inbound, self._outbound = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        self._inbound.connect("inproc://in")
        self._outbound.connect("inproc://out")
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.exit_code = CoreLoop(self.core, self._inbound, self._outbound).run()

    def join(self) -> int | None:
        """Waits until the loop has ended."""
        self._thread.join(TIMEOUT_MS / 1000)
        assert not self._thread.is_alive()
        return self.exit_code

    def close(self) -> None:
        for socket in (self._inbound, self._outbound):
            socket.close(linger=0)
        self.peer.close()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with zmq.Context() as context:
        thread = LoopThread(context)
        yield thread
        if thread.exit_code is None:
            thread.peer.send(Shutdown())
            thread.join()
        thread.close()


def test_request_in_tokens_out(loop: LoopThread) -> None:
    requests = [make_request(name, 5, max_tokens=6, seed=i) for i, name in enumerate("abc")]
    for request in requests:
        loop.peer.send(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    finished: set[str] = set()
    while len(finished) < 3:
        message = loop.peer.receive()
        assert isinstance(message, EngineCoreOutputs)
        assert message.stats is not None
        for output in message.outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                finished.add(output.request_id)
    for index, request in enumerate(requests):
        assert tokens[request.request_id] == generate_alone(request, index, 64)[0]
    loop.peer.send(Shutdown())
    assert loop.join() == 0
    assert_all_free(loop.core)


def test_abort_frees_blocks_while_the_loop_runs(loop: LoopThread) -> None:
    loop.peer.send(make_request("a", 5, max_tokens=59))
    loop.peer.send(AbortRequests(["a", "unknown"]))
    audit = loop.peer.call("audit").result
    assert (audit["num_free_blocks"], audit["num_running"], audit["violations"]) == (16, 0, [])


def test_bad_messages_do_not_end_the_loop(loop: LoopThread) -> None:
    loop.peer.send_bytes(b"\xc1 this is no msgpack")
    loop.peer.send_bytes(msgspec.msgpack.encode(["Nonsense", 1]))
    loop.peer.send_bytes(b"")
    assert loop.peer.call("stats").result["num_running"] == 0


def test_unreadable_request_is_answered(loop: LoopThread) -> None:
    loop.peer.send_bytes(msgspec.msgpack.encode(["EngineCoreRequest", "a", "no token ids"]))
    message = loop.peer.receive()
    assert isinstance(message, EngineCoreOutputs)
    assert (message.outputs[0].request_id, message.outputs[0].finish_reason) == ("a", FinishReason.ERROR)
    assert message.outputs[0].error is not None
    assert "Expected `array`" in message.outputs[0].error


def test_unreadable_call_is_answered(loop: LoopThread) -> None:
    loop.peer.send_bytes(msgspec.msgpack.encode(["UtilityCall", 5, 7, []]))
    message = loop.peer.receive()
    assert isinstance(message, UtilityResult)
    assert message.call_id == 5
    assert message.error is not None


def test_sequences_of_a_request(loop: LoopThread) -> None:
    """Each gets the tokens that it would get as a single request."""
    first = make_request("a", 5, max_tokens=6, seed=1)
    alone = [make_request(name, 5, max_tokens=6, seed=seed) for name, seed in (("b", 2), ("c", None))]
    for request in alone:
        request.prompt_token_ids = first.prompt_token_ids
    message = SequencesOfRequest(first, [(request.request_id, request.sampling_params.seed) for request in alone])
    assert message.requests()[1:] == [
        msgspec.structs.replace(request, parent_id="a", is_further=True) for request in alone
    ]
    loop.peer.send(message)
    tokens: dict[str, list[int]] = {name: [] for name in "abc"}
    finished = 0
    while finished < 3:
        outputs = loop.peer.receive()
        assert isinstance(outputs, EngineCoreOutputs)
        for output in outputs.outputs:
            tokens[output.request_id] += output.new_token_ids
            finished += output.finish_reason is not None
    assert tokens["a"] == generate_alone(first, 1, 64)[0]
    assert tokens["b"] == generate_alone(alone[0], 2, 64)[0]
    assert len(tokens["c"]) == 6


def test_unreadable_sequences_are_answered(loop: LoopThread) -> None:
    loop.peer.send_bytes(msgspec.msgpack.encode(["SequencesOfRequest", ["EngineCoreRequest", "a", 5], []]))
    message = loop.peer.receive()
    assert isinstance(message, EngineCoreOutputs)
    assert (message.outputs[0].request_id, message.outputs[0].finish_reason) == ("a", FinishReason.ERROR)


def test_requests_keep_running_while_many_messages_arrive(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages that had arrived were handled before the next step."""
    added: list[str] = []
    add = loop.core.add_request

    def add_slowly(request: EngineCoreRequest) -> None:
        added.append(request.request_id)
        time.sleep(0.005)
        add(request)

    monkeypatch.setattr(loop.core, "add_request", add_slowly)
    loop.peer.send(make_request("a", 5, max_tokens=5))
    for number in range(300):
        loop.peer.send(make_request(f"b{number}", 5, max_tokens=20))
    loop.peer.receive_end("a")
    assert len(added) < 150
    loop.peer.send(AbortRequests([f"b{number}" for number in range(300)]))


def test_duplicate_request_does_not_disturb_the_first(loop: LoopThread) -> None:
    request = make_request("a", 5, max_tokens=50)
    loop.peer.send(request)
    loop.peer.send(request)
    tokens, _ = loop.peer.receive_end("a")
    assert tokens == generate_alone(request, 1, 64)[0]


def test_failing_utility_is_answered(loop: LoopThread) -> None:
    assert "unknown utility 'nothing'" in (loop.peer.call("nothing").error or "")
    assert "TypeError" in (loop.peer.call("audit", 1, 2).error or "")
    assert loop.peer.call("check_health").error is None


def test_a_failing_step_ends_all_requests_and_the_loop(loop: LoopThread) -> None:
    loop.executor.fail_next = MemoryError("no room")
    for name in "abc":
        loop.peer.send(make_request(name, 5))
    seen = {}
    message = loop.peer.receive()
    while isinstance(message, EngineCoreOutputs):
        seen |= {output.request_id: (output.finish_reason, output.error) for output in message.outputs}
        message = loop.peer.receive()
    text = "The engine core failed: MemoryError: no room"
    # the parent answers requests that arrive after the failure
    assert set(seen.values()) == {(FinishReason.ERROR, text)}
    assert "a" in seen
    assert message == EngineFailed("EngineDeadError", text)
    assert loop.join() == 1


# ---- the process ------------------------------------------------------------------------------------------


class Process:
    """The real process and the parent's ends of its sockets and stdin."""

    def __init__(self, directory: pathlib.Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        addresses = [f"ipc://{directory}/{name}" for name in ("in", "out")]
        self.peer = Peer(context, *addresses)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ascend_vllm.core.proc", "--input", addresses[0], "--output", addresses[1]],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def feed(self, payload: bytes) -> None:
        """Writes to its stdin, which stays open."""
        assert self.process.stdin is not None
        self.process.stdin.write(payload)
        self.process.stdin.flush()

    def configure(self, config: EngineConfig) -> None:
        payload = msgspec.msgpack.encode(config)
        self.feed(len(payload).to_bytes(4, "big") + payload)

    def wait(self) -> tuple[int, str]:
        """Its exit code and log."""
        assert self.process.stderr is not None
        log = self.process.stderr.read().decode()
        return self.process.wait(TIMEOUT_MS / 1000), log

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.peer.close()


@pytest.fixture
def process(tmp_path: pathlib.Path) -> Iterator[Process]:
    with zmq.Context() as context:
        process = Process(tmp_path, context)
        yield process
        process.close()


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    return make_model_config(tiny_model("qwen2-tied"))


def test_life_of_a_process(process: Process, config: EngineConfig) -> None:
    process.configure(config)
    ready = process.peer.receive()
    assert isinstance(ready, EngineReady)
    assert (ready.num_gpu_blocks, ready.block_size) == (config.cache.num_gpu_blocks_override, config.cache.block_size)
    assert ready.max_model_len == config.scheduler.max_model_len
    assert 0 < ready.load_time_s < 60
    process.process.send_signal(signal.SIGINT)
    process.peer.send_bytes(b"\xff")
    for name in "ab":
        process.peer.send(make_request(name, [5, 6, 7], max_tokens=20, temperature=0.0))
    tokens, last = process.peer.receive_end("b")
    assert (len(tokens), last.finish_reason) == (20, FinishReason.LENGTH)
    audit = process.peer.call("audit").result
    assert audit["num_free_blocks"] == audit["num_blocks"] == ready.num_gpu_blocks
    assert audit["violations"] == []
    process.peer.send(Shutdown())
    code, log = process.wait()
    assert code == 0
    assert "Traceback" not in log


@pytest.mark.parametrize("how", ["parent dies", "SIGTERM"])
def test_process_ends_in_the_middle_of_work(process: Process, config: EngineConfig, how: str) -> None:
    process.configure(config)
    assert isinstance(process.peer.receive(), EngineReady)
    process.peer.send(make_request("a", [5, 6, 7], max_tokens=390))
    assert isinstance(process.peer.receive(), EngineCoreOutputs)
    if how == "SIGTERM":
        process.process.terminate()
    else:
        assert process.process.stdin is not None
        process.process.stdin.close()
    code, log = process.wait()
    assert code == 0
    assert "Traceback" not in log


def test_model_that_cannot_be_served(process: Process, config: EngineConfig, tmp_path: pathlib.Path) -> None:
    process.configure(
        msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=str(tmp_path / "none")))
    )
    failed = process.peer.receive()
    assert isinstance(failed, EngineFailed)
    assert failed.error_class == "ModelLoadError"
    assert str(tmp_path / "none") in failed.message
    code, log = process.wait()
    assert code == 1
    assert "Traceback" not in log


# as above, of another class; test_executor.py has the check itself
@pytest.mark.exhaustive
def test_cache_too_small_for_the_model(process: Process, config: EngineConfig) -> None:
    process.configure(
        msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, num_gpu_blocks_override=2))
    )
    failed = process.peer.receive()
    assert isinstance(failed, EngineFailed)
    assert failed.error_class == "ConfigError"
    assert "The model's max seq len (400) is larger than" in failed.message
    assert process.wait()[0] == 1


def test_stdin_without_a_configuration(process: Process) -> None:
    process.feed((10).to_bytes(4, "big") + b"abc")
    assert process.process.stdin is not None
    process.process.stdin.close()
    # the parent has died: a line in the log is enough
    code, log = process.wait()
    assert code == 1
    assert "The engine core does not start: the configuration on stdin ends early" in log
    assert "Traceback" not in log


def test_configuration_survives_serialisation(config: EngineConfig, tmp_path: pathlib.Path) -> None:
    payload = msgspec.msgpack.encode(config)
    path = tmp_path / "config"
    path.write_bytes(len(payload).to_bytes(4, "big") + payload)
    with path.open("rb") as file:
        assert read_config(file.fileno()) == config
