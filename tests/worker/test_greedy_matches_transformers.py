"""The engine core over real checkpoints: greedy tokens and log-probabilities are transformers'.

Every token is compared with one full transformers forward over the prompt and what was generated before it, which
by induction makes the whole output transformers' greedy one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ascend_vllm.core.engine_core import EngineCore
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest, FinishReason
from tests.combinations import combinations
from tests.tiny_models import FAMILIES, TINY_MODELS, tiny_model
from tests.worker.worker_driver import make_prompt, running_core, transformers_logits

NUM_TOKENS = 64
# one arrives every few steps, while those before it decode
PROMPT_LENGTHS = (5, 300, 1, 17, 128, 63, 16, 210, 2, 33)
STEPS_BETWEEN_ARRIVALS = 7

# the longest sequence takes 23 of 30 blocks, so that rows push each other out
MODES: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 512},
    "chunked": {"max_num_batched_tokens": 48, "enable_chunked_prefill": True},
    "preempted": {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 30},
    "chunked and preempted": {
        "max_num_batched_tokens": 48,
        "enable_chunked_prefill": True,
        "num_gpu_blocks_override": 30,
    },
    # of 64 tokens the longest sequence takes 6 of 8, of 128 tokens 3 of 4
    "blocks of 64, preempted": {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 8, "block_size": 64},
    "blocks of 128, chunked and preempted": {
        "max_num_batched_tokens": 48,
        "enable_chunked_prefill": True,
        "num_gpu_blocks_override": 4,
        "block_size": 128,
    },
}

# all checkpoints but other arrangements of the same weights, and dynamic rope: transformers rotates all keys of
# one forward alike, however long the sequence was when they were made
VARIANTS = [name for name in TINY_MODELS if name not in FAMILIES and "bin" not in name and "sharded" not in name]
VARIANTS.remove("llama-dynamic")
HARDEST_MODE = "chunked and preempted"


@dataclasses.dataclass
class Generated:
    """What came back for a request."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None


def run(core: EngineCore, prompts: list[list[int]]) -> dict[str, Generated]:
    """Serves prompts that arrive one after another."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    waiting = list(enumerate(prompts))
    found = {str(number): Generated() for number in range(len(prompts))}
    step = 0
    while waiting or core.has_unfinished():
        if waiting and step % STEPS_BETWEEN_ARRIVALS == 0:
            number, prompt = waiting.pop(0)
            core.add_request(EngineCoreRequest(str(number), prompt, params, None, float(number)))
        for output in core.step().outputs:
            generated = found[output.request_id]
            generated.token_ids += output.new_token_ids
            assert output.new_logprobs is not None
            generated.logprobs += [entry.logprobs[0] for entry in output.new_logprobs]
            generated.finish_reason = output.finish_reason
        step += 1
    return found


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *combinations(FAMILIES, list(MODES)),
        # tests/models compares what they compute in any run
        *(pytest.param(name, HARDEST_MODE, marks=pytest.mark.exhaustive) for name in VARIANTS),
    ],
)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(name: str, mode: str) -> None:
    directory = tiny_model(name)
    prompts = [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]
    with running_core(directory, **MODES[mode]) as core:
        found = run(core, prompts)
        stats = core.stats()
    for number, prompt in enumerate(prompts):
        generated = found[str(number)]
        assert generated.finish_reason == FinishReason.LENGTH
        assert len(generated.token_ids) == len(generated.logprobs) == NUM_TOKENS
        logits = transformers_logits(directory, [*prompt, *generated.token_ids[:-1]])[len(prompt) - 1 :]
        assert generated.token_ids == logits.argmax(-1).tolist(), f"prompt of {len(prompt)}"
        expected = torch.log_softmax(logits, -1).max(-1).values
        torch.testing.assert_close(torch.tensor(generated.logprobs), expected, atol=1e-4, rtol=0)
    assert (stats["num_preemptions"] > 0) == ("preempted" in mode)
