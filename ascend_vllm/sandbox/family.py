"""Limited processes as the server sees them: started, asked with a deadline, ended, and replaced."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence

from ascend_vllm.logger import init_logger
from ascend_vllm.sandbox import child
from ascend_vllm.sandbox.child import EXIT_MEMORY, Limits, Verdict

logger = init_logger(__name__)

# for an interpreter to start, and to load what it needs, on a machine that is busy with other things
_START_S = 60.0
# for a killed process to be gone
_END_S = 10.0


class LimitExceededError(Exception):
    """A job took more than it may; the text goes on after "the job": "took longer than 3 s"."""


class TooSlowError(LimitExceededError):
    """A job took more CPU time than it may."""


class TooLateError(TooSlowError):
    """A job took longer than it may, which is not its own fault if the machine is busy with other things."""


class ProcessBrokenError(Exception):
    """A job's process ended, and no limit of it is known to be the reason; the text names the exit code."""


class _EndedError(Exception):
    """The process is gone, and gave no answer."""


class _Process:
    """One process, which takes one job at a time."""

    def __init__(
        self, command: Sequence[str], limits: Limits, pass_fds: Sequence[int], max_answer_bytes: int
    ) -> None:
        self._limits = limits
        self._max_answer_bytes = max_answer_bytes
        self._is_ready = False
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            stack.enter_context(theirs)
            # a session of its own: Ctrl-C in a terminal is not for it
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                close_fds=True,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            theirs.close()
            stack.pop_all()
        self._channel = ours

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has said so."""
        return self._is_ready

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def ask(self, job: bytes) -> tuple[Verdict, bytes]:
        """What it says to a job.

        Raises:
            TimeoutError: it took longer than it may; the process still runs.
            _EndedError: the process has ended.
        """
        try:
            if not self._is_ready:
                self._receive(time.monotonic() + _START_S)
                self._is_ready = True
            deadline = time.monotonic() + self._limits.wall_s
            self._channel.settimeout(self._limits.wall_s)
            child.send(self._channel, job)
            message = self._receive(deadline)
            return Verdict(message[0]), message[1:]
        except TimeoutError:
            raise
        except OSError as error:
            raise _EndedError from error

    def _receive(self, deadline: float) -> bytes:
        size = int.from_bytes(self._receive_exactly(child.HEAD_BYTES, deadline))
        if size > self._max_answer_bytes:
            self.kill()  # nothing that our program says
            raise _EndedError
        return self._receive_exactly(size, deadline)

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            # not 0, which would mean not to wait
            self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
            piece = self._channel.recv(min(size - len(received), 1 << 20))
            if not piece:
                raise _EndedError
            received += piece
        return bytes(received)

    def kill(self) -> None:
        """Makes the process end; the thread that waits for its answer hears of it."""
        self._process.kill()

    def wait(self) -> int:
        """The exit code of a process that ends; negative: the signal that ended it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_S)
        self.close()
        return self._process.returncode

    def close(self) -> None:
        """Ends the process, if it still runs. Only for the thread that uses it, if one does."""
        self._channel.close()
        self._process.kill()
        self._process.wait(_END_S)


