"""Starts, waits for and ends an engine-core process; removes its sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable

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

    Attributes:
        inbound: address of messages to the core; bind a PUSH socket there before `start`.
        outbound: address of messages from the core; bind a PULL socket there before `start`.
    """

    def __init__(self, config: EngineConfig, rank: int = 0) -> None:
        self._config = config_of_engine(config, rank)
        self._environment = environment_of_engine(config, rank)
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.mkdtemp(
            prefix="ascend_vllm-", dir=None if len(tempfile.gettempdir()) <= _MAX_DIRECTORY_LENGTH else "/tmp"
        )
        self.inbound = f"ipc://{self._directory}/inbound"
        self.outbound = f"ipc://{self._directory}/outbound"
        self._cleanup = weakref.finalize(self, _kill_and_clean, None, self._directory)

    def start(self, on_exit: Callable[[int], None]) -> None:
        """Starts the process.

        Args:
            on_exit: called once with the exit code, in a thread of its own.
        """
        command = [sys.executable, "-m", "ascend_vllm.core.proc", "--input", self.inbound, "--output", self.outbound]
        environment = envs.everything() | self._environment
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=environment)
        self._process = process
        # runs at interpreter exit if stop() was not called
        self._cleanup.detach()
        self._cleanup = weakref.finalize(self, _kill_and_clean, process, self._directory)
        payload = msgspec.msgpack.encode(self._config)
        threading.Thread(
            target=_feed_and_wait,
            args=(process, len(payload).to_bytes(4) + payload, on_exit),
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

    def terminate(self) -> None:
        """Sends SIGTERM; the process ends when native code that it is in returns."""
        if self._process is not None:
            _signal_session(self._process, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, which also ends a process that is stopped or stuck in native code."""
        if self._process is not None and self._process.poll() is None:
            _signal_session(self._process, signal.SIGKILL)

    def stop(self, grace_s: float) -> None:
        """Waits for the process to end, then ends it, and removes the sockets; may be called again.

        Args:
            grace_s: seconds to wait before SIGTERM.
        """
        process = self._process
        if process is not None:
            if not (grace_s and _wait(process, grace_s)):
                _signal_session(process, signal.SIGTERM)
                _wait(process, _TERMINATE_S)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        # kills it if it still runs, and removes the directory
        self._cleanup()


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


def _feed_and_wait(process: subprocess.Popen[bytes], payload: bytes, on_exit: Callable[[int], None]) -> None:
    """Writes the configuration, which the pipe may not hold at once, and waits for the end; runs in a thread."""
    if process.stdin is None:
        raise RuntimeError("the engine core has no stdin")
    with contextlib.suppress(OSError):  # a process that died early is reported by its exit code
        process.stdin.write(payload)
        process.stdin.flush()
    on_exit(process.wait())


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _signal_session(process: subprocess.Popen[bytes], number: int) -> None:
    """Signals the process and its children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _kill_and_clean(process: subprocess.Popen[bytes] | None, directory: str) -> None:
    if process is not None and process.poll() is None:
        _signal_session(process, signal.SIGKILL)
        process.wait()
    shutil.rmtree(directory, ignore_errors=True)
