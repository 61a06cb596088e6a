"""What --middleware may name: it remembers which routes requests have reached."""

from __future__ import annotations

from typing import ClassVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class RecordingMiddleware:
    """Remembers of every request the route that the router found for it, before the answer is sent.

    Args:
        app: what requests are passed on to.

    Attributes:
        reached: declared paths of routes, None for a request that led to none.
    """

    reached: ClassVar[list[str | None]] = []

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def record(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.reached.append(getattr(scope.get("route"), "path", None))
            await send(message)

        await self._app(scope, receive, record)
