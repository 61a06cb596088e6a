"""Who may ask for what: API keys, checked by the route that a request leads to, and how much at a time.

A path can be written in many ways, and a proxy's prefix may or may not be in front of it. So nothing here reads the
paths of requests: the routes themselves say which of them a request matches, as they do for the router.
"""

from __future__ import annotations

import collections
import functools
import hmac
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from ascend_vllm import envs
from ascend_vllm.entrypoints.http.errors import json_response
from ascend_vllm.errors import RequestError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import FrontendArgs

# what those ask who watch the server: never behind a key
_OPEN = frozenset({"/health", "/ping", "/version", "/metrics"})
# what vLLM guards, and /invocations, which leads there
_INFERENCE = ("/v1", "/v2", "/inference", "/invocations")
# in the scope of a request: which of the keys it has shown, and its place among those of its client
_KEY, _PLACE = "ascend_vllm.key", "ascend_vllm.place"


def api_keys(args: FrontendArgs) -> list[str]:
    """The keys that the server accepts; none: whoever asks is answered. An empty key is none."""
    key = envs.api_key()
    return [key] if key else [key for key in args.api_key or () if key]


def caller_of(scope: Scope) -> bytes:
    """Who sends a request, as far as the server tells its callers apart: by the key that let the request in.

    Args:
        scope: of a request behind `ApiKeyMiddleware`; on a server without keys everybody is one caller, b"".
    """
    return str(scope.get(_KEY, "")).encode()


def matched_route(scope: Scope) -> BaseRoute | None:
    """The route of the application that a request leads to; None: none.

    That may be by a redirect, which adds a slash to the path or takes it away, or one that refuses its method.

    Args:
        scope: of an HTTP request, inside of the application.
    """
    path: str = scope["path"]
    redirected = path.rstrip("/") if path.endswith("/") else path + "/"
    return _first_match(scope) or _first_match({**scope, "path": redirected})


def _first_match(scope: Scope) -> BaseRoute | None:
    """What the router takes: the first route with this path and method, else the first with this path."""
    partial = None
    for route in scope["app"].routes:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            found: BaseRoute = route
            return found
        if match is Match.PARTIAL and partial is None:
            partial = route
    return partial


def declared_path(route: BaseRoute | None) -> str:
    """The path that a route was declared with, "" for none."""
    return str(getattr(route, "path", ""))


class ApiKeyMiddleware:
    """Refuses requests without one of the keys: 401 ``{"error": "Unauthorized"}``.

    Open is a route that is known to be open; every other one is guarded, and so is what leads to no route.

    Under /v1/messages the header ``x-api-key: KEY`` does as well: it is what Anthropic's client sends.

    Args:
        app: what is guarded.
        keys: keys that are accepted as ``Authorization: Bearer KEY``.
        key_scope: "all", or "inference": only the routes that vLLM guards.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], key_scope: str = "all") -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]
        self._key_scope = key_scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with 401."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = matched_route(scope)
        if self._is_open(route) or self._is_known(scope, route):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            # as vLLM, which lets them pass; no route takes them
            methods: set[str] = getattr(route, "methods", None) or set()
            headers = {"allow": ", ".join(sorted(methods))} if methods else None
            await json_response({"detail": "Method Not Allowed"}, 405, headers)(scope, receive, send)
        else:
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _is_open(self, route: BaseRoute | None) -> bool:
        path = declared_path(route)
        is_beside = self._key_scope == "inference" and path != "" and not path.startswith(_INFERENCE)
        return path in _OPEN or is_beside

    def _is_known(self, scope: Scope, route: BaseRoute | None) -> bool:
        """Whether the request shows a key; which one stands in the scope then."""
        headers = Headers(scope=scope)
        given = [headers.get("authorization", "")]
        if declared_path(route).startswith("/v1/messages"):
            given.append(f"Bearer {headers.get('x-api-key', '')}")
        # every key is compared, each in constant time, so that timing tells nothing
        shown = [
            index
            for one in given
            for index, key in enumerate(self._expected)
            if hmac.compare_digest(one.encode("latin-1"), key)
        ]
        if shown:
            scope[_KEY] = shown[0]
        return bool(shown)


class TooManyRequestsError(RequestError):
    """A client has as many requests in progress as it may have."""

    status_code = 429
    error_type = "TooManyRequestsError"
    retry_after_s = 1


class ConcurrencyLimitMiddleware:
    """Refuses a request while as many of its client are in progress as may be.

    Requests of a client are those that show the same key, or, where there are no keys, those from the same address.
    What is never behind a key does not count.

    Args:
        app: what answers.
        limit: requests of one client.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._running: collections.Counter[object] = collections.Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on.

        Raises:
            TooManyRequestsError: there are too many.
        """
        if scope["type"] != "http" or declared_path(matched_route(scope)) in _OPEN:
            await self._app(scope, receive, send)
            return
        # a Unix domain socket has no addresses
        client = scope.get(_KEY, (scope.get("client") or ("",))[0])
        if self._running[client] >= self._limit:
            raise TooManyRequestsError(
                f"{self._limit} requests of yours are being answered already, and no more are at the same time "
                "(--max-concurrent-requests-per-key). Please wait until one of them has ended."
            )
        self._running[client] += 1
        scope[_PLACE] = functools.partial(self._leave, client)
        try:
            await self._app(scope, receive, send)
        finally:
            keep_place(scope)()

    def _leave(self, client: object) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]


def keep_place(scope: Scope) -> Callable[[], None]:
    """Let a request count among those of its client when it is answered, too.

    Returns:
        What ends that; to be called once.
    """
    leave: Callable[[], None] = scope.pop(_PLACE, _nothing)
    return leave


def _nothing() -> None:
    """A request without a place has none to leave."""
