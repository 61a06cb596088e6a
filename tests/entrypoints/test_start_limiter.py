"""A few requests begin in each turn of the event loop, and none whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from ascend_vllm.entrypoints.http.protocol import StartLimiter
from tests.entrypoints.test_http_limits import opened, post


async def turns(limiter: StartLimiter, count: int) -> list[tuple[int, int]]:
    """(number, turn of the loop) of each of so many that enter at once, in the order in which they could."""
    turn = 0
    entered: list[tuple[int, int]] = []

    async def enter(number: int) -> None:
        await limiter.enter()
        entered.append((number, turn))

    tasks = [asyncio.create_task(enter(number)) for number in range(count)]
    while not all(task.done() for task in tasks):
        turn += 1
        await asyncio.sleep(0)
    return entered


async def test_some_enter_in_each_turn_in_the_order_of_their_coming() -> None:
    limiter = StartLimiter()
    for count in (1, 4, 30):
        entered = await turns(limiter, count)
        assert [number for number, _ in entered] == list(range(count))
        per_turn = [[turn for _, turn in entered].count(turn) for turn in {turn for _, turn in entered}]
        assert max(per_turn) <= 4
        assert limiter.num_waiting == 0
    # all at once, as soon as nobody else enters
    assert {turn for _, turn in await turns(limiter, 2)} == {1}


async def test_who_gives_up_takes_nobodys_place() -> None:
    limiter = StartLimiter()
    tasks = [asyncio.create_task(limiter.enter()) for _ in range(24)]
    await asyncio.sleep(0)
    assert limiter.num_waiting == 20
    for task in tasks[4:20]:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks[20:]), 5)
    assert await asyncio.gather(*tasks[4:20], return_exceptions=True)
    assert limiter.num_waiting == 0


async def test_a_request_whose_client_has_gone_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    is_open = asyncio.Event()
    waiting: list[asyncio.Task[None]] = []

    class ClosedLimiter(StartLimiter):
        async def enter(self) -> None:
            task = asyncio.current_task()
            assert task is not None
            waiting.append(task)
            await is_open.wait()

    monkeypatch.setattr("ascend_vllm.entrypoints.http.server.StartLimiter", ClosedLimiter)
    async with opened() as door:
        (_, gone), (reader, stays) = await door.connect(), await door.connect()
        for writer in (gone, stays):
            # without its body the route would wait for it, and notice
            writer.write(post("/size", b"abc")[:-3])
        while len(waiting) < 2:
            await asyncio.sleep(0.01)
        gone.close()
        await asyncio.sleep(0.1)
        stays.write(b"abc")
        is_open.set()
        assert (await asyncio.wait_for(reader.readuntil(b"3"), 10)).startswith(b"HTTP/1.1 200")
        await asyncio.wait(waiting, timeout=10)
        assert door.echo.lost == 0
        stays.close()
        with contextlib.suppress(OSError):
            await stays.wait_closed()
