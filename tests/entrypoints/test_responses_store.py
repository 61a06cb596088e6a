"""Which responses are kept, and the events of those in the background."""

from __future__ import annotations

import asyncio

import pytest

from ascend_vllm.entrypoints.openai.protocol_responses import ResponsesRequest, ResponsesResponse, Status
from ascend_vllm.entrypoints.openai.responses_store import (
    EventLog,
    ResponseNotFoundError,
    ResponseStore,
    StoredResponse,
)
from ascend_vllm.sampling_params import SamplingParams


def entry(response_id: str, size: int = 1, status: Status = "completed") -> StoredResponse:
    response = ResponsesResponse.from_request(
        ResponsesRequest(input="x"), SamplingParams(), response_id=response_id, created_at=0, model="tiny"
    )
    response.status = status
    response.output = [{"id": response_id}]
    return StoredResponse(response, [{"input": response_id}], None, size)


def kept(store: ResponseStore, names: str) -> str:
    return "".join(name for name in names if name in store)


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_responses=3)
    for name in "abc":
        store.put(entry(name))
    store.get("a")
    store.put(entry("d"))
    assert kept(store, "abcd") == "acd"
    with pytest.raises(ResponseNotFoundError, match="Response with id 'b' not found"):
        store.get("b")


def test_running_ones_stay() -> None:
    store = ResponseStore(max_responses=2)
    running = entry("a", status="in_progress")
    store.put(running)
    for name in "bcd":
        store.put(entry(name))
    assert kept(store, "abcd") == "ad"
    running.response.status = "completed"
    store.put(running)
    store.put(entry("e"))
    assert kept(store, "abcde") == "ae"


def test_old_ones_go() -> None:
    now_s = 0.0
    store = ResponseStore(max_age_s=10, clock=lambda: now_s)
    store.put(entry("a"))
    store.put(entry("b"))
    now_s = 8
    store.get("b")
    now_s = 12
    with pytest.raises(ResponseNotFoundError):
        store.get("a")
    assert store.get("b").response.id == "b"


def test_large_ones_go() -> None:
    store = ResponseStore(max_size=100)
    for name in "abc":
        store.put(entry(name, size=40))
    assert kept(store, "abc") == "bc"
    growing = entry("d", size=10, status="in_progress")
    growing.events = EventLog()
    store.put(growing)
    growing.events.extend([b"x" * 45])
    growing.response.status = "completed"
    store.put(growing)
    assert kept(store, "abcd") == "cd"
    store.put(entry("e", size=101))
    assert len(store) == 0


def test_conversations_share_their_beginnings() -> None:
    first, second, other = entry("a"), entry("b"), entry("c")
    second.previous = other.previous = first
    assert second.conversation() == [{"input": "a"}, {"id": "a"}, {"input": "b"}, {"id": "b"}]
    assert other.conversation()[2:] == [{"input": "c"}, {"id": "c"}]


async def test_events_are_followed_from_anywhere() -> None:
    log = EventLog()
    log.extend([b"0", b"1"])

    async def follow(starting_after: int) -> bytes:
        return b"".join([event async for event in log.follow(starting_after)])

    followers = [asyncio.ensure_future(follow(number)) for number in (-1, 0, 2, 50)]
    for events in ([b"2"], [b"3", b"4"]):
        await asyncio.sleep(0)
        log.extend(events)
    log.end()
    assert await asyncio.gather(*followers) == [b"01234", b"1234", b"34", b""]
    assert await follow(-1) == b"01234"
    assert log.size == 5
