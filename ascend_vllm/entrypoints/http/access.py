"""API keys, checked for the route that a request matches, and limits of concurrent requests.

A path can be written in many ways, with or without a proxy's prefix. So nothing here compares the paths of requests:
the routes are matched as the router does.
"""

from __future__ import annotations

import collections
import functools
import hmac
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm import envs
from ascend_vllm.entrypoints.http.docs_pages import PAGES
from ascend_vllm.entrypoints.http.errors import error_body, json_response
from ascend_vllm.errors import RequestError

if TYPE_CHECKING:
    from ascend_vllm.args.tables.server import FrontendArgs
    from ascend_vllm.engine.api_group import ApiGroup

# never need a key: monitoring, and pages that are the same on every server, which ask for the key themselves
_OPEN = PAGES | {"/health", "/ping", "/version", "/metrics", "/ui", "/ui/{name}"}
# prefixes that need a key in vLLM, and /invocations, which dispatches to them
_INFERENCE = ("/v1", "/v2", "/inference", "/invocations")
# entries of a request's scope: index of its key, and the function that releases its slot of the concurrency limit
_KEY, _SLOT = "ascend_vllm.key", "ascend_vllm.slot"


def api_keys(args: FrontendArgs) -> list[str]:
    """The keys that the server accepts, without empty ones; none: no key is needed."""
    key = envs.api_key()
    return [key] if key else [key for key in args.api_key or () if key]


def needs_key(path: str, key_scope: str) -> bool:
    """Whether requests to a route need a key, if there is one.

    Args:
        path: that the route was declared with, "" for none.
        key_scope: --api-key-scope.
    """
    is_beside = key_scope == "inference" and path != "" and not path.startswith(_INFERENCE)
    return path not in _OPEN and not is_beside


def caller_of(scope: Scope) -> bytes:
    """Identifies the sender of a request by its API key.

    Args:
        scope: of a request behind `ApiKeyMiddleware`; without keys all senders are one, b"".
    """
    return str(scope.get(_KEY, "")).encode()


def matched_route(scope: Scope) -> BaseRoute | None:
    """The application's route for a request; None: none.

    It may match only after a redirect that adds or removes a trailing slash, or only with another method.

    Args:
        scope: of an HTTP request, inside of the application.
    """
    path: str = scope["path"]
    redirected = path.rstrip("/") if path.endswith("/") else path + "/"
    return _first_match(scope) or _first_match({**scope, "path": redirected})


def _first_match(scope: Scope) -> BaseRoute | None:
    """The router's choice: the first route with this path and method, else the first with this path."""
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

    Every route needs a key unless it is known to be open, and so do requests that match no route.

    Under /v1/messages the header ``x-api-key: KEY`` of Anthropic's client is accepted, too.

    Args:
        app: the protected application.
        keys: keys that are accepted as ``Authorization: Bearer KEY``.
        key_scope: "all", or "inference": only the routes that need one in vLLM.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], key_scope: str = "all") -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]
        self._key_scope = key_scope

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route = matched_route(scope)
        if not needs_key(declared_path(route), self._key_scope) or self._is_known(scope, route):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS":
            # as in vLLM, which lets them pass to the router; no route accepts them
            methods: set[str] = getattr(route, "methods", None) or set()
            headers = {"allow": ", ".join(sorted(methods))} if methods else None
            body = error_body("Method Not Allowed", "Method Not Allowed", 405)
            await json_response(body, 405, headers)(scope, receive, send)
        else:
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)

    def _is_known(self, scope: Scope, route: BaseRoute | None) -> bool:
        """Whether the request has a valid key, whose index is stored in the scope."""
        headers = Headers(scope=scope)
        given = [headers.get("authorization", "")]
        if declared_path(route).startswith("/v1/messages"):
            given.append(f"Bearer {headers.get('x-api-key', '')}")
        # every key is compared, each in constant time, against timing attacks
        shown = [
            index
            for one in given
            for index, key in enumerate(self._expected)
            if hmac.compare_digest(one.encode("latin-1"), key)
        ]
        if shown:
            scope[_KEY] = shown[0]
        return bool(shown)


class Places:
    """What only so many requests may have at a time, by key; `ApiGroup` has the same method."""

    def __init__(self) -> None:
        self._taken: collections.Counter[str] = collections.Counter()

    def take(self, key: str, limit: int = 1) -> Callable[[], None] | None:
        """Takes one of a key's places.

        Args:
            key: any text.
            limit: places of the key.

        Returns:
            A function that gives it back, to be called once; None: all places are taken.
        """
        if self._taken[key] >= limit:
            return None
        self._taken[key] += 1
        return functools.partial(self._give_back, key)

    def _give_back(self, key: str) -> None:
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]


class TooManyRequestsError(RequestError):
    """A client has reached --max-concurrent-requests-per-key."""

    status_code = 429
    error_type = "TooManyRequestsError"
    retry_after_s = 1


class ConcurrencyLimitMiddleware:
    """Limits the concurrent requests of a client, identified by its key or, without keys, by its address.

    Requests to routes that never need a key do not count.

    Args:
        app: the application.
        limit: concurrent requests of one client.
        group: of the API-server processes, which share the limit; None: this is the only one.
    """

    def __init__(self, app: ASGIApp, limit: int, group: ApiGroup | None = None) -> None:
        self._app = app
        self._limit = limit
        self._places = Places() if group is None else group

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
        leave = self._places.take(f"client {client!r}", self._limit)
        if leave is None:
            raise TooManyRequestsError(
                f"{self._limit} requests of yours are being answered already, and no more are at the same time "
                "(--max-concurrent-requests-per-key). Please wait until one of them has ended."
            )
        scope[_SLOT] = leave

        async def send_and_leave(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # before the client has its whole answer: its next request may come at once
                keep_slot(scope)()
            await send(message)

        try:
            await self._app(scope, receive, send_and_leave)
        finally:
            keep_slot(scope)()


def keep_slot(scope: Scope) -> Callable[[], None]:
    """Makes a request count against its client's limit beyond its answer.

    Returns:
        A function that releases the slot; to be called once. It does nothing if the request does not count.
    """
    leave: Callable[[], None] = scope.pop(_SLOT, lambda: None)
    return leave
