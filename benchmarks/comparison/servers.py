"""Starts, observes and stops the servers to compare."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

MODEL_NAME = "benchmark"
_POLL_S = 0.01
# a server that uses less than this many cores over this time is idle
_IDLE_CORES, _IDLE_S = 0.1, 0.2
_NOT_INHERITED = ("VLLM_", "PYTHONDONTWRITEBYTECODE")
_NULL_DEVICE = pathlib.Path(__file__).resolve().parents[1] / "null_device"
# what a server logs of the seconds in which it has loaded its model
_LOADED = re.compile(r"Model loaded in ([\d.]+) s|Model loading took .* and ([\d.]+) seconds")
_TCMALLOC = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib64/libtcmalloc_minimal.so.4",
)


class ServerError(Exception):
    """A server did not start, or exited; the message contains the end of its log."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A server program.

    Attributes:
        name: for messages.
        words: the command without the flags of both servers.
        options: flags of this server only.
        environment: variables of this server only.
    """

    name: str
    words: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def command(self, model: str, flags: Sequence[str], port: int) -> list[str]:
        """The whole command line."""
        where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
        return [*self.words, model, *where, *flags, *self.options]

    def shown(self, model: str, flags: Sequence[str]) -> str:
        """The command for reports, without the program's path and the port."""
        variables = [f"{name}={pathlib.Path(value).name}" for name, value in self.environment.items()]
        return " ".join([*variables, self.name, "serve", model, *flags, *self.options])


def _cores() -> str:
    """The cores that this process may use, in vLLM's format: 0-1, or 0,2,5."""
    cores = sorted(os.sched_getaffinity(0))
    if cores == list(range(cores[0], cores[-1] + 1)):
        return f"{cores[0]}-{cores[-1]}"
    return ",".join(map(str, cores))


def ours(options: Sequence[str] = ()) -> Program:
    """This project's server."""
    return Program("ascend-vllm", (sys.executable, "-m", "ascend_vllm.entrypoints.cli", "serve"), tuple(options))


