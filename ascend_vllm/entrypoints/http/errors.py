"""The one error path of the HTTP servers: exception → status and JSON body.

Every error body has both formats: today's ``{"error": {message, type, param, code}}`` and the flat
``{"object": "error", message, type, param, code}`` of vLLM 0.6.3.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.errors import EngineDeadError, RequestError, ServerStoppingError, WorkerCallError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

# limits of what an error answer repeats of an invalid request
_MAX_SHOWN_ERRORS = 10
_MAX_INPUT_CHARACTERS = 200
_MAX_MESSAGE_CHARACTERS = 8192
# of a field in a log line; the line is truncated, too
_MAX_LOGGED_CHARACTERS = 2000
# pydantic's names of union members in an error's location
_UNION_MEMBER = re.compile(r"str|(list|dict|literal|function-wrap)\[.*\]|constrained-\w+|[A-Z]\w+")
_FIELD_IN_TEXT = re.compile(r"`(\w+)`")
# of an unknown path
_MAX_PATH_CHARACTERS = 200


class BodyError(RequestError):
    """A request body that is not a JSON object or does not fit its model."""

    error_type = "Bad Request"


class HttpError(NamedTuple):
    """Status and body of an error answer."""

    status: int
    body: dict[str, Any]


def error_body(message: str, error_type: str, code: int, param: str | None = None) -> dict[str, Any]:
    """The body of an error, in both formats."""
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return {"error": error, "object": "error", **error}


def to_http_error(error: BaseException) -> HttpError:
    """Status and body for any exception; an unexpected one is logged, and its details are not sent."""
    if isinstance(error, ValidationError):
        error = validation_error(error)
    if isinstance(error, RequestError):
        message = shortened(str(error), _MAX_MESSAGE_CHARACTERS)
        return HttpError(error.status_code, error_body(message, error.error_type, error.status_code, error.param))
    if isinstance(error, EngineDeadError | WorkerCallError):
        return HttpError(
            error.status_code,
            error_body(str(error) or "The engine is dead.", error.error_type, error.status_code),
        )
    logger.error("Unexpected error while answering a request", exc_info=error)
    return HttpError(500, error_body("Internal server error", "InternalServerError", 500))


def validation_error(error: ValidationError, root: str = "body") -> RequestError:
    """pydantic's errors, one a line, in today's vLLM's layout."""
    findings = error.errors(include_url=False)
    cause = findings[0].get("ctx", {}).get("error")
    if len(findings) == 1 and not findings[0]["loc"] and isinstance(cause, ValueError):
        # raised by a model's own validator, whose text names the field
        named = _FIELD_IN_TEXT.search(str(cause))
        return cause if isinstance(cause, RequestError) else RequestError(str(cause), named[1] if named else None)
    lines = [
        {
            "type": finding["type"],
            "loc": _location(finding["loc"], root),
            "msg": finding["msg"],
            "input": _shortened(finding["input"]),
        }
        for finding in findings[:_MAX_SHOWN_ERRORS]
    ]
    more = [f"… and {len(findings) - len(lines)} more"] if len(findings) > len(lines) else []
    message = "\n".join(
        [
            f"{len(findings)} validation error{'s' if len(findings) > 1 else ''}:",
            *(f"  {line}" for line in lines),
            *more,
        ]
    )
    return BodyError(message, param=_location(findings[0]["loc"], root))


def _location(loc: tuple[int | str, ...], root: str) -> str:
    """The field's path, without names of union members."""
    return ".".join([root, *(str(part) for part in loc if not _UNION_MEMBER.fullmatch(str(part)))])


def shortened(text: str, most: int) -> str:
    """A text, truncated to `most` characters."""
    return text if len(text) <= most else text[:most] + "…"


def shown_params(params: msgspec.Struct) -> str:
    """Parameters for the log, each field truncated; the time is bounded."""
    fields = []
    for name in params.__struct_fields__:
        value = getattr(params, name)
        text = shown_params(value) if isinstance(value, msgspec.Struct) else _beginning(value, _MAX_LOGGED_CHARACTERS)
        fields.append(f"{name}={repr(value) if text is None else text}")
    return f"{type(params).__name__}({', '.join(fields)})"


def _shortened(value: Any) -> Any:
    """A JSON value, or the beginning of its repr if that is long; the time is bounded."""
    text = _beginning(value, _MAX_INPUT_CHARACTERS)
    return value if text is None else text


