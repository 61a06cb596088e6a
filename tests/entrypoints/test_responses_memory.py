"""The size that the store counts for responses is the memory by which the process grows.

The real application on an engine whose model writes by hand; memory is counted by Python itself, for a process's own
size says little about a few megabytes.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from ascend_vllm.entrypoints.openai import serving_responses
from ascend_vllm.entrypoints.openai.responses_store import ResponseStore
from tests.scripted_engine import PatientEngine, ScriptedEngine, client_of

HELLO: dict[str, Any] = {"role": "user", "content": "Hello!"}
# parts that say nothing, and take twenty times their size as Python objects
EMPTY_PARTS: dict[str, Any] = {"type": "reasoning", "summary": [{"text": ""}] * 1000}
TOOLS = [
    {"type": "function", "name": f"f{index}", "parameters": {"type": "object", "properties": {}}}
    for index in range(200)
]


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[ResponseStore]:
    """The stores of the applications that are made."""
    made: list[ResponseStore] = []

    def make() -> ResponseStore:
        made.append(ResponseStore())
        return made[-1]

    monkeypatch.setattr(serving_responses, "ResponseStore", make)
    return made


@pytest.fixture
def grown() -> Iterator[Callable[[], int]]:
    """Returns a function for the bytes by which Python's objects have grown since its first call."""

    def measure() -> int:
        gc.collect()
        if not tracemalloc.is_tracing():
            tracemalloc.start()
        return tracemalloc.get_traced_memory()[0]

    yield measure
    tracemalloc.stop()


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(
        "/v1/responses", json={"model": "tiny", "input": "Hello!", "tool_choice": "none"} | fields
    )
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


@pytest.mark.parametrize(
    ("count", "fields"),
    [
        (10, {"input": [HELLO, EMPTY_PARTS]}),
        (40, {}),
        (10, {"tools": TOOLS}),
        (10, {"metadata": {f"{index}": "" for index in range(1000)}}),
    ],
    ids=["many small items", "small", "tools", "metadata"],
)
async def test_what_is_kept_counts_for_what_it_takes(
    stores: list[ResponseStore], grown: Callable[[], int], count: int, fields: dict[str, Any]
) -> None:
    """Bodies of many small items once kept twenty times what they counted for."""
    async with client_of(ScriptedEngine(["Yes."])) as client:
        await post(client, **fields)
        before = stores[0].size
        grown()
        for _ in range(count):
            await post(client, **fields)
        counted = stores[0].size - before
        assert grown() / 1.5 < counted < grown() * 1.5


async def test_a_conversation_counts_for_what_it_takes(stores: list[ResponseStore], grown: Callable[[], int]) -> None:
    async with client_of(ScriptedEngine(["Yes."])) as client:
        previous = await post(client)
        before = stores[0].size
        grown()
        for _ in range(25):
            previous = await post(client, input=[], previous_response_id=previous["id"], truncation="auto")
        counted = stores[0].size - before
        assert grown() / 1.5 < counted < grown() * 1.5


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [HELLO, EMPTY_PARTS]},
        {"input": [HELLO, EMPTY_PARTS], "stream": True},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 5},
    ],
    ids=["many small items", "stream", "logprobs"],
)
async def test_what_runs_counts_for_what_it_takes(
    stores: list[ResponseStore], grown: Callable[[], int], fields: dict[str, Any]
) -> None:
    """Running responses were always kept, and counted almost no memory."""
    engine = PatientEngine(["text " * 4] * 200)
    async with client_of(engine) as client:
        asked: list[asyncio.Task[Any]] = []

        def ask() -> None:
            asked.append(
                asyncio.create_task(
                    client.post(
                        "/v1/responses", json={"model": "tiny", "input": "Hello!", "background": True} | fields
                    )
                )
            )

        ask()
        await engine.reached_end.acquire()
        before = stores[0].size
        grown()
        for _ in range(5):
            ask()
        for _ in range(5):
            await engine.reached_end.acquire()
        counted = stores[0].size - before
        # estimates for running responses are rather too high than too low
        assert grown() / 1.5 < counted < grown() * 5
        engine.may_end.set()
        await asyncio.gather(*asked)
