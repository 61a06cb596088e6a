"""Queues between the output thread and a consumer: order, merging, shapes."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from ascend_vllm.engine.output_processor import OutputQueue
from ascend_vllm.outputs import CompletionOutput, RequestOutput
from ascend_vllm.sampling_params import RequestOutputKind

DELTA = RequestOutputKind.DELTA


def delta(number: int, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", None, [1], None, [CompletionOutput(0, f"{number} ", [number], None, None)], finished)


class Shape:
    """Stateful, like events; detects calls out of order or at the same time."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.threads: set[int] = set()
        self._is_running = False

    def __call__(self, output: RequestOutput) -> tuple[int, str]:
        assert not self._is_running
        self._is_running = True
        (generated,) = output.outputs
        assert generated.token_ids[0] == self.num_tokens
        time.sleep(0)  # lets another thread in
        self.num_tokens += len(generated.token_ids)
        self.threads.add(threading.get_ident())
        self._is_running = False
        return self.num_tokens, generated.text


def put(queue: OutputQueue[tuple[int, str]], *numbers: int) -> None:
    for number in numbers:
        queue.put(delta(number))
        queue.publish()


@pytest.mark.parametrize("max_outputs", [1, 3])
async def test_outputs_that_have_their_shape_are_not_merged(max_outputs: int) -> None:
    queue = OutputQueue(DELTA, max_outputs, Shape())
    put(queue, *range(6))
    for number in range(max_outputs):
        assert await queue.get() == (number + 1, f"{number} ")
    rest = "".join(f"{number} " for number in range(max_outputs, 6))
    assert await queue.get() == (6, rest)
    put(queue, 6)
    assert await queue.get() == (7, "6 ")


async def test_what_is_put_is_there_once_it_is_published() -> None:
    queue = OutputQueue(DELTA, 1, Shape())
    waiting = asyncio.ensure_future(queue.get())
    queue.put(delta(0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    queue.publish()
    queue.publish()  # there is no more
    assert await waiting == (1, "0 ")
    assert not queue.has_ended


async def test_a_reader_that_was_cancelled_may_come_again() -> None:
    queue = OutputQueue(DELTA, 1, Shape())
    waiting = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    waiting.cancel()
    put(queue, 0)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await queue.get() == (1, "0 ")


@pytest.mark.parametrize("with_shape", [True, False])
async def test_an_end_is_known(with_shape: bool) -> None:
    queue = OutputQueue(DELTA, 1, Shape() if with_shape else None)
    put(queue, 0)
    queue.put(delta(1, finished=True))
    queue.publish_all()
    while not queue.has_ended:
        await asyncio.wait_for(queue.get(), 10)
    queue = OutputQueue(DELTA)
    queue.put_error(ValueError("x"))
    queue.publish_all()
    with pytest.raises(ValueError, match="x"):
        await queue.get()
    assert queue.has_ended


async def test_a_shape_that_fails_fails_the_reader_who_knows_that_the_request_goes_on() -> None:
    def fail(_: RequestOutput) -> None:
        raise ValueError("x")

    queue = OutputQueue(DELTA, 1, fail)
    for number in range(3):
        queue.put(delta(number))
        queue.publish()
    with pytest.raises(ValueError, match="x"):
        await queue.get()
    assert not queue.has_ended


@pytest.mark.parametrize("max_outputs", [1, 4])
async def test_two_threads(max_outputs: int) -> None:
    """At any speeds nothing is lost, and outputs are shaped in order, some in each thread."""
    count, shape, chance = 3000, Shape(), random.Random(1)
    queue = OutputQueue(DELTA, max_outputs, shape)
    loop = asyncio.get_running_loop()

    def produce() -> None:
        for number in range(count):
            queue.put(delta(number, finished=number == count - 1))
            loop.call_soon_threadsafe(queue.publish)
            if number % 10 == 0:
                time.sleep(0.0005)

    thread = threading.Thread(target=produce)
    thread.start()
    text = ""
    async with asyncio.timeout(60):
        while not queue.has_ended:
            text += (await queue.get())[1]
            if chance.random() < 0.1:
                await asyncio.sleep(0.001)
    thread.join()
    assert text == "".join(f"{number} " for number in range(count))
    assert shape.num_tokens == count
    assert shape.threads == {threading.get_ident(), thread.ident}
