"""From the bytes of a body to a request: decoded, held against the limits, checked by its model.

Long bodies take time, however clean they are, and wrong ones took far more: pydantic tells of every wrong entry of a
list, once for every type that the list may have. A long body is checked up to the first wrong entry of each list
instead, lists of numbers by msgspec, in a thread that works on one body at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel
from pydantic_core import SchemaValidator, core_schema
from starlette.requests import Request

from ascend_vllm.engine.text_threads import TextThread
from ascend_vllm.entrypoints.http.errors import BodyError, decode_json
from ascend_vllm.entrypoints.http.streaming import run_unless_disconnected
from ascend_vllm.entrypoints.openai.request_limits import (
    MAX_FIELDS,
    MAX_NESTED_ENTRIES,
    MAX_PROMPTS,
    check_sizes,
    has_more_entries,
)

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

# a body of so many bytes is decoded and checked on the event loop
_SHORT_BODY = 64 * 1024
# and one of so many does not wait for longer ones
_MEDIUM_BODY = 1 << 20
# bytes of the bodies that may wait for their thread
_MAX_WAITING = 256 << 20
# entries of a body whose every finding is told
_SHORT_VALUE = 256
# What JSON makes of a body takes many times its size: each list or object, and each entry, is a Python object.
# What is nested has no more of them than `MAX_NESTED_ENTRIES`; fields and prompts come to them.
_MOST = {
    "lists and objects": MAX_PROMPTS + MAX_FIELDS,
    "members of objects": MAX_NESTED_ENTRIES + MAX_FIELDS,
    "texts": 2 * MAX_NESTED_ENTRIES + 2 * MAX_PROMPTS,
    "values": 1 << 23,
}
# what a body is read for in parts of so many bytes, and what is not counted in them
_PART = 1 << 16
_UNCOUNTED = bytes(set(range(256)) - set(b'[{:,"'))

# not of a low priority: they hold the interpreter, for which others would wait
_medium_bodies = TextThread("medium-bodies", max_waiting=_MAX_WAITING, wait="bodies of {} bytes wait to be read")
_long_bodies = TextThread("long-bodies", max_waiting=_MAX_WAITING, wait="bodies of {} bytes wait to be read")

_Ids = list[Annotated[int, msgspec.Meta(ge=0)]]


async def read_model(http: Request, model: type[B]) -> B:
    """The body of a request as its model.

    Raises:
        RequestError: it is not a JSON object, too large in one of its parts, or too many long ones wait.
        pydantic.ValidationError: it does not fit the model.
        ClientDisconnectedError: the client went away.
    """
    return await read_by(http, _read, model)


async def read_by(http: Request, function: Callable[..., T], *args: Any) -> T:
    """What a function makes of the body of a request; it is called beside the event loop if the body is long.

    Args:
        http: the request.
        function: of the body.
        args: for the function, behind the body.

    Raises:
        EngineBusyError: too many long bodies wait.
        ClientDisconnectedError: the client went away.
        Exception: what the function raises.
    """
    body = await http.body()
    if len(body) <= _SHORT_BODY:
        return function(body, *args)
    thread = _medium_bodies if len(body) <= _MEDIUM_BODY else _long_bodies
    return await run_unless_disconnected(http.receive, thread.run(len(body), function, body, *args))


def read_json(body: bytes) -> Any:
    """What the JSON of a body says.

    Raises:
        BodyError: it is empty, not JSON, not text, or has too many values.
    """
    check_num_values(body)
    return decode_json(body)


def validated(model: type[B], value: dict[str, Any]) -> B:
    """An object of JSON as a request.

    Raises:
        RequestError: it is too large in one of its parts.
        pydantic.ValidationError: it does not fit the model.
    """
    check_sizes(value)
    if not has_more_entries(value, _SHORT_VALUE):
        return model.model_validate(value)
    result: B = _brief_validator(model).validate_python(value)
    return result


def check_num_values(body: bytes) -> None:
    """Refuses a body of too many small values, which would take many times its size as objects.

    It is looked at in parts, up to the one with which a limit is exceeded, so that other threads have their turns.

    Raises:
        BodyError: it has too many.
    """
    counts = dict.fromkeys(_MOST, 0)
    is_text = False
    for part in _parts(body):
        # texts may have the characters that are counted here as well
        pieces = part.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _UNCOUNTED).split(b'"')
        outside = b"".join(pieces[is_text::2])
        num_containers = outside.count(b"[") + outside.count(b"{")
        counts["lists and objects"] += num_containers
        counts["members of objects"] += outside.count(b":")
        counts["values"] += num_containers + outside.count(b",")
        # those that begin here: with every other quotation mark
        counts["texts"] += (len(pieces) - is_text) // 2
        is_text ^= len(pieces) % 2 == 0
        for name, most in _MOST.items():
            if counts[name] > most:
                raise BodyError(
                    f"The request body has too many {name}; it may have at most {most}. Send several requests.",
                    "body",
                )


def _parts(body: bytes) -> Iterator[bytes]:
    """A body in parts, none of which ends between a backslash and what it stands in front of."""
    start = 0
    while start < len(body):
        part = body[start : start + _PART]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = body[start : start + _PART + 1]
        start += len(part)
        yield part


def _read(body: bytes, model: type[B]) -> B:
    value = read_json(body)
    if value is None:
        # null is no body
        value = decode_json(b"")
    if not isinstance(value, dict):
        raise BodyError(
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a "
            "valid dictionary or object to extract fields from'}",
            "body",
        )
    return validated(model, value)


@functools.cache
def _brief_validator(model: type[BaseModel]) -> SchemaValidator:
    """What checks as the model does, but stops at the first wrong entry of a list among its fields."""
    return SchemaValidator(_brief(model.__pydantic_core_schema__))


def _brief(schema: Any) -> Any:
    """The same schema, and those in it, with lists that stop early."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_brief, schema))
    if not isinstance(schema, dict):
        return schema
    changed = {name: _brief(value) for name, value in schema.items()}
    if changed.get("type") != "list":
        return changed
    changed["fail_fast"] = True
    if changed.get("items_schema", {}).get("type") != "int":
        return changed
    return core_schema.no_info_wrap_validator_function(_take_ids, changed)


def _take_ids(value: Any, check: Callable[[Any], Any]) -> Any:
    """A list of numbers from 0 on, as all good ones are; what else it may hold is pydantic's to say."""
    if not isinstance(value, list):
        return check(value)
    try:
        # in parts, so that other threads have their turns
        for start in range(0, len(value), _PART):
            msgspec.convert(value[start : start + _PART], _Ids)
    except msgspec.ValidationError:
        return check(value)
    return value
