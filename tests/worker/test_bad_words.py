"""bad_words, through the engine core: no sequence comes about, and nothing else is forbidden."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.messages import EngineCoreRequest
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_prompt, outputs_of, running_core, token_ids_of, transformers_logits

NUM_TOKENS = 40
PROMPT_LENGTHS = (5, 60, 17, 90)

MODES: dict[str, dict[str, Any]] = {
    "step by step": {},
    "several steps at once": {"num_scheduler_steps": 4},
    "chunked and preempted": {
        "max_num_batched_tokens": 48,
        "enable_chunked_prefill": True,
        "max_model_len": 160,
        "num_gpu_blocks_override": 14,
    },
}


def greedy_without(directory: str, prompt: list[int], words: list[list[int]]) -> list[int]:
    """The plain definition, with a full forward per token."""
    return _greedy_without(directory, tuple(prompt), tuple(map(tuple, words)))


@functools.cache
def _greedy_without(directory: str, prompt: tuple[int, ...], words: tuple[tuple[int, ...], ...]) -> list[int]:
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = transformers_logits(directory, [*prompt, *output])[-1]
        for *prefix, last in words:
            if output[len(output) - len(prefix) :] == prefix and len(output) >= len(prefix):
                logits[last] = -torch.inf
        output.append(int(logits.argmax()))
    return output


def run(directory: str, requests: list[EngineCoreRequest], **options: Any) -> tuple[dict[str, list[int]], int]:
    with running_core(directory, **options) as core:
        found = {name: token_ids_of(outputs) for name, outputs in outputs_of(core, requests).items()}
        return found, core.stats()["num_preemptions"]


@pytest.mark.parametrize("mode", MODES)
def test_no_bad_word_comes_about(mode: str) -> None:
    directory = tiny_model("llama")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    requests, expected = [], {}
    for number, length in enumerate(PROMPT_LENGTHS):
        prompt = make_prompt(length, seed=length)
        free = greedy_without(directory, prompt, [])
        # of one token, of two and of three; two with the same end, of which one never matches; one whose beginning is
        # the prompt's end, which is no output
        words = [[free[30]], free[3:5], free[10:13], [*free[8:9], free[4]], [prompt[-1], free[0]]]
        if number == 3:
            words = []
        requests.append(EngineCoreRequest(str(number), prompt, params, None, float(number), bad_words=words))
        expected[str(number)] = greedy_without(directory, prompt, words)
        assert (expected[str(number)] != free) == bool(words)
        assert expected[str(number)][0] == free[0] or [free[0]] in words
    found, num_preemptions = run(directory, requests, **MODES[mode])
    assert found == expected
    assert (num_preemptions > 0) == ("preempted" in mode)
