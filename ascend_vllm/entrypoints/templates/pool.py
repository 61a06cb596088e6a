"""The chat templates of requests, rendered in limited processes (`process` runs in them, `sandbox` limits them)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import datetime
import json
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from ascend_vllm.entrypoints.templates import process
from ascend_vllm.entrypoints.templates.process import Answer, exceeded
from ascend_vllm.errors import EngineBusyError, RequestError
from ascend_vllm.sandbox import child
from ascend_vllm.sandbox.pool import Job, LimitExceededError, Pool, ProcessBrokenError

# most bytes of a character in JSON
_MAX_BYTES_PER_CHARACTER = 6
# an answer that is no text
_MAX_OTHER_BYTES = 1 << 20
# tokens of text rarely have more characters
_CHARACTERS_PER_TOKEN = 16


class Limits(child.Limits, frozen=True, kw_only=True):
    """Limits of one rendering.

    Attributes:
        max_characters: of the text.
    """

    wall_s: float = 3.0
    cpu_s: int = 5
    memory_bytes: int = 384 << 20
    max_characters: int = 4 << 20


def limits_for(max_model_len: int) -> Limits:
    """The limits of a server: the text may be what its longest prompt can be, and 4 Mi characters in any case."""
    usual = Limits()
    num_characters = max(usual.max_characters, _CHARACTERS_PER_TOKEN * max_model_len)
    # a character takes up to four bytes: in the text, in the parts it is joined from, and in the answer
    more = 16 * (num_characters - usual.max_characters)
    return msgspec.structs.replace(usual, max_characters=num_characters, memory_bytes=usual.memory_bytes + more)


class TemplatePool:
    """Renders the chat templates of requests in limited processes, which the first request starts.

    Args:
        limits: of each rendering.
        num_processes: renderings at the same time.
        max_open: requests that are rendered or wait for it; more are refused.
    """

    def __init__(self, limits: Limits, num_processes: int = 2, max_open: int = 128) -> None:
        self._max_open = max_open
        self._num_open = 0
        # a thread for each process, until the pool is closed
        self._threads = concurrent.futures.ThreadPoolExecutor(num_processes, "chat-template")
        self._pool = Pool(
            "chat templates",
            f"{process.__name__}:prepare",
            limits,
            num_processes,
            max_answer_bytes=limits.max_characters * _MAX_BYTES_PER_CHARACTER + _MAX_OTHER_BYTES,
            setup=str(limits.max_characters).encode(),
        )
        # runs at interpreter exit if close() was not called
        self._finalizer = weakref.finalize(self, self._pool.close)

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def render(self, special_tokens: Mapping[str, str], options: Mapping[str, Any]) -> str:
        """The prompt's text; see `chat_template.render_chat`. Cancelling it ends the rendering.

        Args:
            special_tokens: variables that every template gets, such as ``bos_token``.
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
        job, loop = Job(), asyncio.get_running_loop()
        self._num_open += 1
        try:
            return await loop.run_in_executor(self._threads, self._render, job, special_tokens, options)
        except asyncio.CancelledError:
            job.give_up()
            raise
        finally:
            self._num_open -= 1

    def close(self) -> None:
        """Ends the processes, and with them what they render."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()

    def _render(self, job: Job, special_tokens: Mapping[str, str], options: Mapping[str, Any]) -> str:
        # read here, since the limited process does not know the time zone
        now = datetime.datetime.now().isoformat()
        try:
            # Python's json, unlike msgspec's, preserves NaN, infinities and integers of any size
            data = json.dumps({"special_tokens": special_tokens, "now": now, "options": options}).encode()
        except (RecursionError, ValueError) as error:
            raise RequestError(f"The request cannot be handed to its chat template: {error}", "messages") from error
        try:
            answer = msgspec.json.decode(self._pool.run(job, data), type=Answer)
        except LimitExceededError as error:
            raise exceeded(str(error)) from None
        except ProcessBrokenError as error:
            raise RequestError(f"The rendering of the request's `chat_template` {error}.", "chat_template") from None
        if answer.text is None:
            raise RequestError(answer.error or "", answer.param)
        return answer.text
