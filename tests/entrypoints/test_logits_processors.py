"""Users' own functions of logits, offline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from tests.tiny_models import tiny_model

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 64, "block_size": 16}


@pytest.fixture(scope="module", params=[1, 4], ids=["single-steps", "multi-step"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(tiny_model("qwen2"), num_scheduler_steps=request.param, **OPTIONS)
    yield llm
    assert llm.llm_engine.call_utility("audit")["num_free_blocks"] == 64
    llm.shutdown()


def greedy(*processors: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, max_tokens=9, ignore_eos=True, logits_processors=list(processors) or None, **fields
    )


def test_they_see_all_ids_and_decide(llm: LLM) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def count_up(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt_ids, output_ids))
        assert logits.dtype == torch.float32
        assert logits.shape == (384,)
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([10 + len(output_ids)]), 0.0)

    def prefer_even(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[1::2] -= 1000
        return logits

    prompts = ["Hello", "The quick", "a"]
    params = [greedy(count_up), greedy(), greedy(prefer_even)]
    plain = llm.generate(prompts, greedy(), use_tqdm=False)
    counted, untouched, even = llm.generate(prompts, params, use_tqdm=False)
    assert counted.outputs[0].token_ids == list(range(10, 19))
    assert [len(output) for _, output in seen] == list(range(9))
    assert all(prompt == counted.prompt_token_ids for prompt, _ in seen)
    assert seen[-1][1] == list(range(10, 18))
    # who has none is not concerned
    assert untouched.outputs[0].token_ids == plain[1].outputs[0].token_ids
    assert all(token % 2 == 0 for token in even.outputs[0].token_ids)


def test_they_come_first_and_in_their_order(llm: LLM) -> None:
    def set_to_zero(_output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits)

    def add_one(_output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[7] += 1
        return logits

    def first_token(params: SamplingParams) -> int:
        return llm.generate("Hello", params, use_tqdm=False)[0].outputs[0].token_ids[0]

    assert first_token(greedy(set_to_zero, add_one)) == 7
    assert first_token(greedy(add_one, set_to_zero)) == 0
    # a bias, and what is allowed, hold over what they say
    assert first_token(greedy(set_to_zero, add_one, logit_bias={9: 2.0})) == 9
    assert first_token(greedy(set_to_zero, add_one, allowed_token_ids=[3, 5])) == 3


def test_what_they_raise_reaches_the_caller() -> None:
    llm = LLM(tiny_model("qwen2"), **OPTIONS)

    def broken(_output_ids: list[int], _logits: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        llm.generate(["a", "b"], [greedy(), greedy(broken)], use_tqdm=False)
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        llm.generate("a", greedy(), use_tqdm=False)


def test_wrong_uses() -> None:
    with pytest.raises(TypeError, match="logits_processors must be a list of functions"):
        greedy("no function")
    with pytest.raises(ValueError, match="logits_processors cannot be used with beam search"):
        SamplingParams(use_beam_search=True, best_of=2, temperature=0.0, logits_processors=[lambda _, logits: logits])
