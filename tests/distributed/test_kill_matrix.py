"""If any process of a server dies or hangs, all open answers end with an error, and the server exits without remains.

What is killed (a worker of each rank, an engine core), how workers are reached, and whether anything is computed at
that moment, all with all, takes most of an hour. The cells of `USUAL` have a worker of either stage, a core, both
ways to reach workers and all kinds of work; `--all` adds those of `MORE`, and `--all-kills` runs every cell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from ascend_vllm import LLM
from ascend_vllm.platforms.host import usable_cores
from tests.distributed.conftest import GREEDY, PROMPTS, generate, ids_of
from tests.raw_requests import post_raw, read_events, read_rest
from tests.server import GENERATE_SERVER, OPENAI_SERVER, Server, command_of, is_alive, wait_until

pytestmark = pytest.mark.slow

# guards: what is waited for comes in seconds
TIMEOUT_S = 180.0
# from a death to the end of every open answer
DEATH_S = 5.0
ENV = {"OMP_NUM_THREADS": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
ITERATION_TIMEOUT_S = 3.0
FLAGS = ["--dtype", "float32", "--max-model-len", "32768", "--kv-cache-memory-bytes", "64M", "--swap-space", "0"]
FLAGS += ["--max-num-seqs", "8", "--max-num-batched-tokens=64", "--enable-prefix-caching", "--enable-chunked-prefill"]
# tokens that no machine makes while a test looks on
ENDLESS = {"max_tokens": 30000, "temperature": 0, "ignore_eos": True}
USAGE = {"include_usage": True}
MESSAGES = [{"role": "user", "content": "Hello"}]
MANY_STEPS = ("--num-scheduler-steps", "3")
# Ray gives away as many places as there are cores
RAY_SIZE = min(2, usable_cores())
RAY_FLAGS = ("--distributed-executor-backend", "ray")
LAYOUTS = {
    "tp2": ("-tp", "2", *MANY_STEPS),
    "pp2": ("-pp", "2"),
    "tp2-pp2": ("-tp", "2", "-pp", "2"),
    "dp2": ("-dp", "2", *MANY_STEPS),
    "dp2-tp2": ("-dp", "2", "-tp", "2", *MANY_STEPS),
    "ray-tp2": ("-tp", str(RAY_SIZE), *RAY_FLAGS, *MANY_STEPS),
    "ray-pp2": ("-pp", str(RAY_SIZE), *RAY_FLAGS),
}
RANKS = {"tp2": 2, "pp2": 2, "tp2-pp2": 4, "dp2-tp2": 4, "ray-tp2": RAY_SIZE, "ray-pp2": RAY_SIZE}
# what the agents of Ray call themselves, which hold nothing and look for their cluster for another minute
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One death.

    Attributes:
        layout: a name of `LAYOUTS`.
        kind: "rank" or "core".
        number: of the rank or the core; ranks of several engines are counted through.
        work: what is asked of the server at that moment: "idle", "openai" or "generate".
        is_stopped: the process is not killed, but never does anything again.
    """

    layout: str
    kind: str
    number: int
    work: str
    is_stopped: bool = False

    def __str__(self) -> str:
        return f"{self.layout}-{self.kind}{self.number}-{self.work}" + ("-stopped" if self.is_stopped else "")

    @property
    def is_ray(self) -> bool:
        return self.layout.startswith("ray")


def all_cells() -> Iterator[Cell]:
    """Every layout with every victim, idle and at work."""
    for layout in LAYOUTS:
        victims = [("rank", number) for number in range(RANKS.get(layout, 0))]
        victims += [("core", number) for number in range(2 if layout.startswith("dp2") else 1)]
        for kind, number in victims:
            for work in ("idle", "openai", "generate"):
                yield Cell(layout, kind, number, work)
            yield Cell(layout, kind, number, "openai", is_stopped=True)