def null_device(options: Sequence[str] = ()) -> Program:
    """This project's server with a device that computes nothing; see benchmarks/null_device."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(_NULL_DEVICE)) if path]
    options = (*options, "--distributed-executor-backend", "null")
    return Program("null device", ours().words, options, {"PYTHONPATH": os.pathsep.join(paths)})


def vllm(
    program: str | None,
    options: Sequence[str] = (),
    tcmalloc: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Program:
    """vLLM's server in its fastest configuration on a CPU: bound to all cores, with tcmalloc if installed.

    Args:
        program: path of vLLM's command; None: the one in PATH.
        options: further flags.
        tcmalloc: path of the library; None: the usual paths.
        variables: further variables of its environment.

    Raises:
        ServerError: there is no such program or library.
    """
    found = shutil.which(program or "vllm")
    if found is None:
        raise ServerError(
            f"There is no program {program or 'vllm'!r}: install vLLM's CPU build and name its command with "
            "--peer-program, or measure alone with --peer none."
        )
    if tcmalloc is not None and not pathlib.Path(tcmalloc).is_file():
        raise ServerError(f"--tcmalloc {tcmalloc}: there is no such file.")
    library = tcmalloc or next(filter(os.path.exists, _TCMALLOC), None)
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": _cores(),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if library is not None:
        environment["LD_PRELOAD"] = library
    return Program("vllm", (found, "serve"), tuple(options), environment | dict(variables or {}))


def _forget_peak(process: psutil.Process) -> int:
    with contextlib.suppress(OSError):  # it has ended by now
        pathlib.Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    return 0


def _peak(process: psutil.Process) -> int:
    """VmHWM, in bytes."""
    try:
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s*(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """A server process and its children; a context manager.

    Args:
        program: what to start.
        model: directory of the model.
        flags: of both servers.

    Attributes:
        start_s: seconds from the start of the process to the first 200 of /health, once `wait_ready` has returned.
    """

    def __init__(self, program: Program, model: str, flags: Sequence[str]) -> None:
        self._name = program.name
        self._port = _free_port()
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed by close()
        # Each server has variables of its own only, and keeps bytecode: compiling torch's modules takes 0.8 s.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_INHERITED)}
        command = program.command(model, flags, self._port)
        self._started = time.perf_counter()
        self._process = subprocess.Popen(
            command, env=inherited | dict(program.environment), stdout=self._log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.start_s = 0.0

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def port(self) -> int:
        """The server's port on 127.0.0.1."""
        return self._port

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until /health answers 200.

        Raises:
            ServerError: the server exited or took too long.
        """
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise ServerError(f"{self._name} ended with code {self._process.returncode}.\n{self._log_end()}")
            if time.perf_counter() - self._started > timeout_s:
                raise ServerError(f"{self._name} was not ready after {timeout_s:.0f} s.\n{self._log_end()}")
            time.sleep(_POLL_S)
        self.start_s = time.perf_counter() - self._started

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._get("/health")[0] == 200
        return False

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def _log_end(self) -> str:
        return "\n".join(pathlib.Path(self._log.name).read_text(errors="replace").splitlines()[-30:])

    def version(self) -> str:
        """The version from /version."""
        return str(json.loads(self._get("/version")[1])["version"])

    def metrics(self) -> str:
        """The text of /metrics."""
        return self._get("/metrics")[1]

    def kv_cache_tokens(self) -> int:
        """Size of the KV cache in tokens, from the server's metrics.

        Raises:
            ServerError: it is not in the metrics.
        """
        line = re.search(r"^vllm:cache_config_info\{(.*)\}", self.metrics(), re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line[1] if line else ""))
        try:
            return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        except (KeyError, ValueError) as error:
            raise ServerError(f"{self._name} does not tell the size of its KV cache: {error}") from error

    def _sum(self, of: Callable[[psutil.Process], float]) -> float:
        """Sums a quantity over the server's live processes."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += of(one)
        return total

    def load_s(self) -> float:
        """Seconds in which the model was loaded, from the server's log.

        Raises:
            ServerError: it does not say.
        """
        found = _LOADED.search(pathlib.Path(self._log.name).read_text(errors="replace"))
        if found is None:
            raise ServerError(f"{self._name} does not log how long loading takes.\n{self._log_end()}")
        return float(found[1] or found[2])

    def swapped_bytes(self) -> int:
        """Memory of the server's processes that the system has swapped out."""
        return int(self._sum(lambda process: process.memory_full_info().swap))

    def resident_bytes(self) -> int:
        """Memory of the server's processes (PSS: shared pages are divided among them)."""
        return int(self._sum(lambda process: process.memory_full_info().pss))

    def begin_peak(self) -> None:
        """Resets the peak that `peak_bytes` returns."""
        self._sum(_forget_peak)

    def peak_bytes(self) -> int:
        """Sum of the processes' peaks of memory, which may be at different times; shared pages count for each."""
        return int(self._sum(_peak))

    @property
    def has_ended(self) -> bool:
        """Whether the server's process is gone."""
        return self._process.poll() is not None

    def wait_finished(self, timeout_s: float) -> bool:
        """Returns when no request runs or waits, by the server's metrics; at once if it has none.

        Returns:
            False: there still are some after so long, or the server does not answer.
        """
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            with contextlib.suppress(OSError, http.client.HTTPException):
                text = self.metrics()
                if not re.search(r"^vllm:num_requests_(running|waiting)\{.*\} [^0]", text, re.MULTILINE):
                    return True
            time.sleep(_IDLE_S)
        return False

    def wait_idle(self, timeout_s: float = 60.0) -> bool:
        """Returns when the server's processes have left the cores: some wait for the next step in a busy loop.

        Returns:
            False: they still compute after so long.
        """
        end = time.perf_counter() + timeout_s
        while time.perf_counter() < end:
            start, before = time.perf_counter(), self._cpu_s()
            time.sleep(_IDLE_S)
            if self._cpu_s() - before < _IDLE_CORES * (time.perf_counter() - start):
                return True
        return False

    def _cpu_s(self) -> float:
        return self._sum(lambda process: sum(process.cpu_times()[:2]))

    def kill(self) -> None:
        """Ends the server's processes by force."""
        for process in [*self._family(), self._process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _family(self) -> list[psutil.Process]:
        """The processes that the server started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._process.pid).children(recursive=True)
        return []

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends the server in order, and by force what is left of its processes."""
        family = self._family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
