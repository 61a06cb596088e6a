"""Blocks that have left a row's window are others' while its block table still names them: nothing may read them.

Every entry of the cache that a row has not written, or that has been taken from it, is NaN here.
"""

from __future__ import annotations

import pytest
import torch

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, Driver, generate, make_prompt, started_worker

BLOCK_SIZES = (16, 32, 64, 128)
# of the tiny Mistral
WINDOW = 40
RANDOM = SamplingParams(temperature=1.0, repetition_penalty=1.1)


def caches_of(worker: Worker) -> list[torch.Tensor]:
    """The layers' caches, [2, P, K, S, D]."""
    assert worker._runner is not None
    return worker._runner.forward._kv_caches


class WindowDriver(Driver):
    """Takes blocks from rows as they leave the window, and poisons them."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.num_taken = 0
        self._taken: dict[str, int] = {}
        for cache in caches_of(worker):
            cache.fill_(float("nan"))

    def take_blocks(self) -> None:
        """Of each row those that its next token, at position `computed`, no longer sees, nor any after it."""
        for name, row in self.rows.items():
            first_seen = max(0, row.computed - WINDOW + 1)
            first = self._taken.get(name, 0)
            for block in row.blocks[first : first_seen // self.block_size]:
                for cache in caches_of(self.worker):
                    cache[:, block] = float("nan")
                self.num_taken += 1
            self._taken[name] = max(first, first_seen // self.block_size)


@pytest.fixture(params=BLOCK_SIZES)
def worker(request: pytest.FixtureRequest) -> Worker:
    return started_worker(tiny_model("mistral"), block_size=request.param)


def test_decoding_never_reads_what_left_the_window(worker: Worker) -> None:
    lengths = {"short": 3, "window": WINDOW, "long": 150}
    expected = {name: generate(worker, make_prompt(n, seed=n), RANDOM, 200, seed=n) for name, n in lengths.items()}
    with WindowDriver(worker) as driver:
        for name, length in lengths.items():
            driver.add(name, make_prompt(length, seed=length), RANDOM, seed=length)
        for _ in range(200):
            driver.step()
            driver.take_blocks()
        assert {name: driver.output(name) for name in lengths} == expected
        assert driver.num_taken >= 3 * (160 // driver.block_size)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 129])
def test_chunks_never_read_what_left_the_window(worker: Worker, chunk: int) -> None:
    prompt = make_prompt(330)
    expected = generate(worker, prompt, GREEDY, 5)
    with WindowDriver(worker) as driver:
        driver.add("row", prompt)
        # beside the chunks another row decodes
        driver.add("other", make_prompt(20), GREEDY)
        while driver.rows["row"].computed < len(prompt):
            row = driver.rows["row"]
            other = driver.rows["other"]
            count = min(chunk, len(prompt) - row.computed)
            driver.step({"row": count, "other": len(other.tokens) - other.computed})
            driver.take_blocks()
        for _ in range(4):
            driver.step()
            driver.take_blocks()
        assert driver.output("row") == expected
        assert driver.output("other") == generate(worker, make_prompt(20), GREEDY, len(driver.output("other")))
        assert driver.num_taken >= (330 - WINDOW) // driver.block_size


@pytest.mark.parametrize("num_steps", [3, 8])
def test_several_steps_never_read_what_left_the_window(worker: Worker, num_steps: int) -> None:
    lengths = {"a": 30, "b": 100}
    passes = 160 // num_steps
    expected = {
        name: generate(worker, make_prompt(n), RANDOM, 1 + passes * num_steps, seed=n) for name, n in lengths.items()
    }
    with WindowDriver(worker) as driver:
        for name, length in lengths.items():
            driver.add(name, make_prompt(length), RANDOM, seed=length)
        driver.step()
        for _ in range(passes):
            driver.take_blocks()
            driver.step(num_steps=num_steps)
        assert {name: driver.output(name) for name in lengths} == expected
        assert driver.num_taken > 0


def test_blocks_that_left_the_window_hold_another_row(worker: Worker) -> None:
    """As the engine core does it: the table of the one still names them while the other writes them."""
    first, second = make_prompt(300, seed=1), make_prompt(250, seed=2)
    expected = generate(worker, first, GREEDY, 30), generate(worker, second, GREEDY, 30)
    with Driver(worker) as driver:
        driver.add("first", first)
        driver.step()
        blocks = driver.rows["first"].blocks
        num_gone = (300 - WINDOW + 1) // driver.block_size
        # the next row takes exactly those
        driver.free_blocks += blocks[:num_gone]
        driver.add("second", second)
        driver.steps(30)
        assert set(driver.rows["second"].blocks) >= set(blocks[:num_gone])
        assert (driver.output("first")[:30], driver.output("second")) == expected
        driver.rows["first"].blocks = blocks[num_gone:]
