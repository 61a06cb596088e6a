"""Several API-server processes (--api-server-count) at one address, before the same engine cores.

This process binds the socket, forks the API servers, which inherit it, starts the engine cores, and waits. Each API
server is a whole server with its own event loop and tokenizer; `engine/api_group.py` has what they share.

- A signal is passed on to the API servers, which finish their requests; then the engine cores are ended.
- When an API server ends unasked, so does the whole server. The engine cores abort its requests.
- When an engine core ends, the API servers are told, and end as a single one would.
- When this process is killed, the engine cores and the API servers notice the end of a pipe, and exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pathlib
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import TYPE_CHECKING

from ascend_vllm.engine.api_group import ApiGroup
from ascend_vllm.engine.core_process import AttachedCore, CoreProcess, make_core_processes, make_socket_directory
from ascend_vllm.errors import AscendVllmError, ConfigError
from ascend_vllm.logger import init_logger, name_process

if TYPE_CHECKING:
    from ascend_vllm.config.engine import EngineConfig
    from ascend_vllm.engine.async_llm import AsyncLLM
    from ascend_vllm.entrypoints.http.stop_signals import StopSignals

logger = init_logger(__name__)

_EXIT_OK = 0
_EXIT_FAILURE = 1
_EXIT_USAGE = 2
# of an API server that a signal ended before it was ready
_INTERRUPTED = 130
# for the API servers to end for the same reason as the first one that ended
_SAME_REASON_S = 2.0
# for an engine core to finish its step and close its workers
_CORE_GRACE_S = 5.0
_HANDLED = (signal.SIGINT, signal.SIGTERM)


def serve_by_processes(
    count: int,
    config: EngineConfig,
    sock: socket.socket,
    stop: StopSignals,
    serve: Callable[[AsyncLLM], int],
    *,
    with_names: bool,
) -> int:
    """Serves until a signal, or until an API server or the engine ends; returns the process's exit code.

    Args:
        count: API servers.
        config: of the engine.
        sock: bound; closed here, so that the API servers alone have it.
        stop: handles signals so far.
        serve: what an API server does with its engine; returns its exit code.
        with_names: of the API servers in their lines of the log.

    Raises:
        KeyboardInterrupt: a signal came before the server was ready.
    """
    # The API servers share this setting. Without it each would turn it off for all of them while it duplicates the
    # socket, and one that was ready would block in `accept` when another takes the connection.
    sock.setblocking(False)
    num_engines = config.parallel.data_parallel_size
    with _private_directory() as directory:
        group = ApiGroup(count, num_engines, directory)
        cores = make_core_processes(config, count)
        stop.hold_back()
        servers = _ApiServers(count)
        try:
            servers.fork(_Child(config, group, cores, stop, serve, directory, with_names))
            group.close()
            sock.close()
            with servers.handling_signals(stop):
                for rank, core in enumerate(cores):
                    core.start(functools.partial(servers.tell, "exit", rank))
                    servers.tell("pid", rank, core.pid or 0)
                return servers.wait()
        finally:
            servers.end_all()
            for core in cores:
                core.end_orderly()
            for core in cores:
                core.stop(_CORE_GRACE_S)


@contextlib.contextmanager
def _private_directory() -> Generator[pathlib.Path, None, None]:
    directory = pathlib.Path(make_socket_directory())
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _ApiServers:
    """The API-server processes, as their parent sees them.

    Args:
        count: how many there are to be.
    """

    def __init__(self, count: int) -> None:
        # messages to the API servers, a line of JSON each
        self._pipes = [os.pipe() for _ in range(count)]
        self._processes: list[multiprocessing.context.ForkProcess] = []
        self._signals, self._signal_end = os.pipe()
        self._is_stopping = False

    def fork(self, child: _Child) -> None:
        """Starts the API servers. No thread may run yet."""
        context = multiprocessing.get_context("fork")
        for index in range(len(self._pipes)):
            process = context.Process(target=child.run, args=(index, self._pipes), name=f"ApiServer_{index}")
            process.start()
            self._processes.append(process)
        for descriptor, _ in self._pipes:
            os.close(descriptor)

    @contextlib.contextmanager
    def handling_signals(self, stop: StopSignals) -> Generator[None, None, None]:
        """Within, signals are passed on to the API servers, also one that `stop` has recorded."""
        before = {number: signal.signal(number, self._note_signal) for number in _HANDLED}
        if stop.is_requested:
            self._note_signal(signal.SIGTERM, None)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def tell(self, what: str, rank: int, number: int) -> None:
        """Tells the API servers about an engine core; for any thread.

        Args:
            what: "pid", or "exit".
            rank: of the core.
            number: its process id, or exit code.
        """
        line = json.dumps([what, rank, number]).encode() + b"\n"
        for _, descriptor in self._pipes:
            with contextlib.suppress(OSError):  # it has ended
                os.write(descriptor, line)

    def wait(self) -> int:
        """Waits until all API servers have ended; ends the others when one does. Returns the exit code.

        Raises:
            KeyboardInterrupt: a signal came before the server was ready.
        """
        codes: list[int] = []
        # when those that are left get SIGTERM, because one has ended
        deadline: float | None = None
        left = list(self._processes)
        while left:
            waiting_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait([*(one.sentinel for one in left), self._signals], waiting_s)
            if self._signals in ready:
                self._is_stopping, deadline = True, None
                for number in os.read(self._signals, 64):
                    self._signal(number)
            for process in [one for one in left if one.sentinel in ready]:
                process.join()
                left.remove(process)
                codes.append(self._code_of(process))
                if not self._is_stopping and deadline is None:
                    deadline = time.monotonic() + self._grace_s(process)
            if deadline is not None and time.monotonic() >= deadline:
                self._is_stopping, deadline = True, None
                self._signal(signal.SIGTERM)
        # one that was not ready yet does not matter if another was
        if set(codes) == {_INTERRUPTED}:
            raise KeyboardInterrupt
        return next((code for code in codes if code not in (_EXIT_OK, _INTERRUPTED)), _EXIT_OK)

    def end_all(self) -> None:
        """Kills the API servers that still run."""
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join()

    def _code_of(self, process: multiprocessing.context.ForkProcess) -> int:
        exit_code = process.exitcode or 0
        if exit_code < 0 or (exit_code == 0 and not self._is_stopping):
            how = f"was killed by signal {-exit_code}" if exit_code < 0 else "ended"
            logger.error("%s (pid %s) %s; the server ends", process.name, process.pid, how)
            return _EXIT_FAILURE
        return exit_code

    def _grace_s(self, process: multiprocessing.context.ForkProcess) -> float:
        """How long the others may take to end by themselves; none if the reason is this one's alone."""
        return _SAME_REASON_S if (process.exitcode or 0) > 0 else 0.0

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        os.write(self._signal_end, bytes([number]))


