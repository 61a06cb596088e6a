"""Decodes request bodies, enforces their limits, and validates them with their models.

pydantic reports every invalid entry of a list, once for every type of a union, which takes very long for long bodies.
So a long body is checked up to the first invalid entry of each list only, lists of numbers by msgspec, in a thread
that processes one body at a time. Long JSON is decoded in parts, since one long call would hold the GIL.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import SchemaValidator, core_schema
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.engine.text_threads import TextThread
from ascend_vllm.entrypoints.http.errors import BodyError
from ascend_vllm.entrypoints.http.streaming import ClientDisconnectedError, run_unless_disconnected
from ascend_vllm.entrypoints.openai.request_limits import (
    MAX_FIELDS,
    MAX_NESTED_ENTRIES,
    MAX_PROMPTS,
    check_sizes,
    has_more_entries,
)
from ascend_vllm.errors import RequestError

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")

# up to this many bytes a body is decoded and checked on the event loop
_SHORT_BODY = 64 * 1024
# up to this many it does not wait for longer ones
_MEDIUM_BODY = 1 << 20
# limit of bytes in a thread's queue
_MAX_WAITING = 256 << 20
# up to this many entries all errors of a body are reported
_SHORT_VALUE = 256
# Limits of JSON values: decoded, a body takes many times its size, since each list, object and entry is a Python
# object. Nested values have at most `MAX_NESTED_ENTRIES` of them, in addition to fields and prompts.
_MOST = {
    "lists and objects": MAX_PROMPTS + MAX_FIELDS,
    "members of objects": MAX_NESTED_ENTRIES + MAX_FIELDS,
    "texts": 2 * MAX_NESTED_ENTRIES + 2 * MAX_PROMPTS,
    "values": 1 << 23,
}
# bytes, or entries of a list, that are processed in one call
_PART = 1 << 16
# bytes that `check_num_values` ignores
_UNCOUNTED = bytes(set(range(256)) - set(b'[{:,"'))

# the bytes of a list of numbers
_NUMBERS = b"0123456789+-.eE, \t\r\n"
# the position in msgspec's errors
_BYTE = re.compile(r"\(byte (\d+)\)$")
# longest body that Python's json retries after msgspec has refused it: it would hold the GIL for hundreds of
# milliseconds on longer ones
_MAX_LENIENT_BYTES = 1 << 20

# not of a low priority, since they hold the GIL
_medium_bodies = TextThread("medium-bodies", max_waiting=_MAX_WAITING, wait="bodies of {} bytes wait to be read")
_long_bodies = TextThread("long-bodies", max_waiting=_MAX_WAITING, wait="bodies of {} bytes wait to be read")

_Ids = list[Annotated[int, msgspec.Meta(ge=0)]]
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyTooLargeError(RequestError):
    """The body of a request exceeds --max-body-bytes."""

    status_code = 413
    error_type = "RequestEntityTooLargeError"


class BodyLimitMiddleware:
    """Refuses to receive more of a body than the limit.

    The error is raised where the body is read, so that it is answered like every other error, after the key was
    checked and with all headers. A body whose declared length is too large is not read at all.

    Args:
        app: the application.
        max_bytes: of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            receive = self._limited(Headers(scope=scope).get("content-length", ""), receive)
        await self._app(scope, receive, send)

    def _limited(self, declared: str, receive: Receive) -> Receive:
        num_bytes = int(declared) if declared.isdecimal() else 0
        is_whole = False
        is_first = True

        async def receive_limited() -> Message:
            nonlocal num_bytes, is_whole, is_first
            if is_first:
                self._check(num_bytes)
                is_first, num_bytes = False, 0
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                self._check(num_bytes)
                is_whole = not message.get("more_body", False)
            elif not is_whole:
                # the client has disconnected: no error needs to be sent
                raise ClientDisconnectedError
            return message

        return receive_limited

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(
                f"The request body is larger than the {self._max_bytes} bytes that --max-body-bytes allows.", "body"
            )


def add_body_route(
    app: FastAPI,
    path: str,
    model: type[B],
    answer: Callable[[B, Request], Awaitable[Response]],
    name: str,
    answer_error: Callable[[Exception], Response] | None = None,
) -> None:
    """Adds a POST route whose JSON body is read by `read_body`, not by FastAPI.

    Args:
        app: the application.
        path: of the route.
        model: of the body, which the OpenAPI document describes.
        answer: makes the answer to a request.
        name: of the operation in the OpenAPI document.
        answer_error: makes answers of exceptions; None: they are passed on to the application's handlers.
    """

    async def create(http: Request) -> Response:
        try:
            return await answer(await read_body(http, model), http)
        except ClientDisconnectedError:
            raise
        except Exception as error:
            if answer_error is None:
                raise
            return answer_error(error)

    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    described = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    app.add_api_route(path, create, methods=["POST"], name=name, openapi_extra=described)
    route = app.router.routes[-1]
    if isinstance(route, APIRoute):
        # without FastAPI's part of a call, which looks for parameters and dependencies, and there are none
        route.app = request_response(create)


async def read_body(http: Request, model: type[B]) -> B:
    """The JSON body of a request as its model.

    Raises:
        RequestError: it is not a JSON object, a part of it is too large, or too many long bodies are queued.
        pydantic.ValidationError: it does not fit the model.
        ClientDisconnectedError: the client went away.
    """
    content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise BodyError("1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed")
    return await read_by(http, _read, model)


