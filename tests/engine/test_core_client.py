"""The engine-core process: start, failures, shutdown; no process or file may be left behind."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import psutil
import pytest
import zmq

from ascend_vllm import envs
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.engine import core_client, core_process
from ascend_vllm.engine.core_client import CoreClient
from ascend_vllm.engine.core_process import CoreProcess
from ascend_vllm.errors import AscendVllmError, ConfigError, EngineDeadError, ModelLoadError
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreOutputs, EngineCoreRequest
from tests.engine.engine_for_tests import make_config, stop_and_play_ready
from tests.tiny_models import tiny_model


def tiny_config(model: str = "qwen2-tied") -> EngineConfig:
    return EngineArgs(model=tiny_model(model), max_model_len=128, num_gpu_blocks_override=32).create_engine_config()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    # the package's logger does not propagate
    logging.getLogger("ascend_vllm").addHandler(caplog.handler)
    yield caplog
    logging.getLogger("ascend_vllm").removeHandler(caplog.handler)


def ignore(*_: object) -> Callable[[], None]:
    """For callbacks that a test ignores."""
    return lambda: None


def listen(client: CoreClient) -> None:
    """Starts the output thread of a client whose core the test plays."""
    client._loop = asyncio.get_running_loop()
    (core,) = client._cores
    core.listen(client._loop, None, ignore)
    core.ready.set_result(None)


@contextlib.contextmanager
def played_core(client: CoreClient) -> Iterator[zmq.Socket[bytes]]:
    """A socket to send a core's messages."""
    with client._cores[0]._context.socket(zmq.PUSH) as push:
        push.connect(client._cores[0].process.outbound)
        yield push


@contextlib.asynccontextmanager
async def stopped_core(client: CoreClient) -> AsyncIterator[None]:
    """Within, the client is ready and its core's process, which has never run, is stopped."""
    client.start()
    with played_core(client) as outbound, client._cores[0]._context.socket(zmq.PULL) as inbound:
        stop_and_play_ready(client, outbound, inbound)
        await client.ready()
        yield


def threads_of_outputs() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine-core-outputs"]


def socket_directory(client: CoreClient) -> pathlib.Path:
    return pathlib.Path(client._cores[0].process.inbound.removeprefix("ipc://")).parent


def assert_gone(pid: int) -> None:
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_core_starts_answers_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # only a core that does not end by itself would need all of it
    monkeypatch.setattr(core_client, "_SHUTDOWN_GRACE_S", 60.0)
    deaths: list[Exception] = []
    client = CoreClient(tiny_config(), ignore, deaths.append)
    client.start()
    try:
        (ready,), (again,) = await asyncio.gather(client.ready(), client.ready())
        assert ready == again
        assert ready.num_gpu_blocks == 32
        # from now on a killed process leaves no files behind
        assert not socket_directory(client).exists()
        audits = await asyncio.gather(*(client.call_utility("audit") for _ in range(3)))
        assert all(audit["num_free_blocks"] == 32 for audit in audits)
        with pytest.raises(AscendVllmError, match="unknown utility 'explode'"):
            await client.call_utility("explode")
        pid = client.pids[0]
        start = time.monotonic()
    finally:
        client.shutdown()
        client.shutdown()
    assert time.monotonic() - start < 60
    assert_gone(pid)
    assert not socket_directory(client).exists()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await client.call_utility("audit")
    await asyncio.sleep(0.4)  # longer than a death would take to be told
    assert deaths == []


async def test_clients_may_come_and_go_in_one_event_loop() -> None:
    for _ in range(3):
        received: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        client = CoreClient(
            make_config(), lambda outputs, _, done=received: functools.partial(done.set_result, outputs), ignore
        )
        try:
            listen(client)
            with played_core(client) as core:
                core.send(msgspec.msgpack.encode(EngineCoreOutputs([])))
                await asyncio.wait_for(received, 30)
        finally:
            client.shutdown()
    assert threads_of_outputs() == []


async def test_a_killed_core_is_noticed() -> None:
    dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
    client = CoreClient(tiny_config(), ignore, dead.set_result)
    try:
        # stopped, so that the call cannot be answered first
        async with stopped_core(client):
            call = asyncio.ensure_future(client.call_utility("audit"))
            await asyncio.sleep(0)
            os.kill(client.pids[0], signal.SIGKILL)
            error = await asyncio.wait_for(dead, 30)
        assert "was killed by signal 9" in str(error)
        with pytest.raises(EngineDeadError, match="was killed by signal 9"):
            await call
        with pytest.raises(EngineDeadError):
            await client.call_utility("audit")
        client.abort_requests(["x"])  # harmless
    finally:
        client.shutdown()