class _Child:
    """What an API server needs; see `serve_by_processes` for the arguments."""

    def __init__(
        self,
        config: EngineConfig,
        group: ApiGroup,
        cores: list[CoreProcess],
        stop: StopSignals,
        serve: Callable[[AsyncLLM], int],
        directory: pathlib.Path,
        with_names: bool,
    ) -> None:
        self._config = config
        self._group = group
        self._cores = cores
        self._stop = stop
        self._serve = serve
        self._directory = directory
        self._with_names = with_names

    def run(self, index: int, pipes: list[tuple[int, int]]) -> None:
        """The process of one API server.

        Args:
            index: its number.
            pipes: of all, read end and write end.
        """
        # Ctrl-C in a terminal is for the parent, which passes it on
        os.setpgid(0, 0)
        if self._with_names:
            name_process(f"ApiServer_{index}")
        for other, (read_end, write_end) in enumerate(pipes):
            os.close(write_end)
            if other != index:
                os.close(read_end)
        self._group.join(index)
        for core in self._cores:
            core.detach()
        self._group.cores = [AttachedCore(*core.addresses[index]) for core in self._cores]
        threading.Thread(target=self._follow_parent, args=(pipes[index][0],), name="parent", daemon=True).start()
        sys.exit(self._exit_code())

    def _exit_code(self) -> int:
        try:
            return self._run_server()
        except AscendVllmError as error:
            if self._group.is_first:
                # the others have the same
                logger.error("%s", error)
            return _EXIT_USAGE if isinstance(error, ConfigError) else _EXIT_FAILURE
        except (KeyboardInterrupt, asyncio.CancelledError):
            return _INTERRUPTED

    def _run_server(self) -> int:
        # the parent held signals back while it forked
        self._stop.release()
        from ascend_vllm.engine.async_llm import AsyncLLM

        with self._stop.held_back():
            engine = AsyncLLM(self._config, self._group)
        try:
            return self._serve(engine)
        finally:
            self._stop.hold_back()
            engine.shutdown()

    def _follow_parent(self, descriptor: int) -> None:
        """Notes the process ids and exit codes of engine cores that the parent sends; ends this process with it."""
        with os.fdopen(descriptor) as lines:
            for line in lines:
                what, rank, number = json.loads(line)
                core = self._group.cores[rank]
                if what == "pid":
                    core.pid = number
                else:
                    core.note_exit(number)
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(_EXIT_FAILURE)
