"""Steps through a real worker: chunking, batching, resuming and multi-step decoding change no token."""

from __future__ import annotations

import numpy as np
import pytest

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import SchedulerOutput
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import GREEDY, Driver, generate, make_prompt, started_worker

RANDOM = SamplingParams(temperature=1.0, top_k=50, top_p=0.95, presence_penalty=0.5, repetition_penalty=1.1)


@pytest.fixture(scope="module", params=[16, 32, 64, 128])
def worker(request: pytest.FixtureRequest) -> Worker:
    """One for each block size."""
    return started_worker(tiny_model("qwen2"), block_size=request.param)


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("chunks", [[50], [1] * 50, [17, 3, 30], [49, 1]])
def test_how_a_prompt_is_cut_changes_nothing(worker: Worker, params: SamplingParams, chunks: list[int]) -> None:
    prompt = make_prompt(50)
    whole = generate(worker, prompt, params, 12, seed=5)
    with Driver(worker) as driver:
        driver.add("cut", prompt, params, seed=5)
        for chunk in chunks[:-1]:
            assert len(driver.step({"cut": chunk}).slots) == 0
        driver.steps(12)
        assert driver.output("cut") == whole


def test_rows_do_not_see_each_other(worker: Worker) -> None:
    """Rows arrive while others decode, run with different parameters, and some leave early."""
    params = {"a": GREEDY, "b": RANDOM, "c": GREEDY, "d": RANDOM}
    prompts = {name: make_prompt(length, seed=length) for name, length in zip("abcd", (1, 70, 33, 5), strict=True)}
    alone = {name: generate(worker, prompts[name], params[name], 16, seed=ord(name)) for name in "abcd"}
    with Driver(worker) as driver:
        for name in "abcd":
            driver.add(name, prompts[name], params[name], seed=ord(name))
            driver.steps(2)
        assert driver.free("a").tokens[1:] == alone["a"][:8]
        driver.add("a", prompts["a"], params["a"], seed=ord("a"))
        driver.steps(10)
        for name in "bcd":
            assert driver.output(name)[:16] == alone[name][: len(driver.output(name))]


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_resumed_row_goes_on_as_if_nothing_had_happened(worker: Worker, params: SamplingParams) -> None:
    prompt = make_prompt(21)
    expected = generate(worker, prompt, params, 20, seed=77)
    with Driver(worker) as driver:
        driver.add("row", prompt, params, seed=77)
        driver.add("other", make_prompt(9), RANDOM, seed=1)
        driver.steps(8)
        preempted = driver.free("row")
        driver.step()
        driver.add("newcomer", make_prompt(30), RANDOM, seed=2)
        driver.add("row", preempted.tokens, params, seed=77, num_prompt_tokens=len(prompt))
        driver.step({"row": 10, "other": 1, "newcomer": 30})
        driver.steps(12)
        assert driver.output("row") == expected


def test_the_block_size_does_not_show(worker: Worker) -> None:
    expected = generate(started_worker(tiny_model("qwen2")), make_prompt(120), RANDOM, 20, seed=4)
    assert generate(worker, make_prompt(120), RANDOM, 20, seed=4) == expected


def test_a_step_that_only_frees_gives_nothing(worker: Worker) -> None:
    output = worker.execute_model(SchedulerOutput(4, [3], [], [], [], []))
    assert output.step_id == 4
    assert output.slots.shape == (0,)
    assert output.sampled_token_ids.shape == (0, 1)
    assert output.sampled_token_ids.dtype == np.int64
