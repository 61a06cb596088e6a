"""Threads that work on texts beside the event loop: short texts never wait behind long ones.

A text is given to the thread for texts of its size. Each works on one text at a time, in the order in which they
came, so that a flood of long texts takes one core at most, at a low priority, and the memory of one of them. Whoever
does not want a result any more takes its text out of the queue, and where the texts that wait have too many
characters together, another one is refused.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ascend_vllm import envs
from ascend_vllm.errors import EngineBusyError

T = TypeVar("T")

# up to this many characters, a text takes milliseconds
SHORT = 16 * 1024
# and up to this many tenths of a second
MEDIUM = 256 * 1024
# characters that may wait for their thread; short texts are as many as there are requests
MAX_WAITING = 128 * 1024 * 1024
_MAX_WAITING_LONG = 32 * 1024 * 1024
# how much less of a busy processor the thread for the longest texts gets
_NICE_LONG = 10


@dataclasses.dataclass(eq=False, slots=True)
class _Work:
    """One text's.

    Attributes:
        size: of the text, in characters.
        run: does it.
        future: gets what comes of it.
    """

    size: int
    run: Callable[[], Any]
    future: concurrent.futures.Future[Any]


class TextThread:
    """One thread and the texts that wait for it.

    Args:
        name: of the thread.
        nice: is added to its niceness, where the system has one for threads.
        max_waiting: characters of the texts that may wait; None: any number.
        wait: what is said of those that wait, behind their number, when there are too many; {} stands for the
            characters of all of them.
    """

    def __init__(
        self,
        name: str,
        nice: int = 0,
        max_waiting: int | None = None,
        wait: str = "long texts of {} characters wait to be tokenised",
    ) -> None:
        self._executor = concurrent.futures.ThreadPoolExecutor(1, name, _prepare_thread, (nice,))
        self._max_waiting = max_waiting
        self._wait = wait
        self._lock = threading.Lock()
        self._waiting: collections.OrderedDict[_Work, None] = collections.OrderedDict()
        self._num_characters = 0

    @property
    def num_waiting(self) -> int:
        """Texts that wait."""
        return len(self._waiting)

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """What a function of a text returns.

        Args:
            size: characters of the text.
            function: is called in the thread, unless the caller is cancelled before its turn.
            args: for the function.

        Raises:
            EngineBusyError: too many characters wait already.
            Exception: what the function raises.
        """
        work = _Work(size, lambda: function(*args), concurrent.futures.Future())
        self._add(work)
        try:
            return await asyncio.wrap_future(work.future)
        except asyncio.CancelledError:
            self._remove(work)
            raise

    def close(self) -> None:
        """Ends the thread behind what it works on; what waits is cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for work in list(self._waiting):
            work.future.cancel()
            self._remove(work)

    def _add(self, work: _Work) -> None:
        with self._lock:
            limit = self._max_waiting
            if limit is not None and self._waiting and self._num_characters + work.size > limit:
                raise EngineBusyError(
                    f"The server is overloaded: {len(self._waiting)} {self._wait.format(self._num_characters)}. "
                    "Please try again later."
                )
            self._waiting[work] = None
            self._num_characters += work.size
        # who leaves the queue leaves a call behind which finds nothing to do; it does not hold the text
        self._executor.submit(self._work_on_next)

    def _remove(self, work: _Work) -> None:
        """Takes a text out of the queue, if it is still there."""
        with self._lock:
            if work in self._waiting:
                del self._waiting[work]
                self._num_characters -= work.size

    def _work_on_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            work, _ = self._waiting.popitem(last=False)
            self._num_characters -= work.size
        if not work.future.set_running_or_notify_cancel():
            return
        try:
            work.future.set_result(work.run())
        except BaseException as error:
            work.future.set_exception(error)


class TextThreads:
    """The threads for short, medium and long texts.

    Args:
        name: of the threads.
        one: what works on the texts can only be called by one thread: it works on texts of all sizes, in turn.
    """

    def __init__(self, name: str, one: bool = False) -> None:
        if one:
            short = medium = long = TextThread(name, max_waiting=MAX_WAITING)
        else:
            short = TextThread(name)
            medium = TextThread(f"{name}-medium", max_waiting=MAX_WAITING)
            long = TextThread(f"{name}-long", _NICE_LONG, _MAX_WAITING_LONG)
        self.short, self.medium, self.long = short, medium, long

    def of(self, size: int) -> TextThread:
        """The one for texts of so many characters."""
        if size <= SHORT:
            return self.short
        return self.medium if size <= MEDIUM else self.long

    def close(self) -> None:
        """Ends all of them."""
        for thread in (self.short, self.medium, self.long):
            thread.close()


def _prepare_thread(nice: int) -> None:
    """Lets the thread that calls work alone, with less of a busy processor; Linux has a niceness for each thread."""
    envs.keep_tokenizers_in_their_thread()
    if nice == 0:
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # elsewhere a thread cannot be named like this
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