async def read_by(http: Request, function: Callable[..., T], *args: Any) -> T:
    """Calls a function with the body of a request, off the event loop if the body is long.

    Args:
        http: the request.
        function: called with the body and `args`.
        args: further arguments.

    Raises:
        EngineBusyError: too many long bodies are queued.
        ClientDisconnectedError: the client went away.
        Exception: what the function raises.
    """
    body = await http.body()
    if len(body) <= _SHORT_BODY:
        return function(body, *args)
    thread = _medium_bodies if len(body) <= _MEDIUM_BODY else _long_bodies
    return await run_unless_disconnected(http.receive, thread.run(len(body), function, body, *args))


def read_json(body: bytes) -> Any:
    """The value of a JSON body.

    Raises:
        BodyError: it is empty, not JSON, not text, or has too many values.
    """
    check_num_values(body)
    return decode_json(body)


def validated(model: type[B], value: dict[str, Any]) -> B:
    """A JSON object as a request.

    Raises:
        RequestError: a part of it is too large.
        pydantic.ValidationError: it does not fit the model.
    """
    check_sizes(value)
    if not has_more_entries(value, _SHORT_VALUE):
        return model.model_validate(value)
    result: B = _brief_validator(model).validate_python(value)
    return result


def check_num_values(body: bytes) -> None:
    """Refuses a body of too many small values, which would take many times its size as objects.

    It is counted in parts, up to the one that exceeds a limit, so that the GIL is released in between.

    Raises:
        BodyError: it has too many.
    """
    counts = dict.fromkeys(_MOST, 0)
    is_text = False
    for part in _parts(body):
        # strings are skipped, since they may contain the characters that are counted
        pieces = part.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _UNCOUNTED).split(b'"')
        outside = b"".join(pieces[is_text::2])
        num_containers = outside.count(b"[") + outside.count(b"{")
        counts["lists and objects"] += num_containers
        counts["members of objects"] += outside.count(b":")
        counts["values"] += num_containers + outside.count(b",")
        # strings that begin in this part: at every other quotation mark
        counts["texts"] += (len(pieces) - is_text) // 2
        is_text ^= len(pieces) % 2 == 0
        for name, most in _MOST.items():
            if counts[name] > most:
                raise BodyError(
                    f"The request body has too many {name}; it may have at most {most}. Send several requests.",
                    "body",
                )


def _parts(body: bytes) -> Iterator[bytes]:
    """A body in parts, none of which ends within an escape sequence."""
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
        # null counts as an empty body
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
    """The model's validator, but with `fail_fast` lists."""
    return SchemaValidator(_brief(model.__pydantic_core_schema__))


def _brief(schema: Any) -> Any:
    """The schema with `fail_fast` set in all its list schemas."""
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
    """Validates a list of integers ≥ 0 with msgspec; leaves all other values to pydantic."""
    if not isinstance(value, list):
        return check(value)
    try:
        # in parts, so that the GIL is released in between
        for start in range(0, len(value), _PART):
            msgspec.convert(value[start : start + _PART], _Ids)
    except msgspec.ValidationError:
        return check(value)
    return value


def decode_in_parts(body: bytes) -> Any:
    """Decodes JSON with msgspec; long lists of numbers in the fields of an object are decoded part by part.

    Raises:
        msgspec.DecodeError: it is not JSON; the error is that of decoding it at once.
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
        # as a whole, for the error's position
        return msgspec.json.decode(body)


def _decode_field(raw: msgspec.Raw) -> Any:
    view = memoryview(raw)
    entries = _decode_numbers(view) if len(view) > _PART and view[0] == ord("[") else None
    return msgspec.json.decode(raw) if entries is None else entries


def _decode_numbers(view: memoryview) -> list[Any] | None:
    """The entries of a list of numbers; None: some are not numbers.

    Args:
        view: the JSON of a list.
    """
    entries: list[Any] = []
    start, end = 1, len(view) - 1
    while start < end:
        part = bytes(view[start : min(start + _PART, end)])
        if start + len(part) < end:
            # cut at a comma
            part = part[: max(part.rfind(b","), 0)]
        if not part or part.translate(None, _NUMBERS):
            return None
        entries += msgspec.json.decode(b"[" + part + b"]")
        start += len(part) + 1
    return entries


def decode_json(body: bytes) -> Any:
    """A request body's JSON.

    Raises:
        BodyError: it is empty, not JSON, or not text.
    """
    if not body.strip():
        raise BodyError("1 validation error:\n  {'type': 'missing', 'loc': 'body', 'msg': 'Field required'}", "body")
    try:
        return decode_in_parts(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if len(body) <= _MAX_LENIENT_BYTES:
            return _decode_json_leniently(body)
        found = _BYTE.search(str(error)) if isinstance(error, msgspec.DecodeError) else None
        if found is None:
            raise BodyError(f"The request body cannot be decoded: {error}", "body") from error
        raise _wrong_json(int(found[1]), str(error)) from error


def _decode_json_leniently(body: bytes) -> Any:
    """Decodes with Python's json, which also accepts NaN, and reports its errors."""
    try:
        value = json.loads(body)
        # a lone surrogate ("\\ud800") is not a character, and would make the tokenizer fail
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _wrong_json(error.pos, error.msg) from error
    except (UnicodeError, RecursionError, ValueError) as error:
        raise BodyError(f"The request body cannot be decoded: {error}", "body") from error
    return value


def _wrong_json(position: int, message: str) -> BodyError:
    """The error of invalid JSON, in pydantic's format."""
    place = f"body.{position}"
    finding = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "ctx": message}
    return BodyError(f"1 validation error:\n  {finding}", place)
