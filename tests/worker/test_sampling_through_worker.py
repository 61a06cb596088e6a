"""What each sampling parameter does, through the worker, against formulas on transformers' logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import StepLogprobs
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.worker.worker_driver import GREEDY, Driver, generate, make_prompt, started_worker, transformers_logits

EOS = 2


@pytest.fixture(scope="module")
def directory() -> str:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def worker(directory: str) -> Worker:
    return started_worker(directory)


@pytest.fixture(scope="module")
def processed_worker(directory: str) -> Worker:
    return started_worker(directory, logprobs_mode="processed_logprobs")


def last_logits(directory: str, tokens: Sequence[int]) -> torch.Tensor:
    """[V] of the token that follows."""
    return transformers_logits(directory, tokens)[-1]


def penalised(
    logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> torch.Tensor:
    """The three penalties, token by token."""
    logits = logits.clone()
    for token in {*prompt, *output}:
        if logits[token] > 0:
            logits[token] /= params.repetition_penalty
        else:
            logits[token] *= params.repetition_penalty
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def filtered(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities after temperature, min_p, top-k and top-p, one vocabulary entry at a time."""
    logits = logits / (params.temperature or 1.0)
    probs = logits.softmax(-1)
    kept = [token for token in probs.argsort(descending=True).tolist() if probs[token] >= params.min_p * probs.max()]
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total = probs[kept].sum()
    reached, nucleus = 0.0, []
    for token in kept:
        nucleus.append(token)
        reached += float(probs[token] / total)
        if reached >= params.top_p:
            break
    masked = torch.full_like(logits, -torch.inf)
    masked[nucleus] = logits[nucleus]
    return torch.log_softmax(masked, -1)


def assert_reports(found: StepLogprobs, row: int, token: int, expected: torch.Tensor, num_logprobs: int) -> None:
    """Compares one row of a report with [V] expected log-probabilities."""
    assert found.token_ids[row, 0, 0] == token
    np.testing.assert_allclose(found.logprobs[row, 0, 0], expected[token], atol=1e-4)
    assert found.ranks[row, 0] == 1 + int((expected > expected[token]).sum())
    top = expected.topk(num_logprobs)
    np.testing.assert_allclose(found.logprobs[row, 0, 1 : 1 + num_logprobs], top.values, atol=1e-4)
    reachable = top.values > -torch.inf
    found_ids = found.token_ids[row, 0, 1 : 1 + num_logprobs]
    assert found_ids[reachable.numpy()].tolist() == top.indices[reachable].tolist()


def test_raw_logprobs_are_those_of_the_model(worker: Worker, directory: str) -> None:
    """Whatever else the request asks for; rows beside it get padding."""
    asked = {
        "a": SamplingParams(temperature=0.0, logprobs=2),
        "b": SamplingParams(temperature=0.3, top_k=5, repetition_penalty=1.5, logit_bias={7: 9.0}, logprobs=5),
        "c": SamplingParams(temperature=0.0, logprobs=0),
        "none": GREEDY,
    }
    with Driver(worker) as driver:
        for number, (name, params) in enumerate(asked.items()):
            driver.add(name, make_prompt(10 + number, seed=number), params, seed=number)
        for _ in range(5):
            before = {name: list(row.tokens) for name, row in driver.rows.items()}
            found = driver.step().logprobs
            assert found is not None
            assert found.token_ids.shape == found.logprobs.shape == (4, 1, 1 + 5)
            for index, (name, params) in enumerate(asked.items()):
                if params.logprobs is None:
                    assert not found.logprobs[index].any()
                    continue
                expected = torch.log_softmax(last_logits(directory, before[name]), -1)
                assert_reports(found, index, driver.rows[name].tokens[-1], expected, params.logprobs)


def test_zero_logprobs_are_the_sampled_token_alone(worker: Worker, directory: str) -> None:
    with Driver(worker) as driver:
        driver.add("row", make_prompt(5), SamplingParams(temperature=1.5, logprobs=0), seed=3)
        found = driver.step().logprobs
        assert found is not None
        assert found.token_ids.shape == (1, 1, 1)
        expected = torch.log_softmax(last_logits(directory, make_prompt(5)), -1)
        assert_reports(found, 0, driver.output("row")[0], expected, 0)


