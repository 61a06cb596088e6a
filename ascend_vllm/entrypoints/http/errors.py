"""The one error path of the HTTP servers: exception → status and JSON body.

Every error carries both shapes that clients know: ``{"error": {message, type, param, code}}`` of today and the
flat ``{"object": "error", message, type, param, code}`` of vLLM 0.6.3.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.errors import EngineDeadError, RequestError, ServerStoppingError, WorkerCallError
from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

# what an answer repeats of a wrong request: enough to find the place, not a whole prompt
_MAX_SHOWN_ERRORS = 10
_MAX_INPUT_CHARACTERS = 200
_MAX_MESSAGE_CHARACTERS = 8192
# what a line of the log tells of a field; the line is cut as well
_MAX_LOGGED_CHARACTERS = 2000
# what pydantic calls the members of a union in the place of a finding
_UNION_MEMBER = re.compile(r"str|(list|dict|literal|function-wrap)\[.*\]|constrained-\w+|[A-Z]\w+")
_FIELD_IN_TEXT = re.compile(r"`(\w+)`")


class BodyError(RequestError):
    """A request body that is not a JSON object or does not fit its model."""

    error_type = "Bad Request"


class HttpError(NamedTuple):
    """Status and body of an error answer."""

    status: int
    body: dict[str, Any]


def error_body(message: str, error_type: str, code: int, param: str | None = None) -> dict[str, Any]:
    """An error in both shapes at once: today's nested one, and the flat one of vLLM 0.6.3."""
    error = {"message": message, "type": error_type, "param": param, "code": code}
    return {"error": error, "object": "error", **error}


def to_http_error(error: BaseException) -> HttpError:
    """Status and body for any exception; an unexpected one is logged and told without details."""
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
    """pydantic's findings as one sentence per finding, in today's vLLM's layout."""
    findings = error.errors(include_url=False)
    cause = findings[0].get("ctx", {}).get("error")
    if len(findings) == 1 and not findings[0]["loc"] and isinstance(cause, ValueError):
        # a model's own check, whose text names the field
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
    """The field's path; which member of a union of types did not fit is left out."""
    return ".".join([root, *(str(part) for part in loc if not _UNION_MEMBER.fullmatch(str(part)))])


def shortened(text: str, most: int) -> str:
    """A text, or its beginning if it has more characters than that."""
    return text if len(text) <= most else text[:most] + "…"


def shown_params(params: msgspec.Struct) -> str:
    """Parameters for the log, of each field the beginning; takes no longer for long ones."""
    fields = []
    for name in params.__struct_fields__:
        value = getattr(params, name)
        text = shown_params(value) if isinstance(value, msgspec.Struct) else _beginning(value, _MAX_LOGGED_CHARACTERS)
        fields.append(f"{name}={repr(value) if text is None else text}")
    return f"{type(params).__name__}({', '.join(fields)})"


def _shortened(value: Any) -> Any:
    """A value of JSON, or the beginning of how Python writes it; takes no longer for a long one."""
    text = _beginning(value, _MAX_INPUT_CHARACTERS)
    return value if text is None else text


def _beginning(value: Any, most: int) -> str | None:
    """So many characters of how Python writes a value of JSON; None: it has no more."""
    text = ""
    for piece in _written(value, most):
        text += piece
        if len(text) > most:
            return shortened(text, most)
    return None


def _written(value: Any, most: int) -> Iterator[str]:
    """How Python writes a value of JSON, piece by piece; of texts no more than what so many characters may show."""
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
        # of a longer text its beginning is all that will be shown
        yield repr(value[: most + 1] if isinstance(value, str) else value)


def json_response(content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Any msgspec-encodable content as an application/json response."""
    return Response(msgspec.json.encode(content), status_code, headers, media_type="application/json")


def error_response(error: BaseException) -> Response:
    """The answer to a request that failed before its response began."""
    status, body = to_http_error(error)
    return json_response(body, status, retry_headers(error))


def retry_headers(error: BaseException) -> dict[str, str] | None:
    """Headers that tell when to try again; None: the error says nothing of it."""
    seconds = error.retry_after_s if isinstance(error, RequestError) else None
    return None if seconds is None else {"retry-after": str(seconds)}


class AnswerErrorsMiddleware:
    """Answers whatever leaves `app` as an exception that has no handler of its own, and requests that are cancelled.

    Starlette's own last resort answers, and raises the exception again all the same, so that the server closes the
    connection, perhaps before the client has read the answer, and with it the client's next request.

    Args:
        app: what may raise.
        answer: makes the answer.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[BaseException], Response]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; an exception after the answer began still ends the connection, which tells of it."""
        has_begun = False

        async def watched_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except (Exception, asyncio.CancelledError) as error:
            if has_begun or scope["type"] != "http":
                raise
            # nothing but the end of the server cancels a request
            told = error if isinstance(error, Exception) else ServerStoppingError()
            await self._answer(told)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    """Let every exception that leaves a route become an error answer."""

    async def answer(_request: Request, error: Exception) -> Response:
        return error_response(error)

    for kind in (RequestError, ValidationError, EngineDeadError, WorkerCallError, Exception):
        app.add_exception_handler(kind, answer)
    app.add_middleware(AnswerErrorsMiddleware, answer=error_response)
