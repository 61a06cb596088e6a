"""The chat templates of requests are rendered in processes that can be ended: who is let in, and what it is told.

What runs in them, and why, is told in `process`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from ascend_vllm.entrypoints.templates import process
from ascend_vllm.entrypoints.templates.process import Answer, Limits, encode_job
from ascend_vllm.errors import EngineBusyError, RequestError
from ascend_vllm.sandbox.family import Family, Job, LimitExceededError, ProcessBrokenError

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
        # a thread for each process; they live as long as the pool
        self._threads = concurrent.futures.ThreadPoolExecutor(num_processes, "chat-template")
        self._family = Family(
            "chat templates",
            [sys.executable, "-m", process.__name__, msgspec.json.encode(limits).decode()],
            limits,
            num_processes,
            max_answer_bytes=limits.max_characters * _MAX_BYTES_PER_CHARACTER + _MAX_OTHER_BYTES,
        )
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
        job = Job()
        self._num_open += 1
        try:
            future = asyncio.get_running_loop().run_in_executor(
                self._threads, self._run, job, special_tokens, options
            )
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

    def _run(self, job: Job, special_tokens: Mapping[str, str], options: Mapping[str, Any]) -> str:
        try:
            data = encode_job(special_tokens, options)
        except (RecursionError, ValueError) as error:
            raise RequestError(f"The request cannot be handed to its chat template: {error}", "messages") from error
        try:
            answer = msgspec.json.decode(self._family.ask(job, data), type=Answer)
        except LimitExceededError as error:
            raise _exceeded(str(error)) from None
        except ProcessBrokenError as error:
            raise RequestError(f"The rendering of the request's `chat_template` {error}.", "chat_template") from None
        if answer.is_too_long:
            raise _exceeded(f"made more than {self._limits.max_characters} characters")
        if answer.text is None:
            raise RequestError(answer.error or "", answer.param)
        return answer.text


def _exceeded(what: str) -> RequestError:
    return RequestError(
        f"The rendering of the request's `chat_template` {what}, which is more than a request's own template may.",
        "chat_template",
    )