def test_nobody_asking_gets_no_logprobs(worker: Worker) -> None:
    with Driver(worker) as driver:
        driver.add("a", make_prompt(4), GREEDY)
        driver.add("b", make_prompt(5), SamplingParams(temperature=0.9))
        assert driver.step().logprobs is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logprobs=5),
        SamplingParams(temperature=0.5, logprobs=5),
        SamplingParams(temperature=1.0, top_k=4, logprobs=6),
        SamplingParams(temperature=1.5, top_p=0.6, logprobs=6),
        SamplingParams(temperature=1.2, min_p=0.1, logprobs=6),
        SamplingParams(temperature=0.8, min_p=0.02, top_k=9, top_p=0.7, logprobs=6),
        SamplingParams(
            temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.6, logprobs=4
        ),
        SamplingParams(temperature=0.0, repetition_penalty=0.8, frequency_penalty=-0.2, logprobs=4),
    ],
    ids=lambda params: ",".join(f"{f}={getattr(params, f)}" for f in ("temperature", "top_k", "top_p", "min_p")),
)
def test_processed_logprobs_are_those_of_the_draw(
    processed_worker: Worker, directory: str, params: SamplingParams
) -> None:
    prompt = make_prompt(12, seed=4)
    with Driver(processed_worker) as driver:
        driver.add("row", prompt, params, seed=11)
        for _ in range(6):
            before = list(driver.rows["row"].tokens)
            found = driver.step().logprobs
            assert found is not None
            logits = penalised(last_logits(directory, before), prompt, before[len(prompt) :], params)
            expected = filtered(logits, params)
            token = driver.rows["row"].tokens[-1]
            assert expected[token] > -torch.inf, "a token outside the filters was drawn"
            assert params.logprobs is not None
            assert_reports(found, 0, token, expected, params.logprobs)


def test_penalties_steer_greedy_rows(worker: Worker, directory: str) -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.7, presence_penalty=0.9)
    prompt = make_prompt(15, seed=6)
    with Driver(worker) as driver:
        driver.add("row", prompt, params)
        driver.add("free", prompt, GREEDY)
        for _ in range(20):
            before = list(driver.rows["row"].tokens)
            driver.step()
            logits = penalised(last_logits(directory, before), prompt, before[len(prompt) :], params)
            assert driver.rows["row"].tokens[-1] == int(logits.argmax())
        assert driver.output("free") == generate(worker, prompt, GREEDY, 20)
        assert driver.output("free") != driver.output("row")


def test_min_tokens_count_what_was_generated_before_a_preemption(worker: Worker) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=3, logit_bias={EOS: 100.0})
    with Driver(worker) as driver:
        driver.add("row", make_prompt(6), params, stop_token_ids=[EOS])
        driver.steps(2)
        tokens = driver.free("row").tokens
        driver.add("row", tokens, params, num_prompt_tokens=6, stop_token_ids=[EOS])
        driver.steps(2)
        assert [token == EOS for token in driver.output("row")] == [False, False, False, True]


def test_ids_outside_the_vocabulary_are_no_danger(worker: Worker) -> None:
    """The front end refuses them where they matter; a worker must survive them anyway."""
    params = SamplingParams(
        temperature=0.0, min_tokens=2, logit_bias={VOCAB_SIZE: 5.0, -1: 5.0}, allowed_token_ids=[3, VOCAB_SIZE + 7]
    )
    assert generate(worker, make_prompt(4), params, 3, stop_token_ids=[VOCAB_SIZE + 1, -4]) == [3, 3, 3]


def test_a_seed_repeats_and_seeds_differ(worker: Worker) -> None:
    params = SamplingParams(temperature=1.3)
    prompt = make_prompt(7)
    first = generate(worker, prompt, params, 24, seed=1)
    assert generate(worker, prompt, params, 24, seed=1) == first
    assert generate(worker, prompt, params, 24, seed=2) != first
    with Driver(worker) as driver:
        driver.add("one", make_prompt(40, seed=9), SamplingParams(temperature=0.9, top_k=3), seed=8)
        driver.add("same", prompt, params, seed=1)
        driver.add("twin", prompt, params, seed=1)
        driver.steps(24)
        assert driver.output("same") == driver.output("twin") == first
