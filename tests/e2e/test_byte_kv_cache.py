"""A KV cache in 8 bits: no feature of the scheduler changes an answer, and answers stay nearly as good."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterator

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.tools.demo.corpus import build_conversations
from tests.e2e.test_equivalence_matrix import (
    Cell,
    Conversation,
    assert_same,
    greedy,
    sampled_traffic,
    serve,
    text_ids,
)

# log-probabilities of products whose rows are computed together, which may be rounded otherwise
ROUNDING = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are slower on several threads, and far slower on a busy machine."""
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(num_threads)


def traffic(name: str) -> dict[str, Conversation]:
    """Prompts that begin alike, a conversation, and sampling with several sequences, which share blocks."""
    make = functools.partial(text_ids, name)
    shared = make(130, 3)
    prompts = (shared + make(170, 9), make(17, 2), shared + make(9, 5), make(33, 4), shared)
    found = {f"greedy-{i}": Conversation((prompt,), greedy(24, 1)) for i, prompt in enumerate(prompts)}
    found["talk"] = Conversation((shared + make(3, 40), make(9, 31), make(5, 32)), greedy(12, 1))
    found |= {f"sampled-{i}": one for i, one in enumerate(sampled_traffic(name, 2)[:4])}
    return found


@functools.cache
def answers_alone(name: str, kv_cache: str) -> dict[str, list[RequestOutput]]:
    """What a plain engine answers to each request, one after another."""
    engine = Cell(name=name, kv_cache=kv_cache).start()
    try:
        return {key: serve(engine, {key: one}).answers[key] for key, one in traffic(name).items()}
    finally:
        engine.shutdown()


@pytest.mark.parametrize(
    "cell",
    [
        Cell(kv_cache="int8", is_caching=True, is_chunked=True, num_steps=4, pressure="swap"),
        Cell(kv_cache="int8", pressure="recompute", overlaps=True, block_size=64),
        Cell(kv_cache="int8", is_chunked=True, pressure="swap", name="mistral"),
        Cell(kv_cache="fp8", is_caching=True, is_chunked=True, pressure="swap", overlaps=True),
        Cell(kv_cache="fp8_per_token_head", is_chunked=True, num_steps=4, block_size=128),
    ],
    ids=str,
)
def test_no_feature_changes_an_answer(cell: Cell) -> None:
    engine = cell.start()
    try:
        served = serve(engine, traffic(cell.name), cell.num_steps)
        audit = engine.call_utility("audit")
    finally:
        engine.shutdown()
    assert audit["violations"] == []
    assert served.max_num_swapped > 0 or cell.pressure != "swap"
    assert served.num_prefix_hits > 0 or not cell.is_caching
    for key, turns in answers_alone(cell.name, cell.kv_cache).items():
        for answer, expected in zip(served.answers[key], turns, strict=True):
            assert answer.prompt_token_ids == expected.prompt_token_ids
            assert_same(answer.outputs, expected.outputs, ROUNDING)


def held_out_loss(model: str, kv_cache: str) -> float:
    """Mean negative log-likelihood of conversations whose contexts the demo model was not trained on."""
    llm = LLM(model, kv_cache_dtype=kv_cache, max_model_len=1024, enforce_eager=True)
    tokenizer = llm.get_tokenizer()
    chosen = random.Random(1).sample(build_conversations(seed=987_654), 40)
    chats = [[{"role": turn.role, "content": turn.text} for turn in conversation.turns] for conversation in chosen]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    prompts = [{"prompt_token_ids": tokenizer.encode(text)} for text in texts]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    losses = []
    for output in outputs:
        for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            losses.append(-position[token].logprob)
    return statistics.fmean(losses)


@pytest.mark.parametrize("kv_cache", ["int8", "fp8"])
def test_the_demo_model_loses_little(demo_model_dir: str, kv_cache: str) -> None:
    loss = held_out_loss(demo_model_dir, "auto")
    # E4M3 has three bits of mantissa
    allowed = {"int8": 0.005, "fp8": 0.01}[kv_cache]
    assert abs(held_out_loss(demo_model_dir, kv_cache) - loss) <= allowed * loss
