"""Which responses are kept, and the events of those in the background."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from ascend_vllm.entrypoints.openai.protocol_responses import ResponsesRequest, ResponsesResponse
from ascend_vllm.entrypoints.openai.responses_store import (
    EventLog,
    ResponseNotFoundError,
    ResponseStore,
    StoredResponse,
    StoreFullError,
)
from ascend_vllm.sampling_params import SamplingParams

KEY_A, KEY_B = b"a", b"b"


def entry(
    response_id: str, num_bytes: int = 10, previous: StoredResponse | None = None, caller: bytes = b""
) -> StoredResponse:
    """A response that has begun; its input has so many bytes."""
    response = ResponsesResponse.from_request(
        ResponsesRequest(input="x"), SamplingParams(), response_id=response_id, created_at=0, model="tiny"
    )
    response.output = [{"id": response_id}]
    items = msgspec.json.encode([{"input": response_id.ljust(num_bytes, ".")}])
    return StoredResponse(response, items, None if previous is None else previous.turn, caller)


def ended(*args: Any, **kwargs: Any) -> StoredResponse:
    """The same, once it has ended."""
    made = entry(*args, **kwargs)
    made.end()
    return made


def kept(store: ResponseStore, names: str, caller: bytes = b"") -> str:
    return "".join(name for name in names if store.has(name, caller))


def room_for(*entries: StoredResponse) -> int:
    """Bytes that these count for, together."""
    store = ResponseStore()
    for one in entries:
        store.put(one)
    return store.size


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_responses=3)
    for name in "abc":
        store.put(ended(name))
    store.get("a")
    store.put(ended("d"))
    assert kept(store, "abcd") == "acd"
    with pytest.raises(ResponseNotFoundError, match="Response with id 'b' not found"):
        store.get("b")


def test_running_ones_stay() -> None:
    store = ResponseStore(max_responses=2)
    running = entry("a")
    store.begin(running)
    for name in "bcd":
        store.put(ended(name))
    assert kept(store, "abcd") == "ad"
    running.end()
    store.put(running)
    store.put(ended("e"))
    assert kept(store, "abcde") == "ae"


def test_a_deleted_one_takes_no_room() -> None:
    store = ResponseStore()
    first, other = ended("a", caller=KEY_A), ended("b", caller=KEY_A)
    store.put(first)
    store.put(other)
    store.delete("a", KEY_B)
    assert kept(store, "ab", KEY_A) == "ab"
    store.delete("a", KEY_A)
    assert (kept(store, "ab", KEY_A), store.size, len(store)) == ("b", room_for(other), 1)
    # what follows it keeps its turn
    store.put(ended("c", previous=other, caller=KEY_A))
    before = store.size
    store.delete("b", KEY_A)
    assert 0 < store.size < before
    assert store.get("c", KEY_A).turn.conversation()[0] == {"input": "b".ljust(10, ".")}


def test_old_ones_go() -> None:
    now_s = 0.0
    store = ResponseStore(max_age_s=10, clock=lambda: now_s)
    store.put(ended("a"))
    store.put(ended("b"))
    now_s = 8
    store.get("b")
    now_s = 12
    with pytest.raises(ResponseNotFoundError):
        store.get("a")
    assert store.get("b").id == "b"
    assert store.size == room_for(ended("b"))


def test_large_ones_go() -> None:
    store = ResponseStore(max_size=room_for(ended("a", 40_000), ended("b", 40_000), ended("c", 10_000)))
    for name in "abc":
        store.put(ended(name, 40_000))
    assert kept(store, "abc") == "bc"
    growing = entry("d", 1000)
    growing.events = EventLog()
    store.begin(growing)
    assert kept(store, "abcd") == "bcd"
    growing.events.extend([b"x" * 20_000])
    growing.end()
    store.put(growing)
    assert kept(store, "abcd") == "cd"
    store.put(ended("e", 200_000))
    assert len(store) == 0
    assert store.size == 0


def test_conversations_share_their_beginnings() -> None:
    first = ended("a")
    second, other = ended("b", previous=first), ended("c", previous=first)

    def told(name: str) -> list[dict[str, str]]:
        return [{"input": name.ljust(10, ".")}, {"id": name}]

    assert second.turn.conversation() == told("a") + told("b")
    assert other.turn.conversation() == told("a") + told("c")
    assert room_for(first, second, other) == 3 * room_for(ended("a"))


def test_what_a_conversation_goes_on_with_counts_after_it_was_evicted() -> None:
    """A chain of responses once kept all before it alive, whatever the store had forgotten of them."""
    store = ResponseStore(max_responses=1)
    first = ended("a", 50_000)
    second = ended("b", 1000, previous=first)
    for one in (first, second):
        store.put(one)
    assert kept(store, "ab") == "b"
    assert store.size >= 51_000
    assert len(store.get("b").turn.conversation()) == 4
    # only the last one is left of a chain, and all that it goes on with is counted
    for _ in range(20):
        second = ended("b", 10_000, previous=second)
        store.put(second)
    assert store.size >= 250_000
    limited = ResponseStore(max_size=300_000)
    chain = None
    for index in range(100):
        chain = ended(f"{index}", 10_000, previous=chain)
        limited.put(chain)
        assert limited.size <= 300_000
    # with the last one all of it goes
    store.put(ended("c"))
    assert store.size == room_for(ended("c"))


def test_of_a_response_that_ends_twice_nothing_is_counted_twice() -> None:
    store = ResponseStore()
    one = entry("a", 5000)
    store.begin(one)
    for _ in range(2):
        one.end()
        store.put(one)
    assert (len(store), store.size) == (1, room_for(ended("a", 5000)))


def test_the_others_responses_do_not_exist() -> None:
    store = ResponseStore()
    store.put(ended("a", caller=KEY_A))
    with pytest.raises(ResponseNotFoundError):
        store.get("a", KEY_B)
    theirs = ended("a", 500, caller=KEY_B)
    store.put(theirs)
    assert store.get("a", KEY_B) is theirs
    assert store.get("a", KEY_A) is not theirs


def test_who_has_most_makes_room() -> None:
    """One caller's responses could once evict those of all others."""
    store = ResponseStore(max_responses=6)
    store.put(ended("a", caller=KEY_A))
    for index in range(50):
        store.put(ended(f"b{index}", caller=KEY_B))
    assert kept(store, "a", KEY_A) == "a"
    small = ResponseStore(max_size=100_000)
    small.put(ended("a", caller=KEY_A))
    for index in range(50):
        small.put(ended(f"b{index}", 9000, caller=KEY_B))
    assert kept(small, "a", KEY_A) == "a"
    assert len(small) > 5