def _beginning(value: Any, most: int) -> str | None:
    """The first `most` characters of a JSON value's repr; None: it is not longer."""
    text = ""
    for part in _written(value, most):
        text += part
        if len(text) > most:
            return shortened(text, most)
    return None


def _written(value: Any, most: int) -> Iterator[str]:
    """Parts of a JSON value's repr; strings are truncated to `most` + 1 characters before."""
    if isinstance(value, list):
        yield "["
        for index, item in enumerate(value):
            yield ", " if index else ""
            yield from _written(item, most)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for index, (name, item) in enumerate(value.items()):
            yield ", " if index else ""
            yield from _written(name, most)
            yield ": "
            yield from _written(item, most)
        yield "}"
    else:
        # no more of a string is ever shown
        yield repr(value[: most + 1] if isinstance(value, str) else value)


def json_response(content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any msgspec-encodable content as an application/json response."""
    return Response(msgspec.json.encode(content), status_code, headers, media_type="application/json")


def error_response(error: BaseException) -> Response:
    """The answer to a request that failed before its response began."""
    status, body = to_http_error(error)
    return json_response(body, status, retry_headers(error))


def retry_headers(error: BaseException) -> dict[str, str] | None:
    """The Retry-After header; None: the error has none."""
    seconds = error.retry_after_s if isinstance(error, RequestError) else None
    return None if seconds is None else {"retry-after": str(seconds)}


class AnswerErrorsMiddleware:
    """Answers exceptions that have no handler, and cancelled requests.

    Starlette's ServerErrorMiddleware answers and raises the exception again, so that the server closes the
    connection, perhaps before the client has read the answer or while it sends its next request.

    Args:
        app: the application.
        answer: makes the response.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[BaseException], Response]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; an exception after the response has begun closes the connection."""
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except (Exception, asyncio.CancelledError) as error:
            if has_begun or scope["type"] != "http":
                raise
            # requests are cancelled only by the server's shutdown
            shown = error if isinstance(error, Exception) else ServerStoppingError()
            await self._answer(shown)(scope, receive, send)


def _router_response(http: Request, error: HTTPException) -> Response:
    """The router's answer to an unknown path, with the nearest route, or to a wrong method, with the right ones."""
    status, headers = error.status_code, dict(error.headers or {})
    message, kind = str(error.detail), HTTPStatus(status).phrase
    path = shortened(http.scope["path"].removeprefix(http.scope.get("root_path", "")), _MAX_PATH_CHARACTERS)
    if status == HTTPStatus.NOT_FOUND:
        nearest = _nearest_route(http.app, path)
        question = "" if nearest is None else f" Did you mean {nearest}?"
        message, kind = f"{message}: there is no route {path}.{question}", "NotFoundError"
    elif status == HTTPStatus.METHOD_NOT_ALLOWED:
        matching = [route for route in http.app.routes if route.matches(http.scope)[0] is not Match.NONE]
        methods = ", ".join(sorted({method for route in matching for method in getattr(route, "methods", ())}))
        message, headers["Allow"] = f"{message}: the route {path} takes {methods}, not {http.method}.", methods
    return json_response(error_body(message, kind, status), status, headers)


def _nearest_route(app: FastAPI, path: str) -> str | None:
    """The route with the path most like this one; None: none is like it."""
    import difflib

    segments = path.split("/")
    candidates: dict[str, str] = {}
    for route in app.routes:
        if not getattr(route, "include_in_schema", False):
            continue
        declared: str = getattr(route, "path", "")
        parts = declared.split("/")
        if len(parts) == len(segments):
            # a parameter may have any value
            pairs = zip(parts, segments, strict=True)
            parts = [segment if part.startswith("{") else part for part, segment in pairs]
        candidates.setdefault("/".join(parts), declared)
    found = difflib.get_close_matches(path, candidates, n=1)
    return candidates[found[0]] if found else None


def install_error_handlers(app: FastAPI) -> None:
    """Let every exception that leaves a route become an error answer, also for unknown paths and methods."""

    async def answer(_request: Request, error: Exception) -> Response:
        return error_response(error)

    async def answer_router(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _router_response(http, error)

    app.add_exception_handler(HTTPException, answer_router)
    for kind in (RequestError, ValidationError, EngineDeadError, WorkerCallError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_middleware(AnswerErrorsMiddleware, answer=error_response)
