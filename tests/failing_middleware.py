"""What --middleware may name: it fails where a request's header says so, and lets all others pass."""

from __future__ import annotations

from typing import NoReturn

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class UnknownError(Exception):
    """An exception that no handler is registered for."""


class FailingMiddleware:
    """Raises `UnknownError` at the place that the header X-Fail names.

    "middleware": here; "route": where the route reads the request's body; "answer": once the answer has begun.

    Args:
        app: what requests are passed on to.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or fail."""
        place = Headers(scope=scope).get("x-fail") if scope["type"] == "http" else None
        if place == "middleware":
            raise UnknownError("a secret of the middleware")

        async def failing_receive() -> NoReturn:
            raise UnknownError("a secret of the route")

        async def failing_send(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                raise UnknownError("a secret of the answer")

        await self._app(
            scope, failing_receive if place == "route" else receive, failing_send if place == "answer" else send
        )
