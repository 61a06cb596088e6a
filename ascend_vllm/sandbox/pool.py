"""Pools of limited processes: started, given jobs with a deadline, killed, and replaced."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import msgspec

from ascend_vllm.logger import init_logger
from ascend_vllm.sandbox.child import EXIT_MEMORY, Limits

logger = init_logger(__name__)

# for an interpreter to start, and to load what it needs, on a busy machine
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


class _Process:
    """One process, which takes one job at a time; `kill` is for any thread, the rest for the one that uses it."""

    def __init__(self, command: list[str], descriptor: int) -> None:
        self.channel, theirs = multiprocessing.Pipe()
        self.is_ready = self.is_late = False
        with theirs:
            # a session of its own: Ctrl-C in a terminal is not for it
            self.popen = subprocess.Popen(
                [*command, str(descriptor)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,
            )

    def run(self, data: bytes, wall_s: float, max_answer_bytes: int) -> bytes:
        """What the process says to a job.

        Raises:
            EOFError, OSError: it has ended, was killed, or says too much.
        """
        if not self.is_ready:
            if not self.channel.poll(_START_S):
                raise RuntimeError(f"was not ready within {_START_S:g} s")
            self.channel.recv_bytes(0)
            self.is_ready = True
        timer = threading.Timer(wall_s, self._kill_late)
        timer.start()
        try:
            self.channel.send_bytes(data)
            return self.channel.recv_bytes(max_answer_bytes + 1)
        finally:
            timer.cancel()
            # it must not kill the process in the next job
            timer.join()

    def _kill_late(self) -> None:
        self.is_late = True
        self.kill()

    def kill(self) -> None:
        """Ends the process, whose channel then ends for the thread that waits for an answer."""
        self.popen.kill()

    def exit_code(self) -> int:
        """Of a process that ends by itself, or is killed for not doing so; negative: the signal that ended it."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.popen.wait(_END_S)
        self.close()
        return self.popen.returncode

    def close(self) -> None:
        """Ends the process, if it still runs."""
        self.channel.close()
        self.popen.kill()
        self.popen.wait(_END_S)


class Job:
    """What one request has a process do; any thread may give it up at any time.

    Attributes:
        is_given_up: nobody wants it any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.is_given_up = False

    def begin(self, process: _Process) -> bool:
        """From now on to give up the job is to kill the process; false: it was given up before."""
        with self._lock:
            self._process = None if self.is_given_up else process
            return not self.is_given_up

    def end(self) -> None:
        """The process is done with it."""
        with self._lock:
            self._process = None

    def give_up(self) -> None:
        """Nobody wants the answer any more: the process that works on it is killed."""
        with self._lock:
            self.is_given_up = True
            if self._process is not None:
                self._process.kill()


class Pool:
    """Limited processes of one kind, for as many threads as there are processes.

    The first job starts the processes; each one that ends is replaced at once. Linux ends a process with the thread
    that started it: the threads must live as long as the pool.

    Args:
        name: of what the processes are for, "chat templates", for the log.
        prepare: ``module:function`` that each process calls once with `setup`; it returns the function from jobs to
            answers, see `child`.
        limits: of each job.
        size: number of processes.
        max_answer_bytes: a process with a longer answer is taken to be out of order.
        setup: for `prepare`.
    """

    def __init__(
        self, name: str, prepare: str, limits: Limits, size: int, *, max_answer_bytes: int, setup: bytes = b""
    ) -> None:
        self._name = name
        encoded = msgspec.json.encode(limits).decode()
        self._command = [sys.executable, "-m", "ascend_vllm.sandbox.child", prepare, encoded]
        self._limits = limits
        self._size = size
        self._max_answer_bytes = max_answer_bytes
        self._setup: Any = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._setup.write(setup)
        self._setup.flush()
        self._lock = threading.Lock()
        self._all: set[_Process] = set()
        # the last one is taken next
        self._idle: list[_Process] = []
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        with self._lock:
            return [process.popen.pid for process in self._all]

    def run(self, job: Job, data: bytes) -> bytes:
        """What a process answers to a job; waits for it.

        Args:
            job: by which another thread may give it up.
            data: for the process.

        Raises:
            TooSlowError: it took too long; a `TooLateError` if by the clock.
            LimitExceededError: it took too much memory.
            ProcessBrokenError: its process broke, or was ended by somebody else.
            CancelledError: it was given up, or the pool is closed.
            RuntimeError: a process did not start.
            OSError: the system starts no process.
        """
        with self._lock:
            self._refill()
            process = self._idle.pop()
        is_usable = not job.begin(process)
        try:
            if is_usable:
                raise concurrent.futures.CancelledError
            answer = process.run(data, self._limits.wall_s, self._max_answer_bytes)
            is_usable = not answer[0]
            return answer[1:]
        except (EOFError, OSError, RuntimeError) as error:
            failure = error if isinstance(error, RuntimeError) else self._failure(process)
            if job.is_given_up:
                raise concurrent.futures.CancelledError from error
            logger.warning("A process for %s was replaced: it %s", self._name, failure)
            raise failure from None
        finally:
            job.end()
            self._take_back(process, is_usable)

    def close(self) -> None:
        """Ends all processes, and starts no others."""
        with self._lock:
            self._is_closed = True
            self._setup.close()
            for process in self._all:
                process.kill()
                process.popen.wait(_END_S)
            # the channels of the others are closed by the threads that wait for them
            for process in self._idle:
                process.channel.close()

    def _failure(self, process: _Process) -> Exception:
        """What is said of a job whose process has ended."""
        code, limits = process.exit_code(), self._limits
        memory = f"more than {limits.memory_bytes >> 20} MiB of memory"
        if process.is_late:
            return TooLateError(f"took longer than {limits.wall_s:g} s")
        if not process.is_ready:
            return RuntimeError(f"ended with code {code} when it started")
        if code == EXIT_MEMORY:
            return LimitExceededError(f"needed {memory}")
        if code == -signal.SIGXCPU:
            return TooSlowError(f"took more than {limits.cpu_s} s of CPU time")
        if code == -signal.SIGABRT:
            return LimitExceededError(f"ended its process, as libraries do when they would need {memory}")
        return ProcessBrokenError(f"broke its process (exit code {code})")

    def _take_back(self, process: _Process, is_usable: bool) -> None:
        with self._lock:
            if is_usable and not self._is_closed:
                self._idle.append(process)
                return
            process.close()
            self._all.discard(process)
            # now, so that the next job need not wait for it; if the system starts none, that one asks it again
            with contextlib.suppress(OSError, concurrent.futures.CancelledError):
                self._refill()

    def _refill(self) -> None:
        """Starts processes in the place of those that are gone; under the lock."""
        if self._is_closed:
            raise concurrent.futures.CancelledError
        # something else may have ended them
        for process in [process for process in self._idle if process.popen.poll() is not None]:
            process.close()
            self._idle.remove(process)
            self._all.remove(process)
        while len(self._all) < self._size:
            process = _Process(self._command, self._setup.fileno())
            self._all.add(process)
            # behind those that are ready
            self._idle.insert(0, process)
