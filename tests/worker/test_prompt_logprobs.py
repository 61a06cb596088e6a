"""Log-probabilities of prompts, through the engine core: transformers', however the prompt was cut or interrupted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.core.request import RequestStatus
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreRequest, TokenLogprobs
from tests.combinations import combinations
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_prompt, running_core, transformers_logits

PROMPT_LENGTHS = (5, 1, 300, 2, 47, 49, 128)

MODES: dict[str, dict[str, Any]] = {
    # more tokens than are scored at a time
    "whole prompts": {"max_num_batched_tokens": 512},
    "chunked": {"max_num_batched_tokens": 48, "enable_chunked_prefill": True},
    "multi-step": {"max_num_batched_tokens": 512, "num_scheduler_steps": 4},
    "chunked and cached": {
        "max_num_batched_tokens": 48,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    },
}


def make_request(name: str, prompt: list[int], num_logprobs: int | None, **sampling: Any) -> EngineCoreRequest:
    defaults: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    params = SamplingParams(**(defaults | sampling), prompt_logprobs=num_logprobs)
    return EngineCoreRequest(name, prompt, params, None, 0.0)


def step(core: EngineCore, found: dict[str, list[EngineCoreOutput]]) -> None:
    """Adds a step's outputs; the parts of a prompt's log-probabilities are joined in its first token's output."""
    for output in core.step().outputs:
        outputs = found.setdefault(output.request_id, [])
        if outputs and not outputs[-1].new_token_ids:
            parts = outputs.pop().prompt_logprobs
            assert parts and output.prompt_logprobs, "parts come one behind the other"
            output.prompt_logprobs = parts + output.prompt_logprobs
        outputs.append(output)


def run(core: EngineCore, requests: Sequence[EngineCoreRequest] = ()) -> dict[str, list[EngineCoreOutput]]:
    for request in requests:
        core.add_request(request)
    found: dict[str, list[EngineCoreOutput]] = {}
    while core.has_unfinished():
        step(core, found)
    return found


def assert_those_of_transformers(
    directory: str, prompt: list[int], found: Sequence[TokenLogprobs] | None, num_logprobs: int
) -> None:
    assert found is not None
    assert len(found) == len(prompt) - 1
    expected = torch.log_softmax(transformers_logits(directory, prompt), -1)
    for position, (entry, row) in enumerate(zip(found, expected[:-1], strict=True)):
        own, *best = entry.token_ids
        assert own == prompt[position + 1]
        assert len(best) == num_logprobs
        torch.testing.assert_close(torch.tensor(entry.logprobs), row[entry.token_ids], atol=1e-4, rtol=0)
        top = row.topk(num_logprobs).values
        torch.testing.assert_close(torch.tensor(entry.logprobs[1:]), top, atol=1e-4, rtol=0)
        # tokens as likely as this one, to the precision of the arithmetic, may stand before or behind it
        assert (row > row[own] + 1e-4).sum() < entry.rank <= (row >= row[own] - 1e-4).sum()


@pytest.mark.parametrize(("name", "mode"), combinations(["llama", "opt"], list(MODES)))
def test_they_are_those_of_transformers(name: str, mode: str) -> None:
    directory = tiny_model(name)
    prompts = [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    # each prompt with a number of its own, and again without: who asks changes nothing for the others
    requests = [make_request(f"ask {i}", prompt, i) for i, prompt in enumerate(prompts)]
    requests += [make_request(f"not {i}", prompt, None) for i, prompt in enumerate(prompts)]
    with running_core(directory, **MODES[mode]) as core:
        found = run(core, requests)
    for i, prompt in enumerate(prompts):
        first, *later = found[f"ask {i}"]
        assert_those_of_transformers(directory, prompt, first.prompt_logprobs, i)
        assert all(output.prompt_logprobs is None for output in [*later, *found[f"not {i}"]])
        tokens = [[id_ for output in found[f"{who} {i}"] for id_ in output.new_token_ids] for who in ("ask", "not")]
        assert tokens[0] == tokens[1]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_what_sampling_parameters_do_to_them(mode: str) -> None:
    """Nothing to the model's own ones; processed ones follow temperature and filters, but no penalty or bias."""
    directory = tiny_model("qwen3")
    prompt = make_prompt(30, seed=3)
    sampling = {"temperature": 2.0, "top_k": 60, "repetition_penalty": 1.8, "logit_bias": {5: 50.0}, "seed": 1}
    with running_core(directory, logprobs_mode=mode) as core:
        found = run(core, [make_request("a", prompt, 3, **sampling), make_request("greedy", prompt, 3)])
    assert_those_of_transformers(directory, prompt, found["greedy"][0].prompt_logprobs, 3)
    told = found["a"][0].prompt_logprobs
    if mode == "raw_logprobs":
        assert_those_of_transformers(directory, prompt, told, 3)
        return
    assert told is not None
    logits = transformers_logits(directory, prompt)[:-1] / 2.0
    logits[logits < logits.topk(60).values[:, -1:]] = -torch.inf
    expected = logits.log_softmax(-1)
    for entry, row, token in zip(told, expected, prompt[1:], strict=True):
        assert entry.token_ids[0] == token
        assert entry.token_ids[1:] == row.topk(3).indices.tolist()
        np.testing.assert_allclose(entry.logprobs, row[entry.token_ids], atol=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())


@pytest.mark.parametrize(("preemption_mode", "async_scheduling"), combinations(["recompute", "swap"], [False, True]))
def test_a_prompt_that_is_interrupted_tells_each_token_once(preemption_mode: str, async_scheduling: bool) -> None:
    directory = tiny_model("llama")
    options = {
        "max_num_batched_tokens": 8,
        "enable_chunked_prefill": True,
        "max_model_len": 208,
        "num_gpu_blocks_override": 13,
        "preemption_mode": preemption_mode,
        "async_scheduling": async_scheduling,
    }
    prompts = {"a": make_prompt(12, seed=1), "b": make_prompt(190, seed=2)}
    statuses = []
    with running_core(directory, **options) as core:
        # the first one grows while the prompt of the second, which takes all other blocks but one, is computed
        core.add_request(make_request("a", prompts["a"], 2, max_tokens=60))
        core.add_request(make_request("b", prompts["b"], 2, max_tokens=3))
        second = core._scheduler.requests["b"]
        found: dict[str, list[EngineCoreOutput]] = {}
        while core.has_unfinished():
            step(core, found)
            statuses.append((second.status, second.num_output_tokens))
    status = RequestStatus.SWAPPED if preemption_mode == "swap" else RequestStatus.PREEMPTED
    assert (status, 0) in statuses, "it was not interrupted in its prompt"
    for name, prompt in prompts.items():
        assert_those_of_transformers(directory, prompt, found[name][0].prompt_logprobs, 2)


def test_a_cached_prompt_is_computed_for_them_and_serves_the_next() -> None:
    directory = tiny_model("llama")
    prompt = make_prompt(64, seed=5)
    with running_core(directory, enable_prefix_caching=True) as core:
        (first, *_) = run(core, [make_request("fills", prompt, 1)])["fills"]
        (again, *_) = run(core, [make_request("asks", prompt, 1)])["asks"]
        (reads, *_) = run(core, [make_request("reads", prompt, None)])["reads"]
    assert (first.num_cached_tokens, again.num_cached_tokens, reads.num_cached_tokens) == (0, 0, 48)
    assert_those_of_transformers(directory, prompt, first.prompt_logprobs, 1)
    assert_those_of_transformers(directory, prompt, again.prompt_logprobs, 1)