async def test_a_core_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "0.4")
    dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
    client = CoreClient(tiny_config(), ignore, dead.set_result)
    try:
        async with stopped_core(client):
            start = time.monotonic()
            client.add_requests([EngineCoreRequest("r", [1, 2, 3], SamplingParams(max_tokens=4), None, start)])
            error = await asyncio.wait_for(dead, 30)
            assert time.monotonic() - start >= 0.4
        assert "VLLM_ENGINE_ITERATION_TIMEOUT_S" in str(error) and "0.4 s" in str(error)
        assert client.error is error
        with pytest.raises(EngineDeadError, match="VLLM_ENGINE_ITERATION_TIMEOUT_S"):
            client.add_requests([EngineCoreRequest("s", [1], SamplingParams(), None, start)])
        # a stopped process does not handle SIGTERM; it is killed even if the client is not shut down
        async with asyncio.timeout(30):
            while client._cores[0].process.exit_code is None:
                await asyncio.sleep(0.01)
        assert client._cores[0].process.exit_code == -signal.SIGKILL
    finally:
        client.shutdown()
    assert "Engine iteration timed out. This should never happen!" in log.text
    assert "set VLLM_ENGINE_ITERATION_TIMEOUT_S to more seconds" in log.text


async def test_an_idle_core_may_be_silent_and_one_that_is_called_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", "0.4")
    # the core is stopped in the end, and a stopped process does not handle SIGTERM
    monkeypatch.setattr(core_process, "_TERMINATE_S", 0.1)
    client = CoreClient(tiny_config(), ignore, ignore)
    client.start()
    try:
        await client.ready()
        os.kill(client.pids[0], signal.SIGSTOP)
        client.add_requests([EngineCoreRequest("r", [1, 2, 3], SamplingParams(max_tokens=4), None, 0.0)])
        client.abort_requests(["r"])  # the request's client has gone
        # much longer than the limit, in which nothing may happen
        await asyncio.sleep(0.8)
        assert client.error is None
        # the watchdog runs until a pending call is answered, even if all requests have ended
        call = asyncio.create_task(client.call_utility("check_health"))
        await asyncio.sleep(0)
        client.add_requests([EngineCoreRequest("s", [1, 2, 3], SamplingParams(max_tokens=4), None, 0.0)])
        client.abort_requests(["s"])
        assert client._cores[0].watchdog._timer is not None
        # from now on the core may be slow
        tick_s, client._cores[0].watchdog._tick_s = client._cores[0].watchdog._tick_s, 60.0
        os.kill(client.pids[0], signal.SIGCONT)
        assert await call is None
        assert client._cores[0].watchdog._timer is None
        # a call alone has the limit too
        client._cores[0].watchdog._tick_s = tick_s
        os.kill(client.pids[0], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="VLLM_ENGINE_ITERATION_TIMEOUT_S"):
            await asyncio.wait_for(client.call_utility("audit"), 30)
    finally:
        client.shutdown()


async def test_messages_that_wait_are_news() -> None:
    """A core whose messages are processed slowly has sent something, so it does not time out."""
    goes_on, taken = threading.Event(), threading.Event()

    def take(*_: object) -> Callable[[], None]:
        taken.set()
        goes_on.wait(30)
        return lambda: None

    client = CoreClient(make_config(), take, ignore)
    try:
        listen(client)
        assert not client._cores[0].has_activity()
        with played_core(client) as core:
            core.send(msgspec.msgpack.encode(EngineCoreOutputs([])))
            # the event loop does not run: it is the thread that reads
            assert taken.wait(30)
            assert client._cores[0].has_activity() and client._cores[0].has_activity()
            goes_on.set()
            async with asyncio.timeout(30):
                while client._cores[0].receiver.is_busy:
                    await asyncio.sleep(0.001)
            assert not client._cores[0].has_activity()
    finally:
        goes_on.set()
        client.shutdown()


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", value)
    with pytest.raises(ConfigError, match=f"VLLM_ENGINE_ITERATION_TIMEOUT_S must be .* got '{value}'"):
        CoreClient(make_config(), ignore, ignore)


