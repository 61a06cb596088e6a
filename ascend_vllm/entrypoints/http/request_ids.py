"""Ids that clients choose for their requests: validation, uniqueness, and the header of answers.

The field `request_id` of a body must be unique among the unfinished requests of a caller. The header ``X-Request-Id``
need not be, as in vLLM: proxies repeat it with retries, and services forward it to all requests that one of theirs
causes. Ids in the engine get a random suffix, and are unique in any case.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import AfterValidator
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.entrypoints.http.access import Places, caller_of
from ascend_vllm.errors import DuplicateRequestError, RequestError

if TYPE_CHECKING:
    from ascend_vllm.engine.api_group import ApiGroup

# ids are repeated in answers, headers and the log
MAX_ID_LENGTH = 256

_HEADER = "x-request-id"
_SCOPE_KEY = "ascend_vllm.claims"


def _finding(request_id: str) -> str | None:
    """What is wrong with an id; None: it is valid."""
    if len(request_id) > MAX_ID_LENGTH:
        return f"must have at most {MAX_ID_LENGTH} characters, but has {len(request_id)}"
    return None if request_id.isprintable() else "must consist of printable characters"


def _checked(request_id: str) -> str:
    finding = _finding(request_id)
    if finding is not None:
        raise ValueError(f"A request's id {finding}.")
    return request_id


# the field of a body
ChosenId = Annotated[str, AfterValidator(_checked)]


def header_id(http: Request) -> str | None:
    """The id in the request's header, if there is one.

    Raises:
        RequestError: it is too long, or has characters that cannot be printed.
    """
    request_id = http.headers.get(_HEADER)
    finding = None if request_id is None else _finding(request_id)
    if finding is not None:
        raise RequestError(f"The header X-Request-Id {finding}.", "X-Request-Id")
    return request_id


class NamedRequest(Protocol):
    """A body that may name its request."""

    request_id: str | None


class Claims:
    """The ids that one request holds until it ends.

    Args:
        places: one for each id of an unfinished request.
    """

    def __init__(self, places: Places | ApiGroup) -> None:
        self._places = places
        # give the ids back
        self._releases: list[Callable[[], None]] = []

    def take(self, caller: bytes, request_id: str) -> None:
        """Claim an id.

        Args:
            caller: see `access.caller_of`; ids need only be unique per caller.
            request_id: chosen by the client.

        Raises:
            DuplicateRequestError: an unfinished request of the caller has it.
        """
        release = self._places.take(f"id {caller!r} {request_id}")
        if release is None:
            raise DuplicateRequestError(
                f"A request with the id '{request_id}' is running already. Wait for its end, or choose another "
                "`request_id`.",
                "request_id",
            )
        self._releases.append(release)

    def release(self) -> None:
        """Release the ids. May be called again."""
        for release in self._releases:
            release()
        self._releases.clear()

    def hand_over(self) -> Claims:
        """Moves the ids to a new object, for a request that goes on after its answer."""
        other = Claims(self._places)
        other._releases, self._releases = self._releases, []
        return other


def claims_of(http: Request) -> Claims:
    """The ids of a request that came through the middleware."""
    claims: Claims = http.scope[_SCOPE_KEY]
    return claims


def make_response_id(request: NamedRequest, prefix: str, http: Request) -> str:
    """The id of an answer: the prefix and the client's id, or a random one. Claims the id in the body.

    Raises:
        DuplicateRequestError: another unfinished request has the id in the body.
        RequestError: the id in the header is invalid.
    """
    return f"{prefix}-{claim_id(request, http) or header_id(http) or secrets.token_hex(8)}"


def claim_id(request: NamedRequest, http: Request) -> str | None:
    """Claims and returns the id in a request's body; None: it has none.

    Raises:
        DuplicateRequestError: another unfinished request has it.
    """
    if request.request_id:
        claims_of(http).take(caller_of(http.scope), request.request_id)
    return request.request_id


def make_engine_id(request: NamedRequest, response_id: str, http: Request) -> str:
    """The prefix of a request's ids in the engine; a client's id gets a random suffix, as it may be repeated."""
    is_chosen = request.request_id or header_id(http)
    return f"{response_id}-{secrets.token_hex(4)}" if is_chosen else response_id


class RequestIdClaimsMiddleware:
    """Gives every request its `Claims`, and releases them when its answer ends or fails.

    Args:
        app: the application.
        group: of the API-server processes, among all of which ids are unique; None: this is the only one.
    """

    def __init__(self, app: ASGIApp, group: ApiGroup | None = None) -> None:
        self._app = app
        self._places = Places() if group is None else group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        claims = scope[_SCOPE_KEY] = Claims(self._places)
        try:
            await self._app(scope, receive, send)
        finally:
            claims.release()


class RequestIdMiddleware:
    """Adds `X-Request-Id` to every answer: the request's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id") or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
