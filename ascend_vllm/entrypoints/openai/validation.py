"""From the bytes of a body to a request: decoded, held against the limits, checked by its model.

Long bodies take time, however clean they are, and wrong ones took far more: pydantic tells of every wrong entry of a
list, once for every type that the list may have. A long body is checked up to the first wrong entry of each list
instead, lists of numbers by msgspec, and in a thread.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel
from pydantic_core import SchemaValidator, core_schema

from ascend_vllm.entrypoints.openai.errors import BodyError, decode_json
from ascend_vllm.entrypoints.openai.request_limits import check_sizes, has_more_entries

B = TypeVar("B", bound=BaseModel)

# a body of so many bytes is decoded and checked on the event loop
_SHORT_BODY = 64 * 1024
# entries of a body whose every finding is told
_SHORT_VALUE = 256
# what JSON makes of a body takes many times its size: each list or object, and each entry, is a Python object
_MAX_CONTAINERS = 1 << 17
_MAX_MEMBERS = 1 << 18
_MAX_VALUES = 1 << 23

_Ids = list[Annotated[int, msgspec.Meta(ge=0)]]


async def read_model(body: bytes, model: type[B]) -> B:
    """A body as a request.

    Raises:
        RequestError: it is not a JSON object, or too large in one of its parts.
        pydantic.ValidationError: it does not fit the model.
    """
    if len(body) <= _SHORT_BODY:
        return _read(body, model)
    return await asyncio.to_thread(_read, body, model)


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

    Raises:
        BodyError: it does.
    """
    if not _exceeding(body):
        return
    # texts may have these characters as well
    unquoted = b"".join(body.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])
    exceeding = _exceeding(unquoted)
    if exceeding:
        raise BodyError(f"The request body has too many {exceeding}. Send several requests.", "body")


def _exceeding(json: bytes) -> str | None:
    """What JSON without texts has too many of, with the number and the limit; None: of nothing."""
    num_containers, num_members = json.count(b"[") + json.count(b"{"), json.count(b":")
    counts = {
        "lists and objects": (num_containers, _MAX_CONTAINERS),
        "members of objects": (num_members, _MAX_MEMBERS),
        "values": (num_containers + json.count(b","), _MAX_VALUES),
    }
    for name, (count, most) in counts.items():
        if count > most:
            return f"{name}, {count}; it may have at most {most}"
    return None


def _read(body: bytes, model: type[B]) -> B:
    check_num_values(body)
    # null is no body
    value = decode_json(b"" if body.strip() == b"null" else body)
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
    try:
        return msgspec.convert(value, _Ids)
    except msgspec.ValidationError:
        return check(value)
