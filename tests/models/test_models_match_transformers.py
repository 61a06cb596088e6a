"""Every family computes what transformers computes, over ragged batches and a paged cache."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from tests.models.paged_driver import PagedDriver, TransformersModel, load, make_model_config, random_tokens
from tests.tiny_models import FAMILIES, TINY_MODELS, VOCAB_SIZE, tiny_model

PROMPT_LENGTHS = (1, 2, 16, 17, 131, 300)
NUM_DECODED = 5
CONFIG_NAMES = [name for name in TINY_MODELS if not name.startswith(("llama-bin", "llama-sharded"))]


@functools.cache
def _sequences() -> list[tuple[list[int], list[int]]]:
    tokens = [random_tokens(length + NUM_DECODED, VOCAB_SIZE, seed=length) for length in PROMPT_LENGTHS]
    return [(row[:-NUM_DECODED], row[-NUM_DECODED:]) for row in tokens]


def _run_arriving_by_turns(driver: PagedDriver) -> list[torch.Tensor]:
    """Adds every second prompt while the others decode; log-probabilities [tokens, V] of every row."""
    sequences = _sequences()
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for turn in range(NUM_DECODED + 2):
        step = {}
        for row, (prompt, continuation) in enumerate(sequences):
            age = turn - row % 2
            if age == 0:
                step[row] = prompt
            elif 1 <= age <= NUM_DECODED:
                step[row] = [continuation[age - 1]]
        for row, log_probs in driver.step(step).items():
            parts[row].append(log_probs)
    return [torch.cat(part) for part in parts]


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_float32_log_probs_equal_transformers(name: str) -> None:
    directory = tiny_model(name)
    reference = TransformersModel(directory)
    results = _run_arriving_by_turns(PagedDriver(make_model_config(directory)))
    for (prompt, continuation), result in zip(_sequences(), results, strict=True):
        torch.testing.assert_close(result, reference.log_probs(prompt, continuation), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [*FAMILIES, "opt-post-norm", "qwen2-tied", "gemma2", "gemma3", "starcoder2"])
def test_bfloat16_error_is_at_most_twice_that_of_transformers(name: str) -> None:
    directory = tiny_model(name, dtype="bfloat16")
    exact, rounded = TransformersModel(directory, "float32"), TransformersModel(directory, "bfloat16")
    results = _run_arriving_by_turns(PagedDriver(make_model_config(directory, dtype="bfloat16")))
    error, allowed = 0.0, 0.0
    for (prompt, continuation), result in zip(_sequences(), results, strict=True):
        expected = exact.log_probs(prompt, continuation)
        error += (result - expected).square().sum().item()
        allowed += (rounded.log_probs(prompt, continuation) - expected).square().sum().item()
    assert 0.0 < error**0.5 <= 2.0 * allowed**0.5


@pytest.mark.parametrize("name", FAMILIES)
def test_chunked_prefill_equals_one_shot(name: str) -> None:
    config = make_model_config(tiny_model(name))
    model = load(config)
    prompt = random_tokens(200, VOCAB_SIZE, seed=3)
    decoding = random_tokens(40, VOCAB_SIZE, seed=4)
    whole = PagedDriver(config, model=model).step({0: prompt})[0]
    driver = PagedDriver(config, model=model)
    driver.step({1: decoding[:20]})
    parts, start = [], 0
    for turn, size in enumerate((1, 15, 16, 50, 7, 111)):
        step = {1: [decoding[20 + turn]], 0: prompt[start : start + size]}
        parts.append(driver.step(step)[0])
        start += size
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "falcon", "falcon-new", "mixtral", "deepseek-v2-lite"])
def test_hidden_states_of_some_tokens_are_those_of_the_whole_batch(name: str) -> None:
    driver = PagedDriver(make_model_config(tiny_model(name), "bfloat16"))
    batch = driver.append({0: random_tokens(70, VOCAB_SIZE, seed=5), 1: random_tokens(30, VOCAB_SIZE, seed=6)})
    whole = driver.hidden(batch)
    for wanted in ([69, 99], [0]):
        some = driver.hidden(dataclasses.replace(batch, output_indices=torch.tensor(wanted)))
        assert some.equal(whole[wanted])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_converted_to_the_dtype_of_the_model(dtype: str) -> None:
    directory = tiny_model("llama")
    prompt = random_tokens(30, VOCAB_SIZE, seed=5)
    converted = PagedDriver(make_model_config(directory, dtype=dtype)).step({0: prompt})[0]
    expected = TransformersModel(directory, dtype).log_probs(prompt)
    exact = TransformersModel(directory).log_probs(prompt)
    assert (converted - exact).norm() <= 2.0 * (expected - exact).norm()


@pytest.mark.parametrize("name", ["mistral", "qwen2-window"])
def test_sliding_window_hides_older_tokens(name: str) -> None:
    """Without its window the model's results differ, so the comparison above covers the window."""
    directory = tiny_model(name)
    prompt = random_tokens(100, VOCAB_SIZE, seed=6)
    with_window = PagedDriver(make_model_config(directory)).step({0: prompt})[0]
    without = PagedDriver(make_model_config(directory, sliding_window=None)).step({0: prompt})[0]
    torch.testing.assert_close(with_window[:24], without[:24], rtol=0, atol=1e-5)
    assert (with_window[-1] - without[-1]).abs().max() > 0.1


def test_dynamic_ntk_inside_the_trained_length_uses_a_fixed_table() -> None:
    directory = tiny_model("llama-dynamic")
    prompt = random_tokens(128, VOCAB_SIZE, seed=7)
    limited = PagedDriver(make_model_config(directory, max_model_len=128)).step({0: prompt})[0]
    torch.testing.assert_close(limited, TransformersModel(directory).log_probs(prompt), rtol=0, atol=1e-4)
    chunked = PagedDriver(make_model_config(directory))
    parts = [chunked.step({0: prompt[:50]})[0], chunked.step({0: prompt[50:]})[0]]
    torch.testing.assert_close(torch.cat(parts), limited, rtol=0, atol=2e-5)
