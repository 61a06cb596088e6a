"""SamplingParams: what is accepted, with which words other values are refused, and what is made of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ascend_vllm.sampling_params import SamplingParams, SamplingType


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 0}, "n must be at least 1, got 0."),
        ({"n": 2.0}, "n must be an int, but is of type <class 'float'>"),
        ({"n": 2, "best_of": 1}, "best_of must be greater than or equal to n, got n=2 and best_of=1."),
        ({"presence_penalty": 3}, "presence_penalty must be in [-2, 2], got 3."),
        ({"frequency_penalty": -2.5}, "frequency_penalty must be in [-2, 2], got -2.5."),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than zero, got 0.0."),
        ({"temperature": -1.0}, "temperature must be non-negative, got -1.0."),
        ({"temperature": float("nan")}, "temperature must be a finite number, got nan."),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0."),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
        ({"top_k": -2}, "top_k must be -1 (disable), or at least 1, got -2."),
        ({"min_p": 2.0}, "min_p must be in [0, 1], got 2.0."),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        ({"min_tokens": 10, "max_tokens": 3}, "min_tokens must be less than or equal to max_tokens=3, got 10."),
        ({"logprobs": -1}, "logprobs must be non-negative, got -1."),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be non-negative, got -1."),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be >= 1, got 0"),
        ({"stop": [""]}, "stop cannot contain an empty string."),
        (
            {"stop": "x", "detokenize": False},
            "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
        ),
        ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2."),
        ({"best_of": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2."),
    ],
)
def test_wrong_values(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**fields)
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_k": 1.0}, "top_k must be an integer, got float"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer, got float"),
        ({"seed": "1"}, "seed must be an integer, got str"),
        ({"stop": [1]}, "stop must be a string or a list of strings"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of integers"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids must be a list of integers"),
    ],
)
def test_wrong_types(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**fields)
    assert str(error.value) == words
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, -1, 16)
    assert params.stop == params.stop_token_ids == []
    assert SamplingParams(top_k=0, repetition_penalty=3.0)  # today's wider ranges


def test_normalisation() -> None:
    params = SamplingParams(stop="x", seed=-1, logprobs=True, prompt_logprobs=True)
    assert (params.stop, params.seed, params.logprobs, params.prompt_logprobs) == (["x"], None, 1, 1)
    greedy = SamplingParams(temperature=1e-6, top_p=0.5, top_k=5, min_p=0.5)
    assert (greedy.temperature, greedy.top_p, greedy.top_k, greedy.min_p) == (0.0, 1.0, -1, 0.0)
    assert SamplingParams(temperature=0.005).temperature == 0.01


def test_sampling_types() -> None:
    assert SamplingParams(temperature=0.0).sampling_type is SamplingType.GREEDY
    assert SamplingParams().sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=0).sampling_type is SamplingType.RANDOM_SEED


def test_copies_are_independent_and_survive_the_wire() -> None:
    params = SamplingParams(seed=5, logit_bias={3: 1.0}, stop=["a"])
    changed = params.clone(seed=6, n=1)
    assert (params.seed, changed.seed) == (5, 6)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
