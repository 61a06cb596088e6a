"""ASGI middleware: request ids, the size of bodies, and what --middleware names; keys are checked in `access`.

Plain ASGI, not Starlette's BaseHTTPMiddleware, which would copy every event of a stream through a queue.
"""

from __future__ import annotations

import importlib
import inspect
import secrets
from typing import Any, cast

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.entrypoints.http.streaming import ClientDisconnectedError
from ascend_vllm.errors import ConfigError, RequestError


class RequestIdMiddleware:
    """Adds `X-Request-Id` to every answer: the request's own, or a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with the header added to its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id") or secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"])["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class BodyTooLargeError(RequestError):
    """The body of a request is above --max-body-bytes."""

    status_code = 413
    error_type = "RequestEntityTooLargeError"


class BodyLimitMiddleware:
    """Refuses to receive more of a body than the limit.

    The refusal is raised where the body is read, so that it is answered like every other error, after the key was
    checked and with all headers. A body whose declared length is too large is not read at all.

    Args:
        app: what receives.
        max_bytes: of a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a limited body."""
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
                # nobody is left to be told what is wrong with half a body
                raise ClientDisconnectedError
            return message

        return receive_limited

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError(
                f"The request body is larger than the {self._max_bytes} bytes that --max-body-bytes allows.", "body"
            )


def add_named_middleware(app: FastAPI, name: str) -> None:
    """Install the middleware of an import path such as ``package.module.Name``.

    Raises:
        ConfigError: there is no such thing, or it is neither a function nor a class.
    """
    module_name, _, attribute = name.rpartition(".")
    try:
        middleware: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--middleware {name} cannot be imported: {error}") from error
    if isinstance(middleware, type):
        app.add_middleware(cast("Any", middleware))
    elif inspect.iscoroutinefunction(middleware):
        app.middleware("http")(middleware)
    else:
        raise ConfigError(f"Invalid middleware {name}. Must be a function or a class.")