def test_how_many_may_run() -> None:
    store = ResponseStore(max_running=4)
    for index in range(2):
        store.begin(entry(f"a{index}", caller=KEY_A))
    with pytest.raises(StoreFullError, match="At most 2 responses can be generated in the background at a time") as e:
        store.begin(entry("a2", caller=KEY_A))
    assert (e.value.status_code, e.value.param) == (503, "background")
    for index in range(2):
        store.begin(entry(f"b{index}", caller=KEY_B))
    done = store.get("a0", KEY_A)
    done.end()
    store.put(done)
    store.begin(entry("a2", caller=KEY_A))
    everybodys = ResponseStore(max_running=4)
    for index in range(4):
        everybodys.begin(entry(f"{index}"))
    with pytest.raises(StoreFullError):
        everybodys.begin(entry("4"))


def test_how_large_those_that_run_may_be() -> None:
    store = ResponseStore(max_size=200_000)
    store.put(ended("old", 90_000))
    growing = entry("a")
    growing.events = EventLog()
    growing.begin_running(num_prompt_tokens=10, num_prompt_characters=40, num_other_bytes=100, has_logprobs=False)
    store.begin(growing)
    with pytest.raises(StoreFullError, match="take 100000 bytes"):
        store.begin(entry("b", 100_000))
    with pytest.raises(StoreFullError):
        while True:
            growing.add_events([b"x" * 1000])
            store.grow(growing)
    assert 50_000 < store.size <= 200_000
    growing.end()
    store.put(growing)
    # what waits for the end of a response is gone with it
    assert store.size == room_for(ended("old", 90_000), growing)
    store.begin(entry("b", 90_000))


async def test_whoever_reads_slowly_does_not_keep_what_was_forgotten() -> None:
    store = ResponseStore(max_responses=1)
    streamed = entry("a")
    streamed.events = EventLog()
    store.begin(streamed)
    streamed.add_events([b"0", b"1"])
    streamed.end()
    store.put(streamed)
    heard = streamed.events.follow()
    assert await anext(heard) == b"0"
    store.put(ended("b"))
    assert [event async for event in heard] == []


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
    # the events, and what Python needs for each
    assert 5 * 33 < log.size - 5 < 5 * 66
