"""Long JSON, decoded in parts: what does not end for milliseconds keeps all other threads from the interpreter."""

from __future__ import annotations

from typing import Any

import msgspec

# bytes that are decoded at once, if they are numbers of a list
_PART = 1 << 16
# what such a list is made of
_NUMBERS = b"0123456789+-.eE, \t\r\n"

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_in_parts(body: bytes) -> Any:
    """What msgspec makes of JSON; long lists of numbers in the fields of an object are decoded part by part.

    Raises:
        msgspec.DecodeError: it is not JSON; as if it was decoded at once.
        UnicodeDecodeError, RecursionError: likewise.
    """
    try:
        fields = _fields.decode(body)
    except msgspec.ValidationError:
        # not an object
        return msgspec.json.decode(body)
    try:
        return {name: _decode_field(raw) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError):
        # as a whole, for the place of what is wrong
        return msgspec.json.decode(body)


def _decode_field(raw: msgspec.Raw) -> Any:
    view = memoryview(raw)
    entries = _decode_numbers(view) if len(view) > _PART and view[0] == ord("[") else None
    return msgspec.json.decode(raw) if entries is None else entries


def _decode_numbers(view: memoryview) -> list[Any] | None:
    """The entries of a list; None: some are no numbers.

    Args:
        view: the JSON of a list.
    """
    entries: list[Any] = []
    start, end = 1, len(view) - 1
    while start < end:
        part = bytes(view[start : min(start + _PART, end)])
        if start + len(part) < end:
            # not in the middle of a number
            part = part[: max(part.rfind(b","), 0)]
        if not part or part.translate(None, _NUMBERS):
            return None
        entries += msgspec.json.decode(b"[" + part + b"]")
        start += len(part) + 1
    return entries
