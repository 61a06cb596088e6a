"""Real servers for tests: a process of its own on a free port, its log kept, no process left behind."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import httpx
import psutil
import pytest

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs the curl program")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPENAI_SERVER = "ascend_vllm.entrypoints.openai.api_server"
GENERATE_SERVER = "ascend_vllm.entrypoints.api_server"

# what --server-flags says: every server that a test starts has these as well
_further_flags: list[str] = []
# other names of flags that may be among them
_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_SAME = {"--worker-use-ray": "--distributed-executor-backend"}


def set_further_flags(flags: str) -> None:
    """Gives every server that is started from now on these flags, beside those of its test.

    Args:
        flags: as on a command line.
    """
    _further_flags[:] = shlex.split(flags)


def _name_of_flag(argument: str) -> str | None:
    """The flag that an argument names, None if it is a flag's value."""
    name = argument.partition("=")[0].replace("_", "-")
    name = _SHORT.get(name, name)
    return _SAME.get(name, name) if name.startswith("--") else None


def further_flags(arguments: Sequence[str] = ()) -> list[str]:
    """Those of --server-flags that a server with these arguments gets: a flag that is among them stays as it is."""
    given = {_name_of_flag(argument) for argument in arguments}
    kept: list[str] = []
    name = None
    for argument in _further_flags:
        name = _name_of_flag(argument) or name
        if name not in given:
            kept.append(argument)
    return kept


def num_workers(arguments: Sequence[str] = ()) -> int:
    """How many workers the engine of a server with these arguments, and what --server-flags adds to them, has."""
    count = 1
    parts = [part for argument in (*arguments, *further_flags(arguments)) for part in argument.split("=", 1)]
    for name, value in itertools.pairwise(parts):
        if _name_of_flag(name) in ("--tensor-parallel-size", "--pipeline-parallel-size"):
            count *= int(value)
    return count


def arrangements() -> dict[str, list[str]]:
    """The ways to run an engine that tests of a server go through: name → flags.

    Those of --server-flags alone, where there are any.
    """
    if _further_flags:
        return {"server-flags": []}
    two = ["--tensor-parallel-size", "2"]
    return {"one process": [], "mp": two, "ray": [*two, "--distributed-executor-backend", "ray"]}


def arrangement_params() -> list[Any]:
    """The names of `arrangements` as parameters: two workers with --all only.

    tests/distributed has their tokens, under mp and under Ray, with all features of the scheduler.
    """
    first, *others = arrangements()
    return [pytest.param(first), *(pytest.param(name, marks=pytest.mark.exhaustive) for name in others)]


# given to a server that may not listen yet
_given_ports: set[int] = set()


