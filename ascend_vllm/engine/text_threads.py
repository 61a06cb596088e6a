"""Threads that process texts off the event loop: short texts never wait for long ones.

There is a thread for each range of sizes. It processes one text at a time, first come, first served, so that a flood
of long texts takes one core at most, at a low priority, and the memory of one of them. Cancelled callers' texts are
removed from the queue, and texts are refused while those in the queue have too many characters together.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ascend_vllm import envs
from ascend_vllm.errors import EngineBusyError
from ascend_vllm.platforms.host import lower_priority

T = TypeVar("T")

# up to this many characters a text takes milliseconds
SHORT = 16 * 1024
# up to this many it takes tenths of a second
MEDIUM = 256 * 1024
# limit of characters in a thread's queue; short texts are limited by the number of requests
MAX_WAITING = 128 * 1024 * 1024
_MAX_WAITING_LONG = 32 * 1024 * 1024
# niceness of the thread for long texts
_NICE_LONG = 10


@dataclasses.dataclass(eq=False, slots=True)
class _Work:
    """A queued call for one text.

    Attributes:
        size: of the text, in characters.
        run: the call.
        future: of its result.
    """

    size: int
    run: Callable[[], Any]
    future: concurrent.futures.Future[Any]


class TextThread:
    """One thread and the queue of its texts.

    Args:
        name: of the thread.
        nice: added to the thread's niceness, where the system supports that.
        max_waiting: limit of characters in the queue; None: none.
        wait: of the error beyond that limit, the words after the number of texts; {} stands for the characters.
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
        return len(self._waiting)

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """Calls a function in the thread; returns its result.

        Args:
            size: characters of the text.
            function: not called if the caller is cancelled while it is queued.
            args: of the function.

        Raises:
            EngineBusyError: too many characters are queued.
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
        """Cancels queued calls, and ends the thread after its current one."""
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
        # a text that is removed from the queue leaves this call, which then finds nothing to do
        self._executor.submit(self._work_on_next)

    def _remove(self, work: _Work) -> None:
        """Removes a text from the queue, if it is still there."""
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
        one: use a single thread for all sizes, for functions that are not thread-safe.
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
        """The thread for texts of `size` characters."""
        if size <= SHORT:
            return self.short
        return self.medium if size <= MEDIUM else self.long

    def close(self) -> None:
        for thread in (self.short, self.medium, self.long):
            thread.close()


def _prepare_thread(nice: int) -> None:
    """Disables the tokenizers' own parallelism in the calling thread, and raises its niceness (Linux only)."""
    envs.keep_tokenizers_in_their_thread()
    if nice:
        lower_priority(nice)
