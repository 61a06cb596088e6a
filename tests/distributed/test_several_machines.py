"""Workers on several machines without Ray: nodes that connect, are refused, die, or lose the network.

Machines are network namespaces where what is between them matters, and else processes that talk through the loopback
interface: to each other they look the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest

import ascend_vllm
from ascend_vllm import LLM
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.node import NodeStart, model_digest
from ascend_vllm.errors import ConfigError, EngineDeadError, RequestError
from ascend_vllm.executor.base import Executor, create_executor
from ascend_vllm.executor.nodes.link import Hello
from tests.distributed import worker_functions
from tests.distributed.conftest import OPTIONS, PROMPTS, generate
from tests.distributed.test_kill_matrix import shared_memory_of
from tests.distributed.two_hosts import Host, NoNamespacesError, two_hosts
from tests.raw_requests import post_raw, read_events, read_rest
from tests.server import ROOT, Server, free_port, is_alive, metric, wait_until
from tests.worker.worker_driver import make_config

SERVE = "ascend_vllm.entrypoints.cli serve"
# upper limits; events come within seconds
TIMEOUT_S = 120.0
# of every open stream, after a death
DEATH_S = 5.0
# without a word from the other machine
SILENCE_S = 2.0
ENV = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "ASCEND_VLLM_NODE_TIMEOUT_S": str(SILENCE_S),
    "ASCEND_VLLM_NODE_WAIT_S": str(TIMEOUT_S),
    "ASCEND_VLLM_NODE_SECRET": "a secret of the nodes of a test",
}


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENV.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def texts(alone: LLM) -> list[str]:
    """The continuations of a single worker."""
    return [output.outputs[0].text for output in generate(alone)]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as made:
            yield made
    except NoNamespacesError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


class Pair:
    """Servers of two nodes, the second without HTTP."""

    def __init__(self, model: str, flags: list[str], address: str, inside: tuple[Any, Any]) -> None:
        port = str(free_port())
        flags = [
            model,
            "--nnodes",
            "2",
            "--master-addr",
            address,
            "--master-port",
            port,
            "--dtype",
            "float32",
            *flags,
        ]
        flags += ["--kv-cache-memory-bytes", "256M", "--max-model-len", "32768"]
        flags += ["--served-model-name", "tiny"]
        env = {"OMP_NUM_THREADS": "1"}
        with inside[1]():
            self.second = Server(SERVE, [*flags, "--node-rank", "1", "--headless"], env)
        with inside[0]():
            self.first = Server(SERVE, [*flags, "--node-rank", "0"], env)

    def worker(self, server: Server) -> psutil.Process:
        """The only worker on a node."""
        (found,) = server.find("worker_process")
        return found

    def assert_gone(self, codes: tuple[int, int]) -> None:
        """Checks that both programs end with these exit codes and leave nothing behind."""
        assert self.first.wait_exit() == codes[0], self.first.log
        assert self.second.wait_exit() == codes[1], self.second.log
        assert self.first.orphans() == []
        assert self.second.orphans() == []

    def close(self) -> None:
        self.first.close()
        self.second.close()


def _body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}


def _complete(http: httpx.Client) -> list[str]:
    answers = [http.post("/v1/completions", json=_body(prompt)).json() for prompt in PROMPTS]
    return [answer["choices"][0]["text"] for answer in answers]


def _error_of(events: bytes) -> str:
    *_, error, done = [line for line in events.decode().splitlines() if line.startswith("data: ")]
    assert done == "data: [DONE]"
    message = json.loads(error.removeprefix("data: "))["error"]
    assert (message["code"], message["type"]) == (500, "InternalServerError")
    return str(message["message"])


def test_two_hosts_whose_wire_is_cut(odd_model: str, texts: list[str], hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    pair = Pair(odd_model, ["--tensor-parallel-size", "2"], here.address, (here.inside, there.inside))
    try:
        with here.inside():
            pair.first.wait_ready(TIMEOUT_S)
            with httpx.Client(base_url=pair.first.url, timeout=TIMEOUT_S) as http:
                assert _complete(http) == texts
                streaming = post_raw(pair.first, "/v1/completions", _body("Hello", max_tokens=30000, stream=True))
                received = read_events(streaming, 3)
        workers = [pair.worker(pair.first), pair.worker(pair.second)]
        # nowhere but at the addresses that were given
        for worker, host in zip(workers, hosts, strict=True):
            assert {address for address, _ in _listeners(worker)} == {host.address}
        processes = [psutil.Process(pair.second.process.pid), *pair.first.children(), *pair.second.children()]
        memory = set().union(*map(shared_memory_of, processes))
        start = time.monotonic()
        there.cut()
        received += read_rest(streaming)
        assert time.monotonic() - start < SILENCE_S + DEATH_S
        assert f"node 1 ({there.address}) is gone: " in _error_of(received)
        pair.assert_gone((1, 1))
        assert not any(map(is_alive, workers))
        assert wait_until(lambda: not any(path.exists() for path in memory))
        assert f"Node 0 ({here.address}) has ended: " in pair.second.log
    finally:
        pair.close()


def test_stages_on_two_machines_die_with_a_worker(
    odd_model: str, texts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Their secret is in a file, which takes precedence over the variable."""
    secret = tmp_path / "secret"
    secret.write_text("another secret than that of the variable\n")
    secret.chmod(0o600)
    monkeypatch.setenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1")
    inside = (contextlib.nullcontext, contextlib.nullcontext)
    flags = ["--pipeline-parallel-size", "2", "--node-secret-file", str(secret)]
    pair = Pair(odd_model, flags, "127.0.0.1", inside)
    try:
        pair.first.wait_ready(TIMEOUT_S)
        with httpx.Client(base_url=pair.first.url, timeout=TIMEOUT_S) as http:
            assert _complete(http) == texts
            streaming = post_raw(pair.first, "/v1/completions", _body("Hello", max_tokens=30000, stream=True))
            received = read_events(streaming, 3)
            assert wait_until(lambda: metric(http, "num_requests_running") == 1)
            victim = pair.worker(pair.second)
            pair.first.children()
            start = time.monotonic()
            victim.kill()
            # the server stays, and with it the connection
            while b"[DONE]" not in received:
                received += streaming.recv(65536)
            assert time.monotonic() - start < DEATH_S
            streaming.close()
            assert f"worker 1 (process {victim.pid}) was killed by signal 9 on node 1" in _error_of(received)
            # the core's last message may still be on its way
            assert wait_until(lambda: http.get("/health").status_code == 503)
        assert pair.second.wait_exit() == 1, pair.second.log
        pair.first.process.send_signal(signal.SIGTERM)
        pair.assert_gone((1, 1))
        assert "was killed by signal 9" in pair.second.log
    finally:
        pair.close()


