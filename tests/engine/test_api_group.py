"""What several API-server processes share; here the processes are copies of one object."""

from __future__ import annotations

import asyncio
import copy
import pathlib
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ascend_vllm.engine.api_group import ApiGroup, Count, SharedCounts
from ascend_vllm.engine.request_router import RequestRouter
from ascend_vllm.entrypoints.http.forwarding import ForwardingMiddleware, answering_forwarded
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest


def of_each(counts: SharedCounts, size: int) -> list[SharedCounts]:
    """The numbers as each process sees them."""
    copies = [copy.copy(counts) for _ in range(size)]
    for index, one in enumerate(copies):
        one.index = index
    return copies


@pytest.fixture
def groups(tmp_path: pathlib.Path) -> Iterator[list[ApiGroup]]:
    """Three processes."""
    group = ApiGroup(3, 1, tmp_path)
    copies = [copy.copy(group) for _ in range(3)]
    for index, (one, counts) in enumerate(zip(copies, of_each(group.counts, 3), strict=True)):
        one.index, one.counts, one.handlers = index, counts, {}
    yield copies
    group.close()


def test_numbers_of_others_are_summed() -> None:
    first, second, third = of_each(SharedCounts(3, 2), 3)
    for index, counts in enumerate((first, second, third)):
        counts.publish(Count.LOAD, 10**index)
        counts.publish(Count.ROUTED, 7 * 10**index, rank=1)
    assert [counts.of_others(Count.LOAD) for counts in (first, second, third)] == [110, 101, 11]
    assert second.of_others(Count.ROUTED, rank=1) == 707 and second.of_others(Count.ROUTED) == 0
    second.publish(Count.LOAD, 0)
    assert first.of_others(Count.LOAD) == 100


def test_a_key_has_so_many_places_in_all_processes(groups: list[ApiGroup]) -> None:
    first, second, _ = groups
    releases = [first.take("key", 3), second.take("key", 3), first.take("key", 3)]
    assert all(releases) and second.take("key", 3) is None
    assert second.take("another") is not None and first.take("another") is None
    give_back = releases[1]
    assert give_back is not None
    give_back()
    assert first.take("key", 3) is not None and second.take("key", 3) is None


def test_the_others_are_asked(groups: list[ApiGroup]) -> None:
    async def slow(factor: int) -> int:
        await asyncio.sleep(0)
        return 3 * factor

    def failing(_factor: int) -> int:
        raise ValueError("no such thing")

    async def ask() -> None:
        first, second, third = groups
        second.handlers["times"] = lambda factor: 2 * factor
        third.handlers["times"] = slow
        async with second.answering(), third.answering():
            assert await first.ask_others("times", 5) == [10, 15]
            third.handlers["times"] = failing
            with pytest.raises(EngineDeadError, match="API server 2 failed: ValueError: no such thing"):
                await first.ask_others("times", 5)
        with pytest.raises(EngineDeadError, match=r"API server \d is gone"):
            await first.ask_others("times", 5)

    asyncio.run(ask())


def test_an_answer_before_the_whole_request_was_read_arrives(groups: list[ApiGroup]) -> None:
    """What was unread reset the connection, and the answer was lost now and then."""
    # more than the first process reads ahead
    body = [b"x" * 100_000] * 20
    sent: list[Message] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        # the rest of the request arrives meanwhile, and nobody reads it
        await asyncio.sleep(0.05)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer"})

    async def receive() -> Message:
        if not body:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": body.pop(), "more_body": bool(body)}

    async def send(message: Message) -> None:
        # the other process has closed the connection by now, unless it waits
        await asyncio.sleep(0.05)
        sent.append(message)

    async def ask() -> None:
        first, second, _ = groups
        first.on_http = answering_forwarded(app, set())
        route = Route("/metrics", app)
        scope = {"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/metrics"}
        scope |= {"raw_path": b"/metrics", "query_string": b"", "headers": [], "app": Starlette(routes=[route])}
        async with first.answering():
            await ForwardingMiddleware(app, second)(scope, receive, send)

    asyncio.run(ask())
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_requests_of_all_processes_count_in_the_choice_of_an_engine() -> None:
    first, second = (RequestRouter(2, 32, by_prefix=False, counts=one) for one in of_each(SharedCounts(2, 2), 2))

    def request(name: str) -> EngineCoreRequest:
        return EngineCoreRequest(name, [1], SamplingParams(), None, 0.0)

    # turns alone would choose the engines in the order 0, 1 in each process
    assert first.route(request("a")) == 0
    assert second.route(request("b")) == 1
    assert second.route(request("c")) == 1 - first.route(request("d"))
    first.release("a")
    assert [second.route(request(name)) for name in "e"] == [0]
