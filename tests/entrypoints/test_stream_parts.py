"""The way of a streamed answer's parts through middleware."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ascend_vllm.entrypoints.http.streaming import DIRECT_SEND, StreamResponse, WholeChainMiddleware


class Shouting:
    """Middleware that changes the parts of bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def shout(message: Message) -> None:
            if message["type"] == "http.response.body":
                message["body"] = message["body"].upper()
            await send(message)

        await self._app(scope, receive, shout)


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts() -> AsyncGenerator[bytes, None]:
        yield b"one "
        yield b"two"

    async def nothing() -> None:
        pass

    await StreamResponse(parts(), "text/event-stream", nothing)(scope, receive, send)


def sent(app: ASGIApp, *, has_direct: bool) -> tuple[bytes, list[str]]:
    """The body, and the types of all messages, that a server gets from an application."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope: Scope = {"type": "http"} | ({DIRECT_SEND: send} if has_direct else {})
    asyncio.run(app(scope, receive, send))
    return b"".join(message.get("body", b"") for message in messages), [message["type"] for message in messages]


@pytest.mark.parametrize("has_direct", [False, True])
@pytest.mark.parametrize(
    ("app", "body"),
    [(stream, b"one two"), (WholeChainMiddleware(Shouting(stream)), b"ONE TWO")],
    ids=["own", "users"],
)
def test_middleware_of_users_sees_every_part(app: ASGIApp, body: bytes, has_direct: bool) -> None:
    types = ["http.response.start", *["http.response.body"] * 3]
    assert sent(app, has_direct=has_direct) == (body, types)


def test_parts_pass_by_the_middleware_of_this_package() -> None:
    assert sent(Shouting(stream), has_direct=True)[0] == b"one two"
