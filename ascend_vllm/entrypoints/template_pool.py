"""Processes that render the chat templates of requests, as the server sees them: started, asked, and ended.

What runs in them, and why, is told in `template_process`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from ascend_vllm.entrypoints import template_process
from ascend_vllm.entrypoints.template_process import EXIT_MEMORY, Answer, Limits, encode_job
from ascend_vllm.errors import EngineBusyError, RequestError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

# for an interpreter to start on a machine that is busy with other things
_START_S = 60.0
# for a killed process to be gone
_END_S = 10.0
# JSON writes a character with at most so many bytes
_MAX_BYTES_PER_CHARACTER = 6
# an answer that is no text
_MAX_OTHER_BYTES = 1 << 20
# tokens of text rarely have more characters
_CHARACTERS_PER_TOKEN = 16


def limits_for(max_model_len: int) -> Limits:
    """The limits of a server: the text may be what its longest prompt can be, and 4 Mi characters in any case."""
    usual = Limits()
    num_characters = max(usual.max_characters, _CHARACTERS_PER_TOKEN * max_model_len)
    # a character takes up to four bytes, in the text, in its pieces, and in the answer
    more = 16 * (num_characters - usual.max_characters)
    return msgspec.structs.replace(usual, max_characters=num_characters, memory_bytes=usual.memory_bytes + more)


class _EndedError(Exception):
    """The process is gone, and gave no answer."""


class _Process:
    """One process, which takes one job at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._is_ready = False
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as stack:
            stack.callback(ours.close)
            stack.enter_context(theirs)
            command = [sys.executable, "-m", template_process.__name__, msgspec.json.encode(limits).decode()]
            # a session of its own: Ctrl-C in a terminal is not for it
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, close_fds=True, start_new_session=True
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

    def ask(self, job: bytes) -> Answer:
        """The answer to a job.

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
            template_process.send(self._channel, job)
            return msgspec.json.decode(self._receive(deadline), type=Answer)
        except TimeoutError:
            raise
        except OSError as error:
            raise _EndedError from error

    def _receive(self, deadline: float) -> bytes:
        size = int.from_bytes(self._receive_exactly(template_process.HEAD_BYTES, deadline))
        if size > self._limits.max_characters * _MAX_BYTES_PER_CHARACTER + _MAX_OTHER_BYTES:
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


class _Job:
    """What a request wants to be rendered; it may be given up at any time.

    Attributes:
        special_tokens: see `TemplatePool.render`.
        options: see there.
        is_given_up: nobody wants it any more.
    """

    def __init__(self, special_tokens: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self.special_tokens = special_tokens
        self.options = options
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
        """Nobody wants the text any more."""
        with self._lock:
            self.is_given_up = True
            if self._process is not None:
                self._process.kill()


class TemplatePool:
    """Renders the chat templates of requests in processes that can be ended.

    The first request starts the processes; each one that is ended is replaced at once. Jobs wait for a process in
    the order in which they came.

    Args:
        limits: of each rendering.
        num_processes: renderings at the same time.
        max_open: requests that are rendered or wait for it; more are refused.
    """

    def __init__(self, limits: Limits, num_processes: int = 2, max_open: int = 128) -> None:
        self._limits = limits
        self._max_open = max_open
        self._num_open = 0
        # A thread for each process. They start the processes, and live as long as the pool: Linux ends a process
        # with the thread that started it.
        self._threads = concurrent.futures.ThreadPoolExecutor(num_processes, "chat-template")
        self._family = _Family(limits, num_processes)
        # also at the interpreter's end, if nobody called close()
        self._finalizer = weakref.finalize(self, self._family.close)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that there are."""
        return self._family.pids

    async def render(self, special_tokens: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """The prompt's text; see `chat_template.render_chat`. Whoever cancels it ends the rendering.

        Args:
            special_tokens: variables that every template gets.
            options: the arguments of `render_chat` but for the tokenizer, as JSON has them.

        Raises:
            RequestError: the messages are wrong, the template refuses them, or a limit was exceeded.
            EngineBusyError: too many requests wait.
        """
        if self._num_open >= self._max_open:
            raise EngineBusyError(
                f"{self._num_open} requests with a `chat_template` of their own are being rendered, the most that "
                "may wait. Try again later.",
                "chat_template",
            )
        job = _Job(special_tokens, options)
        self._num_open += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(self._threads, self._run, job)
            return await future
        except asyncio.CancelledError:
            job.give_up()
            raise
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Ends the processes, and with them what they render."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()

    def _run(self, job: _Job) -> str:
        try:
            data = encode_job(job.special_tokens, job.options)
        except (RecursionError, ValueError) as error:
            raise RequestError(f"The request cannot be handed to its chat template: {error}", "messages") from error
        process = self._family.take()
        if not job.begin(process):
            self._family.give_back(process)
            raise concurrent.futures.CancelledError
        try:
            answer = self._ask(process, data)
        except BaseException as error:
            job.end()
            self._family.replace(process)
            if not job.is_given_up:
                logger.warning("A process for chat templates was replaced: %s", error)
            raise
        job.end()
        if answer.is_last:
            self._family.replace(process)
        else:
            self._family.give_back(process)
        return self._text_of(answer)

    def _ask(self, process: _Process, data: bytes) -> Answer:
        try:
            return process.ask(data)
        except TimeoutError:
            if not process.is_ready:
                raise RuntimeError(f"a process for chat templates was not ready within {_START_S:g} s") from None
            raise _exceeded(f"took longer than {self._limits.wall_s:g} s") from None
        except _EndedError:
            code = process.wait()
            if not process.is_ready:
                raise RuntimeError(f"a process for chat templates ended with code {code} when it started") from None
            raise self._end_of(code) from None

    def _end_of(self, code: int) -> RequestError:
        """What the end of a process says about the template."""
        if code == EXIT_MEMORY:
            return self._exceeded_memory()
        if code == -signal.SIGXCPU:
            return _exceeded(f"took more than {self._limits.cpu_s} s of CPU time")
        return RequestError(
            f"The rendering of the request's `chat_template` broke its process (exit code {code}).", "chat_template"
        )

    def _exceeded_memory(self) -> RequestError:
        return _exceeded(f"needed more than {self._limits.memory_bytes >> 20} MiB of memory")

    def _text_of(self, answer: Answer) -> str:
        if answer.text is not None:
            return answer.text
        if answer.exceeded == "memory":
            raise self._exceeded_memory()
        if answer.exceeded is not None:
            raise _exceeded(f"made more than {self._limits.max_characters} characters")
        raise RequestError(answer.error or "", answer.param)


def _exceeded(what: str) -> RequestError:
    return RequestError(
        f"The rendering of the request's `chat_template` {what}, which is more than a request's own template may.",
        "chat_template",
    )


class _Family:
    """All processes of a pool, and which of them are idle; for as many threads as there are processes."""

    def __init__(self, limits: Limits, size: int) -> None:
        self._limits = limits
        self._size = size
        self._lock = threading.Lock()
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        with self._lock:
            return [process.pid for process in self._all]

    def take(self) -> _Process:
        """An idle process.

        Raises:
            OSError: the system starts no process.
            CancelledError: the pool is closed.
        """
        with self._lock:
            # what something else has ended meanwhile
            for process in [process for process in self._idle if not process.is_alive]:
                self._drop(process)
            self._fill()
            return self._idle.pop()

    def give_back(self, process: _Process) -> None:
        """Takes back a process that can be used again."""
        with self._lock:
            if self._is_closed:
                self._drop(process)
            else:
                self._idle.append(process)

    def replace(self, process: _Process) -> None:
        """Ends a process, and starts another one for it, so that the next request need not wait for it."""
        with self._lock:
            self._drop(process)
            # if the system starts none now, the next request asks it again
            with contextlib.suppress(OSError, concurrent.futures.CancelledError):
                self._fill()

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

    def _drop(self, process: _Process) -> None:
        process.close()
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)

    def _fill(self) -> None:
        if self._is_closed:
            raise concurrent.futures.CancelledError
        while len(self._all) < self._size:
            process = _Process(self._limits)
            self._all.add(process)
            self._idle.append(process)