@pytest.mark.parametrize(("value", "seconds"), [("", 45.0), ("6000", 6000.0), ("1.5", 1.5), ("0", None)])
def test_limits(value: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_ITERATION_TIMEOUT_S", value)
    assert envs.engine_iteration_timeout_s(45.0) == seconds


@pytest.mark.parametrize(
    ("file", "contents", "error"),
    [("model.safetensors", b"short", ModelLoadError), (None, b"", ConfigError)],
)
async def test_failures_to_start_keep_their_kind_and_words(
    tmp_path: pathlib.Path, file: str | None, contents: bytes, error: type[Exception]
) -> None:
    config = tiny_config()
    if file is not None:
        for source in pathlib.Path(config.model.model).iterdir():
            (tmp_path / source.name).write_bytes(source.read_bytes())
        (tmp_path / file).write_bytes(contents)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=str(tmp_path)))
    else:  # fewer blocks than one sequence needs
        config = msgspec.structs.replace(
            config, cache=msgspec.structs.replace(config.cache, num_gpu_blocks_override=1)
        )
    client = CoreClient(config, ignore, ignore)
    client.start()
    try:
        with pytest.raises(error) as raised:
            await asyncio.wait_for(client.ready(), 60)
        assert (file or "KV cache") in str(raised.value)
    finally:
        client.shutdown()
    assert_gone(client.pids[0])
    assert not socket_directory(client).exists()


async def test_a_core_that_dies_while_it_starts() -> None:
    client = CoreClient(tiny_config(), ignore, ignore)
    client.start()
    try:
        os.kill(client.pids[0], signal.SIGKILL)
        while client._cores[0].process.exit_code is None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="was killed by signal 9"):
            await asyncio.wait_for(client.ready(), 30)
    finally:
        client.shutdown()


async def test_shutdown_while_the_core_starts_is_quick() -> None:
    client = CoreClient(tiny_config(), ignore, ignore)
    client.start()
    waiting = asyncio.ensure_future(client.ready())
    await asyncio.sleep(0.1)
    client.shutdown()
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await waiting
    assert_gone(client.pids[0])
    assert not socket_directory(client).exists()


@pytest.mark.parametrize("where", ["thread", "loop"])
async def test_outputs_that_cannot_be_processed_end_the_engine(where: str) -> None:
    """A bug in this process must fail requests, not let them hang."""

    def explode(*_: EngineCoreOutputs) -> Callable[[], None]:
        raise RuntimeError("boom")

    on_outputs = explode if where == "thread" else lambda *_: explode
    dead: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
    client = CoreClient(make_config(), on_outputs, dead.set_result)
    try:
        listen(client)
        with played_core(client) as core:
            core.send(msgspec.msgpack.encode(EngineCoreOutputs([])))
            assert "boom" in str(await asyncio.wait_for(dead, 30))
    finally:
        client.shutdown()


def test_a_core_ends_with_its_parent() -> None:
    """However the parent dies."""
    program = textwrap.dedent(
        """
        import sys, time
        from ascend_vllm.engine.core_process import CoreProcess
        from tests.engine.engine_for_tests import make_config
        process = CoreProcess(make_config())
        process.start(lambda code: None)
        print(process.pid, process.inbound, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid, address = parent.stdout.readline().split()
        core = psutil.Process(int(pid))
        parent.kill()
    try:
        core.wait(30)
    finally:
        directory = pathlib.Path(address.removeprefix("ipc://")).parent
        assert directory.exists()  # SIGKILL leaves no time to tidy up; the test does
        directory.rmdir()


def test_a_forgotten_core_ends_with_the_interpreter() -> None:
    program = textwrap.dedent(
        """
        from ascend_vllm.engine.core_process import CoreProcess
        from tests.engine.engine_for_tests import make_config
        process = CoreProcess(make_config())
        process.start(lambda code: None)
        print(process.pid, process.inbound, flush=True)
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    pid, address = result.stdout.split()
    assert_gone(int(pid))
    assert not pathlib.Path(address.removeprefix("ipc://")).parent.exists()


def test_a_process_never_started_leaves_nothing() -> None:
    process = CoreProcess(make_config())
    directory = pathlib.Path(process.inbound.removeprefix("ipc://")).parent
    assert directory.is_dir()
    assert directory.stat().st_mode & 0o777 == 0o700
    process.stop(1.0)
    assert not directory.exists()


async def test_cores_may_be_launched_before_there_is_a_client() -> None:
    """Their first messages wait for its sockets."""
    config = tiny_config()
    (process,) = core_process.make_core_processes(config)
    process.launch()
    client = CoreClient(config, ignore, ignore, processes=[process])
    client.start()
    try:
        assert client.pids == [process.pid]
        (size,) = await asyncio.wait_for(client.ready(), 60)
        assert size.num_gpu_blocks > 0
    finally:
        client.shutdown()


def test_the_end_of_a_launched_core_is_told_to_whoever_asks_later() -> None:
    process = CoreProcess(make_config())
    process.launch()
    try:
        process.kill()
        assert process._exit.result(30) == -signal.SIGKILL
        codes: list[int] = []
        process.start(codes.append)
        assert codes == [-signal.SIGKILL] == [process.exit_code]
    finally:
        process.stop(0.0)