# ---- one node's process and an engine of this test's -------------------------------------------------------


def _config(directory: str, **options: object) -> EngineConfig:
    parallel = {"tensor_parallel_size": 2, "nnodes": 2, "master_port": free_port()}
    return make_config(directory, distributed_executor_backend="mp", **parallel, **options)


@contextlib.contextmanager
def _second_node(
    config: EngineConfig, log: pathlib.Path, secret_file: pathlib.Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of node 1."""
    own = msgspec.structs.replace(config, parallel=msgspec.structs.replace(config.parallel, node_rank=1))
    start = NodeStart(1, 2, "127.0.0.1", config.parallel.master_port, 2, 1, secret_file and str(secret_file), own)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ascend_vllm.executor.nodes.agent"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=ROOT,
        )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(start))
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()


def _listeners(worker: psutil.Process) -> list[tuple[str, int]]:
    """Addresses and ports at which a worker listens, or seems to."""
    # psutil knows those of this test's network namespace only
    process = pathlib.Path(f"/proc/{worker.pid}")
    own = {str(link.readlink()) for link in (process / "fd").iterdir()}
    found = []
    for line in (process / "net" / "tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in own:
            address, port = local.split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    assert found
    return found


def test_an_engine_ends_with_another_node(odd_model: str, tmp_path: pathlib.Path) -> None:
    config = _config(odd_model)
    with _second_node(config, tmp_path / "log") as node:
        executor = create_executor(config)
        try:
            workers = [psutil.Process(pid) for pid in executor.collective_rpc(worker_functions.process_id)]
            assert workers[1].ppid() == node.pid
            # who connected there as often as a process may have files open ended the worker
            for place in itertools.chain(*map(_listeners, workers)):
                assert place[0] == "127.0.0.1"
                with pytest.raises(TimeoutError):
                    socket.create_connection(place, 0.2)
            # more than rings and sockets hold
            value = bytes(range(256)) * (64 << 10)
            assert executor.collective_rpc(worker_functions.echo, (value,)) == [value, value]
            with pytest.raises(ValueError, match="the second one does not"):
                executor.collective_rpc(worker_functions.fail)
            executor.check_health()
            node.kill()
            assert executor.death_descriptor is not None
            assert select.select([executor.death_descriptor], [], [], TIMEOUT_S)[0]
            with pytest.raises(EngineDeadError, match=r"node 1 \(127.0.0.1\) is gone: "):
                executor.collective_rpc(worker_functions.process_id)
        finally:
            executor.shutdown()
        assert wait_until(lambda: not any(map(is_alive, workers)))


def _is_open(place: tuple[str, int]) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(place) == 0


def test_node_zero_waits_for_the_true_node(odd_model: str, tmp_path: pathlib.Path) -> None:
    """Neither a client that sends all public facts, nor a node with another secret, keeps the engine from serving."""
    config, files = _config(odd_model), {name: tmp_path / name for name in ("wrong", "right")}
    for file, text in zip(files.values(), ("a secret of other nodes", ENV["ASCEND_VLLM_NODE_SECRET"]), strict=True):
        file.write_text(text)
        file.chmod(0o600)
    made: list[Executor] = []
    thread = threading.Thread(target=lambda: made.append(create_executor(config)))
    thread.start()
    place = ("127.0.0.1", config.parallel.master_port)
    assert wait_until(lambda: _is_open(place))
    hello = Hello(ascend_vllm.__version__, 1, 2, 2, 1, "cpu", model_digest(odd_model))
    for version in (ascend_vllm.__version__, "0.0.0"):
        with socket.create_connection(place, TIMEOUT_S) as impostor:
            impostor.sendall(b"\xa5" + msgspec.msgpack.encode(msgspec.structs.replace(hello, version=version)))
            # closed, and nothing was answered but zmq's greeting
            with contextlib.suppress(ConnectionError):
                while data := impostor.recv(100):
                    assert len(data) <= 64
    with _second_node(config, tmp_path / "log", files["wrong"]) as node:
        assert node.wait(TIMEOUT_S) == 2
    assert "Node 0 (127.0.0.1) refuses this node: it has another secret" in (tmp_path / "log").read_text()
    assert thread.is_alive()
    with _second_node(config, tmp_path / "log", files["right"]) as node:
        thread.join(TIMEOUT_S)
        (executor,) = made
        with pytest.raises(RequestError, match="workers have no method 'absent'"):
            executor.collective_rpc("absent")
        # what is no plain value stays where it is, and nothing ends
        for method in (lambda _worker: None, worker_functions.unsendable):
            with pytest.raises(RequestError, match="cannot be sent to"):
                executor.collective_rpc(method)
        with pytest.raises(RequestError, match="cannot be sent to"):
            executor.collective_rpc(worker_functions.echo, (object(),))
        value = [None, True, 1.5, "text", (1, [2, {"a": b"b"}]), {3: "x"}]
        assert executor.collective_rpc(worker_functions.echo, (value,)) == [value, value]
        (first, second) = executor.collective_rpc(worker_functions.echo, kwargs={"value": np.arange(6).reshape(2, 3)})
        assert first.tolist() == second.tolist() == [[0, 1, 2], [3, 4, 5]]
        executor.shutdown()
        assert node.wait(TIMEOUT_S) == 1


def test_a_node_ends_with_an_engine_that_cannot_start(odd_model: str, tmp_path: pathlib.Path) -> None:
    config, log = _config(odd_model, num_gpu_blocks_override=1), tmp_path / "log"
    with _second_node(config, log) as node:
        executor = create_executor(config)
        with pytest.raises(ConfigError, match="maximum number of tokens that can be stored in KV cache"):
            executor.initialize()
        executor.shutdown()
        assert node.wait(TIMEOUT_S) == 1
    assert "Node 0 (127.0.0.1) has ended: it has ended before the engine was ready" in log.read_text()


def test_a_program_is_node_zero(odd_model: str, texts: list[str], tmp_path: pathlib.Path) -> None:
    """When it ends, so does the other node, without errors."""
    config, log = _config(odd_model), tmp_path / "log"
    with _second_node(config, log) as node:
        llm = LLM(odd_model, tensor_parallel_size=2, nnodes=2, master_port=config.parallel.master_port, **OPTIONS)
        outputs = generate(llm)
        children = psutil.Process(node.pid).children()
        llm.shutdown()
        assert [output.outputs[0].text for output in outputs] == texts
        assert node.wait(TIMEOUT_S) == 0, log.read_text()
        assert len(children) == 1
        assert wait_until(lambda: not any(map(is_alive, children)))
    assert "ERROR" not in log.read_text()


NODE_ZERO = """
import asyncio, json, sys
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.engine.async_llm import AsyncLLM

async def main():
    engine = AsyncLLM.from_engine_args(EngineArgs(**json.loads(sys.argv[1])))
    await engine.ready()
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_node_ends_with_a_node_zero_that_is_killed(odd_model: str, tmp_path: pathlib.Path) -> None:
    """Its engine core notices, and logs the reason."""
    config, log = _config(odd_model), tmp_path / "log"
    args = {"model": odd_model, "nnodes": 2, "tensor_parallel_size": 2, "master_port": config.parallel.master_port}
    with _second_node(config, log) as node:
        leader = subprocess.Popen(
            [sys.executable, "-c", NODE_ZERO, json.dumps(args | OPTIONS)], stdout=subprocess.PIPE, cwd=ROOT
        )
        try:
            assert leader.stdout is not None
            assert leader.stdout.readline() == b"ready\n"
            family = psutil.Process(leader.pid).children(recursive=True) + psutil.Process(node.pid).children()
            # an engine core, and a worker on each side
            assert len(family) == 3
        finally:
            leader.kill()
            leader.communicate()
        assert node.wait(TIMEOUT_S) == 1
        assert wait_until(lambda: not any(map(is_alive, family)))
    assert "Node 0 (127.0.0.1) has ended: its server is gone" in log.read_text()
