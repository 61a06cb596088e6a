"""Builds and encodes long answers off the event loop, so that they do not delay other requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from ascend_vllm.engine.text_threads import TextThread
from ascend_vllm.outputs import RequestOutput

T = TypeVar("T")

# items that are encoded at a time
_CHUNK = 8192


# up to this many tokens or numbers an answer is made on the event loop
_SHORT = 2048
# a single thread: several would leave the event loop too little of the GIL
_thread = TextThread("answers")


async def make_answer(size: int, make: Callable[[], T]) -> T:
    """Calls `make`, in a thread if the answer has many tokens or numbers (`size`); returns its result."""
    return make() if size <= _SHORT else await _thread.run(size, make)


def num_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Tokens of outputs, and of their prompts where prompt_logprobs are returned."""
    generated = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return generated + sum(len(output.prompt_logprobs or ()) for output in outputs)


async def encode_list(items: Sequence[Any]) -> Sequence[Any] | msgspec.Raw:
    """A list as a field of an answer: itself if it is short, else its JSON, encoded in a thread.

    Args:
        items: anything that msgspec can encode, each of it short.
    """
    return items if len(items) <= _CHUNK else await _thread.run(len(items), _encode, items)


def encode_rows(rows: Iterable[Any]) -> msgspec.Raw:
    """A list of short lists as JSON; the GIL can be released between them."""
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(row) for row in rows) + b"]")


def _encode(items: Sequence[Any]) -> msgspec.Raw:
    chunks = (msgspec.json.encode(items[start : start + _CHUNK])[1:-1] for start in range(0, len(items), _CHUNK))
    return msgspec.Raw(b"[" + b",".join(chunks) + b"]")
