"""Long answers, made beside the event loop: nobody else waits for their texts, vectors and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from ascend_vllm.engine.text_threads import TextThread
from ascend_vllm.outputs import RequestOutput

T = TypeVar("T")

# items that are encoded at a time
_PIECE = 8192


# tokens, or numbers, of an answer that is made in a moment
_SHORT = 2048
# one after the other: several at once would take the interpreter from the event loop more often than it has it
_thread = TextThread("answers")


async def make_answer(size: int, make: Callable[[], T]) -> T:
    """What a function makes of an answer of so many tokens or numbers, called in a thread if these are many."""
    return make() if size <= _SHORT else await _thread.run(size, make)


def num_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Tokens of outputs, and of their prompts where something is told of each of these."""
    generated = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return generated + sum(len(output.prompt_logprobs or ()) for output in outputs)


async def encode_list(items: Sequence[Any]) -> Sequence[Any] | msgspec.Raw:
    """A list that answers may hold: itself if it is short, else its JSON.

    Args:
        items: anything that msgspec can encode, each of it short.
    """
    return items if len(items) <= _PIECE else await _thread.run(len(items), _encode, items)


def encode_rows(rows: Iterable[Any]) -> msgspec.Raw:
    """A list of short lists as JSON; other threads get their turn between them."""
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(row) for row in rows) + b"]")


def _encode(items: Sequence[Any]) -> msgspec.Raw:
    pieces = (msgspec.json.encode(items[start : start + _PIECE])[1:-1] for start in range(0, len(items), _PIECE))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
