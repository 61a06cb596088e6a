"""Several decoding steps in a run on a device: rows that end inside store nothing more."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.test_multi_step import ROWS, run
from tests.worker.worker_driver import started_worker


def worker_on_npu() -> Worker:
    return started_worker(tiny_model("qwen2"), device="npu", dtype="float16", block_size=64)


@functools.cache
def single_steps() -> Any:
    """What the rows come to step by step."""
    return run(worker_on_npu(), ROWS, 1)


@pytest.mark.parametrize("num_steps", [3, 8])
def test_the_number_of_steps_changes_nothing(num_steps: int) -> None:
    """Greedy and random rows, rows that end by length and by stop ids; the rest goes to the spare blocks."""
    assert run(worker_on_npu(), ROWS, num_steps).tokens == single_steps().tokens
