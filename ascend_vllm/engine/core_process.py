"""Starts, waits for and ends an engine-core process; removes its sockets."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig

# Socket addresses are limited to 107 bytes by the kernel.
_MAX_DIRECTORY_LENGTH = 90
_TERMINATE_S = 3.0
VISIBLE_NPUS = "ASCEND_RT_VISIBLE_DEVICES"


class CoreProcess:
    """One engine core in a process of its own.

    The configuration is written to its stdin, after its length in four bytes. stdin then stays open: its end means
    that this process is dead. The core has a session of its own: Ctrl-C in a terminal reaches this process only, and
    this process shuts the core down.

    Args:
        config: of the whole engine.
        rank: number of the core, of --data-parallel-size.
        num_clients: API-server processes, each of which has an address of its own in both directions.

    Attributes:
        inbound: address of messages to the core; bind a PUSH socket there.
        outbound: address of messages from the core; bind a PULL socket there.
        addresses: both for each client; `inbound` and `outbound` are the first client's.
    """

    def __init__(self, config: EngineConfig, rank: int = 0, num_clients: int = 1) -> None:
        self._config = config_of_engine(config, rank)
        self._environment = environment_of_engine(config, rank)
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: Future[int] = Future()
        self._directory = make_socket_directory()
        self.addresses = [
            (f"ipc://{self._directory}/inbound{suffix}", f"ipc://{self._directory}/outbound{suffix}")
            for suffix in ("", *map(str, range(1, num_clients)))
        ]
        self.inbound, self.outbound = self.addresses[0]
        self._cleanup = weakref.finalize(self, _kill_and_clean, None, self._directory)

    def start(self, on_exit: Callable[[int], None]) -> None:
        """Starts the process, unless `launch` has.

        Args:
            on_exit: called once with the exit code: in a thread of its own, or here if the process has ended.
        """
        if self._process is None:
            self.launch()
        self._exit.add_done_callback(lambda exit: on_exit(exit.result()))

    def launch(self) -> None:
        """Starts the process before anybody can take its messages, which wait until the sockets are bound."""
        command = [sys.executable, "-m", "ascend_vllm.core.proc"]
        for inbound, outbound in self.addresses:
            command += ["--input", inbound, "--output", outbound]
        environment = envs.everything() | self._environment
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)
        self._process = process
        # runs at interpreter exit if stop() was not called
        self._cleanup.detach()
        self._cleanup = weakref.finalize(self, _kill_and_clean, process, self._directory)
        payload = msgspec.msgpack.encode(self._config)
        threading.Thread(
            target=_feed_and_wait,
            args=(process, len(payload).to_bytes(4) + payload, self._exit),
            name="engine-core-watch",
            daemon=True,
        ).start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return None if self._process is None else self._process.returncode

    @property
    def pid(self) -> int | None:
        """The process's id; None before `start`."""
        return None if self._process is None else self._process.pid

    def remove_sockets(self) -> None:
        """Unlinks the sockets once the core has connected, so that none is left however this process ends."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def detach(self) -> None:
        """Leaves the process's end and its sockets to another process, from which this one was forked."""
        self._cleanup.detach()

    def end_orderly(self) -> None:
        """Sends SIGTERM to the process alone, which then ends its workers."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def terminate(self) -> None:
        """Sends SIGTERM; the process ends when native code that it is in returns."""
        if self._process is not None:
            _signal_session(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a process that is stopped or stuck in native code."""
        if self._process is not None and self._process.poll() is None:
            _signal_session(self._process.pid, signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """Waits for the process to end, then ends it, and removes the sockets; may be called again.

        Args:
            grace_s: seconds to wait before SIGTERM.
        """
        process = self._process
        if process is not None:
            if not (grace_s and _wait(process, grace_s)):
                _signal_session(process.pid, signal.SIGTERM)
                _wait(process, _TERMINATE_S)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        # kills it if it still runs, and removes the directory
        self._cleanup()


class AttachedCore:
    """An engine core that this process's parent has started, with the interface of `CoreProcess`.

    Args:
        inbound, outbound: this process's addresses, see `CoreProcess`.

    Attributes:
        pid: process id of the core; None until the parent says it.
        exit_code: None while it runs.
    """

    def __init__(self, inbound: str, outbound: str) -> None:
        self.inbound = inbound
        self.outbound = outbound
        self.pid: int | None = None
        self.exit_code: int | None = None
        self._on_exit: Callable[[int], None] | None = None
        self._lock = threading.Lock()

    def start(self, on_exit: Callable[[int], None]) -> None:
        """Has `on_exit` called once with the exit code, in another thread."""
        with self._lock:
            self._on_exit = on_exit
            exit_code = self.exit_code
        if exit_code is not None:
            on_exit(exit_code)

    def note_exit(self, exit_code: int) -> None:
        """Says that the core has ended."""
        with self._lock:
            self.exit_code = exit_code
            on_exit = self._on_exit
        if on_exit is not None:
            on_exit(exit_code)

    def remove_sockets(self) -> None:
        """Unlinks this process's sockets once the core has connected."""
        paths = [pathlib.Path(address.removeprefix("ipc://")) for address in (self.inbound, self.outbound)]
        for path in paths:
            path.unlink(missing_ok=True)
        # until the other clients have removed theirs it is not empty
        with contextlib.suppress(OSError):
            paths[0].parent.rmdir()

    def terminate(self) -> None:
        """Sends SIGTERM to the core and its workers."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the core and its workers."""
        self._signal(signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """Does nothing: the parent ends the core when no process needs it any more."""

    def _signal(self, number: int) -> None:
        if self.pid is not None and self.exit_code is None:
            _signal_session(self.pid, number)


def make_core_processes(config: EngineConfig, num_clients: int = 1) -> list[CoreProcess]:
    """The processes of all engine cores of --data-parallel-size, by rank; none is started."""
    return [CoreProcess(config, rank, num_clients) for rank in range(config.parallel.data_parallel_size)]


def config_of_engine(config: EngineConfig, rank: int) -> EngineConfig:
    """The configuration of one engine core.

    Args:
        config: of the whole.
        rank: number of the engine core.
    """
    parallel = msgspec.structs.replace(config.parallel, data_parallel_rank=rank)
    # progress bars of several cores would overwrite each other
    load = msgspec.structs.replace(config.load, use_tqdm=config.load.use_tqdm and rank == 0)
    return msgspec.structs.replace(config, parallel=parallel, load=load)


def environment_of_engine(config: EngineConfig, rank: int) -> dict[str, str]:
    """Environment variables that assign an engine core its NPUs: consecutive ones of those that are visible.

    Args:
        config: of the whole; as many NPUs as it needs are visible.
        rank: of the engine core.
    """
    parallel = config.parallel
    if config.device.device != "npu" or parallel.data_parallel_size == 1:
        return {}
    visible = envs.ascend_rt_visible_devices()
    first, count = rank * parallel.world_size, parallel.world_size
    wanted = range(first, first + count)
    cards = visible.split(",")[first : first + count] if visible else list(map(str, wanted))
    return {VISIBLE_NPUS: ",".join(cards)}


def _feed_and_wait(process: subprocess.Popen[bytes], payload: bytes, exit_code: Future[int]) -> None:
    """Writes the configuration, which the pipe may not hold at once, and waits for the end; runs in a thread."""
    if process.stdin is None:
        raise RuntimeError("the engine core has no stdin")
    with contextlib.suppress(OSError):  # a process that died early is reported by its exit code
        process.stdin.write(payload)
        process.stdin.flush()
    exit_code.set_result(process.wait())


def make_socket_directory() -> str:
    """Makes a private directory whose path is short enough for Unix domain sockets in it."""
    parent = None if len(tempfile.gettempdir()) <= _MAX_DIRECTORY_LENGTH else "/tmp"
    return tempfile.mkdtemp(prefix="ascend_vllm-", dir=parent)


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_session(pid: int, number: int) -> None:
    """Signals a process that leads a session, and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _kill_and_clean(process: subprocess.Popen[bytes] | None, directory: str) -> None:
    if process is not None and process.poll() is None:
        _signal_session(process.pid, signal.SIGKILL)
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
