"""JSON of long lists, made beside the event loop in pieces: none holds up other threads for long."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

# items that are encoded at a time
_PIECE = 8192


async def encode_list(items: Sequence[Any]) -> Sequence[Any] | msgspec.Raw:
    """A list that answers may hold: itself if it is short, else its JSON.

    Args:
        items: anything that msgspec can encode, each of it short.
    """
    return items if len(items) <= _PIECE else await asyncio.to_thread(_encode, items)


def _encode(items: Sequence[Any]) -> msgspec.Raw:
    pieces = (msgspec.json.encode(items[start : start + _PIECE])[1:-1] for start in range(0, len(items), _PIECE))
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")
