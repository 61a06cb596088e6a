"""Pooled prompts through the engine core equal transformers', however the prompts were cut, cached or preempted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.engine.pooling import POOLED
from ascend_vllm.pooling_params import PoolingParams
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tests.combinations import combinations
from tests.pooling_models import bare_model, classifier, hidden_states, scores, unit
from tests.tiny_models import FAMILIES, tiny_model
from tests.worker.worker_driver import make_prompt, running_core

PROMPT_LENGTHS = (5, 300, 1, 17, 128, 63, 16, 2)
CHUNKED = {"max_num_batched_tokens": 48, "enable_chunked_prefill": True}
TOLERANCE = 1e-5


def embedder(pooling_type: str = "LAST", **options: Any) -> PoolerConfig:
    return PoolerConfig(task="embed", convert="embed", seq_pooling_type=pooling_type, **options)


TOKEN_EMBEDDER = PoolerConfig(task="token_embed", convert="embed")

# pooler → what it makes of transformers' hidden states
EXPECTED: dict[str, tuple[PoolerConfig, Callable[[torch.Tensor], torch.Tensor]]] = {
    "last": (embedder("LAST"), lambda states: unit(states[-1])),
    "first": (embedder("CLS"), lambda states: unit(states[0])),
    "mean": (embedder("MEAN"), lambda states: unit(states.mean(0))),
    "every": (TOKEN_EMBEDDER, unit),
}


def engine(directory: str, pooler: PoolerConfig, **options: Any) -> contextlib.AbstractContextManager[EngineCore]:
    return running_core(directory, pooler=pooler, **options)


def add(core: EngineCore, name: str, prompt: list[int], priority: int = 0, **params: Any) -> None:
    pooler = core.config.model.pooler
    assert pooler is not None
    params = {"use_activation": True, "skip_reading_prefix_cache": pooler.needs_whole_prompt} | params
    core.add_request(
        EngineCoreRequest(name, prompt, POOLED, None, 0.0, priority, pooling_params=PoolingParams(**params))
    )


def drain(core: EngineCore) -> dict[str, EngineCoreOutput]:
    found = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            assert output.finish_reason is FinishReason.STOP
            assert output.new_token_ids == []
            assert output.first_scheduled_time is not None
            found[output.request_id] = output
    return found


def tensor(output: EngineCoreOutput) -> torch.Tensor:
    assert output.pooled is not None
    return torch.tensor(np.frombuffer(output.pooled.data, np.float32)).reshape(output.pooled.shape)


def pool(core: EngineCore, prompts: list[list[int]], **params: Any) -> list[torch.Tensor]:
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, **params)
    found = drain(core)
    return [tensor(found[str(number)]) for number in range(len(prompts))]


def assert_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("name", "kind"), combinations([*FAMILIES, "opt-post-norm"], list(EXPECTED)))
def test_embeddings_of_cut_prompts_equal_transformers(name: str, kind: str) -> None:
    directory = tiny_model(name)
    pooler, expected = EXPECTED[kind]
    prompts = [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    with engine(directory, pooler, **CHUNKED) as core:
        results = pool(core, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        assert_equal(result, expected(hidden_states(directory, prompt)))


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_without_a_head_equal_transformers(name: str) -> None:
    directory = bare_model(name)
    prompts = [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    with engine(directory, embedder()) as core:
        results = pool(core, prompts)
        plain = pool(core, prompts, use_activation=False)
    for prompt, result, raw in zip(prompts, results, plain, strict=True):
        state = hidden_states(directory, prompt)[-1]
        assert_equal(result, unit(state))
        assert_equal(raw / raw.norm(), unit(state))
        torch.testing.assert_close(raw, state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*FAMILIES, "opt-post-norm"])
def test_classes_equal_transformers(name: str) -> None:
    directory = classifier(name)
    pooler = PoolerConfig(task="classify", convert="classify", labels=("a", "b", "c"))
    prompts = [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    with engine(directory, pooler, **CHUNKED) as core:
        results = pool(core, prompts)
        plain = pool(core, prompts, use_activation=False)
    for prompt, result, raw in zip(prompts, results, plain, strict=True):
        expected = scores(directory, prompt)
        torch.testing.assert_close(raw, expected, rtol=1e-5, atol=1e-5)
        assert_equal(result, torch.softmax(expected, -1))


@pytest.mark.parametrize("activation", ["sigmoid", "identity", "softmax"])
def test_classes_of_every_token(activation: str) -> None:
    directory = classifier("qwen2")
    pooler = PoolerConfig(task="token_classify", convert="classify", activation=activation, labels=("a", "b", "c"))
    prompts = [make_prompt(length, seed=length) for length in (3, 90)]
    with engine(directory, pooler, **CHUNKED) as core:
        results = pool(core, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        # a causal model: a token's output is that of the prompt up to it
        ends = (1, len(prompt) // 2, len(prompt))
        expected = torch.stack([scores(directory, prompt[:end]) for end in ends])
        function = {"sigmoid": torch.sigmoid, "identity": lambda x: x, "softmax": lambda x: torch.softmax(x, -1)}
        assert result.shape == (len(prompt), 3)
        torch.testing.assert_close(
            result[[end - 1 for end in ends]], function[activation](expected), rtol=0, atol=2e-5
        )


def test_rows_of_one_step_may_differ_in_all_they_ask_for() -> None:
    directory = tiny_model("llama")
    prompts = [make_prompt(20 + number, seed=number) for number in range(4)]
    wishes: list[dict[str, Any]] = [
        {},
        {"dimensions": 16},
        {"dimensions": 24, "use_activation": False},
        {"use_activation": False},
    ]
    with engine(directory, embedder(is_matryoshka=True)) as core:
        for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
            add(core, str(number), prompt, **wish)
        found = drain(core)
    states = [hidden_states(directory, prompt)[-1] for prompt in prompts]
    expected = [unit(states[0]), unit(states[1][:16]), states[2][:24], states[3]]
    for number, vector in enumerate(expected):
        torch.testing.assert_close(tensor(found[str(number)]), vector, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_prefix_cache_is_read_only_where_the_last_token_is_enough(kind: str) -> None:
    directory = tiny_model("qwen2")
    pooler, expected = EXPECTED[kind]
    prefix = make_prompt(100, seed=1)
    prompts = [[*prefix, *make_prompt(length, seed=length)] for length in (1, 30, 77)]
    with engine(directory, pooler, enable_prefix_caching=True) as core:
        first = pool(core, prompts[:1])
        for number, prompt in enumerate(prompts):
            add(core, str(number), prompt)
        found = drain(core)
    assert_equal(tensor(found["0"]), first[0])
    for number, prompt in enumerate(prompts):
        assert_equal(tensor(found[str(number)]), expected(hidden_states(directory, prompt)))
        assert (found[str(number)].num_cached_tokens >= 96) == (kind == "last")


@pytest.mark.parametrize("kind", EXPECTED)
def test_prompts_preempted_half_way_begin_anew(kind: str) -> None:
    directory = tiny_model("qwen3")
    pooler, expected = EXPECTED[kind]
    prompts = [make_prompt(290, seed=1), make_prompt(300, seed=2)]
    # the second prompt needs the blocks of the first, which has computed a part of its own
    with engine(directory, pooler, **CHUNKED, policy="priority", num_gpu_blocks_override=26) as core:
        add(core, "0", prompts[0], priority=1)
        for _ in range(3):
            assert core.step().outputs == []
        add(core, "1", prompts[1], priority=0)
        found = drain(core)
        assert core.stats()["num_preemptions"] == 1
    for number, prompt in enumerate(prompts):
        assert_equal(tensor(found[str(number)]), expected(hidden_states(directory, prompt)))


@pytest.mark.parametrize("kind", EXPECTED)
def test_a_slot_forgets_a_prompt_that_was_aborted(kind: str) -> None:
    directory = tiny_model("mistral")
    pooler, expected = EXPECTED[kind]
    prompt = make_prompt(70, seed=2)
    with engine(directory, pooler, **CHUNKED, max_num_seqs=1) as core:
        add(core, "gone", make_prompt(200, seed=1))
        core.step()
        core.abort_requests(["gone"])
        assert_equal(pool(core, [prompt])[0], expected(hidden_states(directory, prompt)))


def test_steps_made_ahead_pool_each_prompt_once() -> None:
    directory = tiny_model("llama")
    prompts = [make_prompt(length, seed=length) for length in (40, 1, 130, 7)] * 3
    with engine(directory, embedder("MEAN"), **CHUNKED, async_scheduling=True, max_num_seqs=4) as core:
        results = pool(core, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        assert_equal(result, unit(hidden_states(directory, prompt).mean(0)))


def test_a_prompt_may_be_as_long_as_the_model_allows() -> None:
    directory = tiny_model("qwen2")
    prompt = make_prompt(400, seed=1)
    with engine(directory, embedder()) as core:
        assert_equal(pool(core, [prompt])[0], unit(hidden_states(directory, prompt)[-1]))


@pytest.mark.parametrize("kind", EXPECTED)
def test_in_bfloat16_the_error_is_at_most_twice_that_of_transformers(kind: str) -> None:
    directory = tiny_model("llama", dtype="bfloat16")
    pooler, expected = EXPECTED[kind]
    prompts = [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    with engine(directory, pooler, **CHUNKED, dtype="bfloat16") as core:
        results = pool(core, prompts)
    error, allowed = 0.0, 0.0
    for prompt, result in zip(prompts, results, strict=True):
        exact = expected(hidden_states(directory, prompt))
        error += (result - exact).square().sum().item()
        allowed += (expected(hidden_states(directory, prompt, "bfloat16")) - exact).square().sum().item()
    assert 0.0 < error**0.5 <= 2.0 * allowed**0.5