# one core of several dies in test_data_parallel.py
USUAL = (
    Cell("pp2", "rank", 1, "openai"),
    Cell("tp2", "rank", 1, "openai", is_stopped=True),
    Cell("tp2", "core", 0, "generate"),
    Cell("ray-tp2", "rank", RAY_SIZE - 1, "openai"),
)
# a server without requests, whose worker dies on an NPU too (test_tensor_parallel_on_npu.py); stages of several
# workers, and Ray without its driver
MORE = (
    Cell("pp2", "rank", 0, "idle"),
    Cell("tp2-pp2", "rank", 0, "idle"),
    Cell("tp2-pp2", "rank", 2, "openai"),
    Cell("tp2-pp2", "rank", 1, "openai"),
    Cell("tp2-pp2", "rank", 3, "idle"),
    Cell("ray-pp2", "core", 0, "openai"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        runs_all_kills = metafunc.config.getoption("--all-kills")
        cells = all_cells() if runs_all_kills else (*USUAL, *MORE)
        without_ray = pytest.mark.skipif(
            importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'ascend-vllm[ray]'"
        )
        parameters = []
        for cell in cells:
            marks = [without_ray] if cell.is_ray else []
            marks += [pytest.mark.exhaustive] if cell in MORE and not runs_all_kills else []
            parameters.append(pytest.param(cell, id=str(cell), marks=marks))
        metafunc.parametrize("cell", parameters)


class Watched(Server):
    """A server whose processes, files and shared memory can be found again.

    Args:
        program: module of the server.
        model: directory.
        flags: how many workers it has, and of what kind.
        env: further environment variables.
    """

    def __init__(self, program: str, model: str, flags: tuple[str, ...], env: dict[str, str]) -> None:
        # short, for the names of sockets
        self._directory = pathlib.Path(tempfile.mkdtemp(prefix="kill-", dir="/tmp"))
        self._files = self._directory / "files"
        self._files.mkdir()
        self._mark = f"KILL_MATRIX={secrets.token_hex(16)}"
        # by its names, of everything that was looked at
        self._shared_memory: set[pathlib.Path] = set()
        name, _, value = self._mark.partition("=")
        ray = {
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": str(self._directory),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        env = ENV | ray | {name: value, "TMPDIR": str(self._files)} | env
        super().__init__(program, ["--model", model, *FLAGS, *flags], env)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in this server's environment, whoever its parent is now, and what it has started."""
        found = {process.pid: process for process in self.children()}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if self._mark.encode() in pathlib.Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                    found[process.pid] = process
        alive = [process for process in found.values() if is_alive(process)]
        for process in alive:
            self._shared_memory |= shared_memory_of(process)
        return alive

    def assert_nothing_is_left(self, *, agents_may_stay: bool = False) -> None:
        """Neither processes nor files nor shared memory.

        Args:
            agents_may_stay: Ray's agents end later.
        """

        def left() -> list[list[str]]:
            commands = [command for process in self.processes() if (command := command_of(process))]
            if agents_may_stay:
                commands = [command for command in commands if not any(a in " ".join(command) for a in RAY_AGENTS)]
            return commands

        wait_until(lambda: not left())
        assert left() == []
        assert list(self._files.iterdir()) == []
        assert wait_until(lambda: not any(path.exists() for path in self._shared_memory)), self._shared_memory

    def close(self) -> None:
        super().close()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)


def shared_memory_of(process: psutil.Process) -> set[pathlib.Path]:
    """Named shared-memory segments that a process has mapped or open."""
    found: set[str] = set()
    directory = pathlib.Path(f"/proc/{process.pid}")
    with contextlib.suppress(OSError):
        found |= set(re.findall(r"/dev/shm/.*", (directory / "maps").read_text()))
        found |= {str(descriptor.readlink()) for descriptor in (directory / "fd").iterdir()}
    return {pathlib.Path(name) for name in found if name.startswith("/dev/shm/") and not name.endswith(" (deleted)")}


@contextlib.contextmanager
def watched(program: str, model: str, flags: tuple[str, ...], env: dict[str, str] | None = None) -> Iterator[Watched]:
    """Starts a server and waits until it is ready; stops it afterwards."""
    server = Watched(program, model, flags, env or {})
    try:
        server.wait_ready(TIMEOUT_S)
        yield server
    finally:
        server.close()


class Answers:
    """Open requests to a server that are too long to be finished.

    Args:
        server: it.
        work: "idle", "openai" or "generate".
    """

    def __init__(self, server: Watched, work: str) -> None:
        self._work = work
        self._whole: list[socket.socket] = []
        self._streams: list[tuple[socket.socket, bytes]] = []
        if work == "idle":
            return
        path = "/generate" if work == "generate" else "/v1/completions"
        bodies = [(path, ENDLESS | {"prompt": "Hello", "n": 2, "temperature": 1})]
        if work == "openai":
            bodies.append(("/v1/chat/completions", ENDLESS | {"messages": MESSAGES}))
        streams = [(path, post_raw(server, path, body | {"stream": True})) for path, body in bodies]
        self._whole.append(post_raw(server, path, ENDLESS | {"prompt": "Hello"}))
        for path, stream in streams:
            self._streams.append((stream, read_frames(stream) if path == "/generate" else read_events(stream, 3)))
        if work == "openai":
            # the request must be in the engine, or it would be refused before
            assert wait_until(lambda: num_running(server) == 4)

    def assert_they_end(self, text: str) -> None:
        """Checks that each ends with an error that matches `text`, and that the connections close."""
        for stream, received in self._streams:
            answer = (received + read_rest(stream)).decode()
            if self._work == "generate":
                # a frame ends with a zero byte; behind it are the lines of the transfer encoding
                check_error(json.loads(answer.split("\0")[-2].splitlines()[-1]), text)
                continue
            *_, last, done = [line for line in answer.splitlines() if line.startswith("data: ")]
            assert done == "data: [DONE]"
            check_error(json.loads(last.removeprefix("data: ")), text)
        for whole in self._whole:
            head, _, body = read_rest(whole).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 500"), head
            check_error(json.loads(body), text)


def read_frames(stream: socket.socket) -> bytes:
    """The first frames of a stream of /generate."""
    received = b""
    while received.count(b"\0") < 2:
        data = stream.recv(65536)
        assert data, received
        received += data
    return received


def check_error(body: dict[str, dict[str, object]], text: str) -> None:
    """An error answer of OpenAI's form."""
    error = body["error"]
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert re.search(text, str(error["message"])), error


def num_running(server: Server) -> float:
    """Sequences that the engines of an OpenAI server compute."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.MULTILINE)))


def is_healthy(server: Server) -> bool:
    """Whether /health says 200; false if it says 503, or nobody answers any more."""
    try:
        status = httpx.get(f"{server.url}/health", timeout=60).status_code
    except httpx.TransportError:
        return False
    assert status in (200, 503)
    return status == 200


def victim_of(server: Watched, cell: Cell) -> tuple[psutil.Process, str]:
    """A process to kill, and the expected error text."""
    if cell.kind == "core":
        cores = server.find("ascend_vllm.core.proc")
        name = "the engine core" if len(cores) == 1 else f"engine core {cell.number}"
        return cores[cell.number], f"{name} was killed by signal 9"
    if cell.is_ray:
        found = re.search(rf"Worker {cell.number} is process (\d+)", server.log)
        assert found is not None, server.log
        victim = psutil.Process(int(found[1]))
        return victim, rf"worker {cell.number} \(process {victim.pid} on .*\) is gone: "
    workers = server.find("ascend_vllm.executor.worker_process")
    assert len(workers) == RANKS[cell.layout]
    if cell.layout == "dp2-tp2":
        # each core numbers its own
        core = workers[cell.number].ppid()
        workers_of_core = [worker.pid for worker in workers if worker.ppid() == core]
        rank = workers_of_core.index(workers[cell.number].pid)
    else:
        rank = cell.number
    victim = workers[cell.number]
    return victim, rf"worker {rank} \(process {victim.pid}\) was killed by signal 9"


def tokens_of(server: Server, prompt: str) -> list[int]:
    """An OpenAI server's greedy completion of a prompt."""
    body = {"prompt": prompt, "max_tokens": GREEDY.max_tokens, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=TIMEOUT_S)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


def test_a_death_ends_all(cell: Cell, odd_model: str, alone: LLM) -> None:
    """Before the death, the tokens are the same as those of one process."""
    program = GENERATE_SERVER if cell.work == "generate" else OPENAI_SERVER
    env = {"VLLM_ENGINE_ITERATION_TIMEOUT_S": str(ITERATION_TIMEOUT_S)} if cell.is_stopped else {}
    limit_s = DEATH_S + (ITERATION_TIMEOUT_S if cell.is_stopped else 0.0)
    with watched(program, odd_model, LAYOUTS[cell.layout], env) as server:
        if program == OPENAI_SERVER:
            assert [[tokens_of(server, prompt)] for prompt in PROMPTS] == ids_of(generate(alone))
        victim, text = victim_of(server, cell)
        answers = Answers(server, cell.work)
        assert is_healthy(server)
        server.processes()
        start = time.monotonic()
        if cell.is_stopped:
            text = "VLLM_ENGINE_ITERATION_TIMEOUT_S"
            victim.suspend()
        else:
            victim.kill()
        answers.assert_they_end(text)
        assert wait_until(lambda: not is_healthy(server))
        took_s = time.monotonic() - start
        assert server.wait_exit(TIMEOUT_S) == 1
        server.assert_nothing_is_left(agents_may_stay=cell.is_ray and cell.kind == "core")
        assert re.search(text, server.log)
        assert took_s < limit_s


# one process has it in test_server_lifecycle.py, and workers end in order after all other tests
@pytest.mark.exhaustive
def test_sigterm_lets_open_streams_end(odd_model: str) -> None:
    with watched(OPENAI_SERVER, odd_model, LAYOUTS["tp2"]) as server:
        body = ENDLESS | {"prompt": "Hello", "max_tokens": 300, "stream": True, "stream_options": USAGE}
        stream = post_raw(server, "/v1/completions", body)
        received = read_events(stream, 1)
        assert len(server.processes()) >= 4
        server.process.send_signal(signal.SIGTERM)
        received += read_rest(stream)
        *_, usage, done = [line for line in received.decode().splitlines() if line.startswith("data: ")]
        assert done == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 300
        assert server.wait_exit(TIMEOUT_S) == 0
        server.assert_nothing_is_left()