class Job:
    """The work of one request in a process; it may be given up at any time, by any thread.

    Attributes:
        is_given_up: nobody wants it any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.is_given_up = False

    def begin(self, process: _Process) -> bool:
        """From now on the end of the job is the end of the process; false: it was given up before."""
        with self._lock:
            if not self.is_given_up:
                self._process = process
            return not self.is_given_up

    def end(self) -> None:
        """The process has done with it."""
        with self._lock:
            self._process = None

    def give_up(self) -> None:
        """Nobody wants the answer any more: the process that is at it ends at once."""
        with self._lock:
            self.is_given_up = True
            if self._process is not None:
                self._process.kill()


class Family:
    """Some processes of one kind, for as many threads as there are processes.

    The first job starts the processes; each one that is ended is replaced at once. Linux ends a process with the
    thread that started it: the threads must live as long as the family.

    Args:
        name: of what the processes are for, "chat templates", for the log.
        command: starts one that runs `child.serve` with the same limits.
        limits: of each job.
        size: number of processes.
        max_answer_bytes: of a longer answer the process is taken to be out of order.
        pass_fds: files that the processes inherit.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        limits: Limits,
        size: int,
        *,
        max_answer_bytes: int,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._name = name
        self._command = command
        self._limits = limits
        self._size = size
        self._max_answer_bytes = max_answer_bytes
        self._pass_fds = pass_fds
        self._lock = threading.Lock()
        self._all: set[_Process] = set()
        # the one that is taken next is the last
        self._idle: list[_Process] = []
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        with self._lock:
            return [process.pid for process in self._all]

    def ask(self, job: Job, data: bytes) -> bytes:
        """What a process answers to a job; waits for it.

        Args:
            job: by which another thread may give it up.
            data: for the process.

        Raises:
            TooSlowError: it took too long; a `TooLateError` if by the clock.
            LimitExceededError: it took too much memory.
            ProcessBrokenError: the process broke on it, or was ended.
            CancelledError: it was given up, or the family is closed.
            RuntimeError: a process did not start.
            OSError: the system starts no process.
        """
        process = self._take()
        if not job.begin(process):
            self._give_back(process)
            raise concurrent.futures.CancelledError
        try:
            verdict, answer = self._answer(process, data)
        except BaseException as error:
            job.end()
            self._replace(process)
            if job.is_given_up:
                raise concurrent.futures.CancelledError from error
            logger.warning("A process for %s was replaced: it %s", self._name, error)
            raise
        job.end()
        if Verdict.IS_LAST in verdict:
            self._replace(process)
        else:
            self._give_back(process)
        if Verdict.OUT_OF_MEMORY in verdict:
            raise self._exceeded_memory()
        return answer

    def close(self) -> None:
        """Ends all processes, and starts no others."""
        with self._lock:
            self._is_closed = True
            for process in self._idle[:]:
                self._drop(process)
            # the others are closed by the threads that wait for them
            for process in self._all:
                process.kill()
            for process in self._all:
                process.wait()

    def _answer(self, process: _Process, data: bytes) -> tuple[Verdict, bytes]:
        try:
            return process.ask(data)
        except TimeoutError:
            if not process.is_ready:
                raise RuntimeError(f"was not ready within {_START_S:g} s") from None
            raise TooLateError(f"took longer than {self._limits.wall_s:g} s") from None
        except _EndedError:
            code = process.wait()
            if not process.is_ready:
                raise RuntimeError(f"ended with code {code} when it started") from None
            if code == EXIT_MEMORY:
                raise self._exceeded_memory() from None
            if code == -signal.SIGXCPU:
                raise TooSlowError(f"took more than {self._limits.cpu_s} s of CPU time") from None
            if code == -signal.SIGABRT:
                limit = self._limits.memory_bytes >> 20
                raise LimitExceededError(
                    f"ended its process, as libraries do when they would need more than {limit} MiB of memory"
                ) from None
            raise ProcessBrokenError(f"broke its process (exit code {code})") from None

    def _exceeded_memory(self) -> LimitExceededError:
        return LimitExceededError(f"needed more than {self._limits.memory_bytes >> 20} MiB of memory")

    def _take(self) -> _Process:
        with self._lock:
            # what something else has ended meanwhile
            for process in [process for process in self._idle if not process.is_alive]:
                self._drop(process)
            self._fill()
            return self._idle.pop()

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if self._is_closed:
                self._drop(process)
            else:
                self._idle.append(process)

    def _replace(self, process: _Process) -> None:
        """Ends a process, and starts another one for it, so that the next job need not wait for it."""
        with self._lock:
            self._drop(process)
            # if the system starts none now, the next job asks it again
            with contextlib.suppress(OSError, concurrent.futures.CancelledError):
                self._fill()

    def _drop(self, process: _Process) -> None:
        process.close()
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)

    def _fill(self) -> None:
        if self._is_closed:
            raise concurrent.futures.CancelledError
        while len(self._all) < self._size:
            process = _Process(self._command, self._limits, self._pass_fds, self._max_answer_bytes)
            self._all.add(process)
            # those that are ready go before it
            self._idle.insert(0, process)