def free_port() -> int:
    """A port that was free a moment ago, and that neither this worker of pytest nor another one is given again."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = int(sock.getsockname()[1])
        # the system gives ports of one parity
        if port // 2 % num_workers == worker and port not in _given_ports:
            _given_ports.add(port)
            return port


class Server:
    """A running server program.

    Args:
        module: what ``python -m`` runs, a subcommand behind it.
        arguments: its command line; --host, --port and what --server-flags says are added.
        env: further environment variables.
        scheme: "http", or "https" for a server with TLS flags.

    Attributes:
        port: where it listens once it is ready.
        process: the server's process.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        env: dict[str, str] | None = None,
        port: int | None = None,
        scheme: str = "http",
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed by close()
        command = [sys.executable, "-m", *module.split(), "--host", "127.0.0.1", "--port", str(self.port)]
        command += [*arguments, *further_flags(arguments)]
        # two threads at most: tests share their machine
        environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"} | (env or {})
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._family: dict[int, psutil.Process] = {}

    @property
    def log(self) -> str:
        """Everything the server printed so far."""
        return pathlib.Path(self._log.name).read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        """The processes that the server started, such as the engine core."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._family |= {child.pid: child for child in found}
        return [child for child in self._family.values() if is_alive(child)]

    def find(self, program: str) -> list[psutil.Process]:
        """The children whose command line names a program, in the order of their start.

        A process that has just forked has its parent's command line until it calls exec: it is not counted.
        """
        found: dict[int, tuple[float, int, psutil.Process]] = {}
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
                if program in " ".join(command_of(child)):
                    found[child.pid] = (child.create_time(), child.ppid(), child)
        return [child for _, parent, child in sorted(found.values(), key=itemgetter(0)) if parent not in found]

    def engine_core(self) -> psutil.Process:
        """The engine core's process."""
        cores = self.find("ascend_vllm.core.proc")
        if len(cores) != 1:
            raise RuntimeError(f"expected one engine core, found {cores}; log:\n{self.log}")
        return cores[0]

    def wait_ready(self, timeout_s: float = 90.0, verify: ssl.SSLContext | bool = True) -> None:
        """Wait until /health answers 200.

        Raises:
            RuntimeError: the server ended or took too long; the message holds its log.
        """
        deadline = time.monotonic() + timeout_s
        # one client for all attempts: to make one takes long
        with httpx.Client(timeout=30, verify=verify) as http:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended with {self.process.returncode}; log:\n{self.log}")
                with contextlib.suppress(httpx.TransportError):
                    if http.get(f"{self.url}/health").status_code == 200:
                        self.children()
                        return
                time.sleep(0.05)
        raise RuntimeError(f"the server was not ready after {timeout_s} s; log:\n{self.log}")

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        """Wait for the process's end and return its exit code.

        Raises:
            RuntimeError: it took too long; the message holds its log.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the server did not end within {timeout_s} s; log:\n{self.log}") from error

    def terminate(self, timeout_s: float = 60.0) -> int:
        """End the server with SIGTERM and return its exit code."""
        self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def orphans(self, timeout_s: float = 20.0) -> list[psutil.Process]:
        """Processes of the ended server that are still there after a grace period."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.children():
            time.sleep(0.05)
        return self.children()

    def close(self) -> None:
        """End whatever is left, by force."""
        left = self.children()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._log.close()


def client_of_many(server: Server, timeout_s: float = 180.0) -> httpx.Client:
    """A client for many threads.

    Each request has a connection of its own: a client that keeps some of those which are not in use may close one
    that another thread has just been given.
    """
    return httpx.Client(base_url=server.url, timeout=timeout_s, limits=httpx.Limits(max_keepalive_connections=0))


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """The words of a process's command line; none of one that has ended, be it this moment."""
    with contextlib.suppress(psutil.NoSuchProcess):  # psutil's ZombieProcess is one of them
        return process.cmdline()
    return []


@contextlib.contextmanager
def running(
    module: str, arguments: Sequence[str], env: dict[str, str] | None = None, timeout_s: float = 90.0
) -> Iterator[Server]:
    """A server that is ready, ended in order afterwards.

    Raises:
        RuntimeError: it did not start, did not end with code 0, or left processes behind.
    """
    with ended_in_order(Server(module, arguments, env), timeout_s) as server:
        yield server


@contextlib.contextmanager
def ended_in_order(server: Server, timeout_s: float = 90.0, verify: ssl.SSLContext | bool = True) -> Iterator[Server]:
    """The same of a server that has been started; see `running` and `Server.wait_ready`."""
    try:
        server.wait_ready(timeout_s, verify)
        yield server
        ended_early = server.process.poll() is not None
        code = server.terminate()
        orphans = server.orphans()
        if ended_early or code != 0 or orphans:
            raise RuntimeError(f"exit code {code}, ended early: {ended_early}, orphans {orphans}; log:\n{server.log}")
    finally:
        server.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether the condition came true; the time is only there so that a test that fails does not hang."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def metric(http: httpx.Client, name: str) -> float:
    """The value of a metric of the engine."""
    found = re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def is_idle(http: httpx.Client) -> bool:
    """Whether nothing runs or waits and every block of the KV cache is free."""
    names = ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc")
    return all(metric(http, name) == 0 for name in names)
