"""Responses that lose their client, and merged generators: nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from ascend_vllm.entrypoints.http.streaming import (
    ClientDisconnectedError,
    StreamResponse,
    merge,
    run_unless_disconnected,
)


class Source:
    """A generator that remembers how far it ran and that it was closed."""

    def __init__(self, items: list[Any], endless: bool = False) -> None:
        self.items, self.endless = items, endless
        self.taken = 0
        self.closed = False

    async def run(self) -> AsyncGenerator[Any, None]:
        try:
            for item in self.items:
                self.taken += 1
                if isinstance(item, Exception):
                    raise item
                yield item
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_merge_keeps_order_within_each(count: int) -> None:
    sources = [Source(list(range(10))) for _ in range(count)]
    merged = [pair async for pair in merge([source.run() for source in sources])]
    for index in range(count):
        assert [item for i, item in merged if i == index] == list(range(10))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_merge_closed_early_closes_all(count: int) -> None:
    sources = [Source([1, 2, 3], endless=True) for _ in range(count)]
    merged = merge([source.run() for source in sources])
    assert await anext(merged) == (0, 1)
    await merged.aclose()
    assert sources[0].closed
    assert all(source.closed or source.taken == 0 for source in sources)


async def test_merge_raises_the_first_error_and_closes_the_rest() -> None:
    sources = [Source([1], endless=True), Source([ValueError("no")])]
    with pytest.raises(ValueError, match="no"):
        async for _ in merge([source.run() for source in sources]):
            pass
    assert all(source.closed for source in sources)


async def test_a_slow_consumer_holds_the_sources_back() -> None:
    sources = [Source(list(range(100))) for _ in range(2)]
    merged = merge([source.run() for source in sources])
    await anext(merged)
    for _ in range(50):
        await asyncio.sleep(0)
    assert all(source.taken < 5 for source in sources)
    await merged.aclose()


async def test_work_of_a_lost_client_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(ClientDisconnectedError):
        await run_unless_disconnected(gone, work())
    assert cancelled.is_set()


async def test_results_and_errors_pass_through() -> None:
    async def work(error: Exception | None) -> int:
        if error is not None:
            raise error
        return 5

    assert await run_unless_disconnected(never, work(None)) == 5
    with pytest.raises(KeyError):
        await run_unless_disconnected(never, work(KeyError()))


@pytest.mark.parametrize("client", [never, gone])
async def test_a_stream_closes_its_source_in_any_case(client: Any) -> None:
    source = Source([b"a", b"b"], endless=client is gone)
    closed = asyncio.Event()
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def on_close() -> None:
        closed.set()

    await StreamResponse(source.run(), "text/event-stream", on_close)({"type": "http"}, client, send)
    assert closed.is_set()
    assert source.closed or source.taken == 0
    if client is never:
        assert [message.get("body") for message in sent[1:]] == [b"a", b"b", b""]
        assert sent[0]["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in sent[0]["headers"]
