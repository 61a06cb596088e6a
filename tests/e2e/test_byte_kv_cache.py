"""A KV cache in 8 bits: no feature of the scheduler changes an answer, and answers stay nearly as good."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Iterator

import pytest
import torch

from ascend_vllm import LLM, BeamSearchParams, SamplingParams
from ascend_vllm.outputs import RequestOutput
from ascend_vllm.tools.demo.corpus import build_conversations
from tests.e2e.test_equivalence_matrix import (
    MAX_MODEL_LEN,
    Cell,
    Conversation,
    assert_same,
    greedy,
    sampled_traffic,
    serve,
    text_ids,
)
from tests.tiny_models import tiny_model

# log-probabilities of products whose rows are computed together, which may be rounded otherwise
ROUNDING = 1e-4
# Of latents, behind a cached prefix a prompt's rest is computed in another form than a whole prompt. Rounding to FP8,
# whose numbers are far apart, enlarges the difference (AVX2: 3.7e-4; without a cached prefix 0, in float32 6e-6).
CACHED_FP8_LATENTS = 1e-3


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
        Cell(kv_cache="int8", is_caching=True, is_chunked=True, num_steps=4, pressure="swap", name="deepseek-v3"),
        Cell(kv_cache="fp8", is_caching=True, pressure="recompute", overlaps=True, name="deepseek-v2"),
        Cell(kv_cache="fp8", pressure="recompute", overlaps=True, name="deepseek-v2"),
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
    is_rough = cell.kv_cache == "fp8" and cell.is_caching and cell.name.startswith("deepseek")
    rounding = CACHED_FP8_LATENTS if is_rough else ROUNDING
    for key, turns in answers_alone(cell.name, cell.kv_cache).items():
        for answer, expected in zip(served.answers[key], turns, strict=True):
            assert answer.prompt_token_ids == expected.prompt_token_ids
            assert_same(answer.outputs, expected.outputs, rounding)


@pytest.mark.parametrize(
    ("kv_cache", "mode", "name"),
    [("int8", "swap", "llama"), ("fp8", "recompute", "llama"), ("int8", "swap", "deepseek-v3")],
)
def test_beams_have_the_probabilities_of_their_texts(kv_cache: str, mode: str, name: str) -> None:
    """Beams share blocks and copy them; the same tokens as a prompt share nothing."""
    options = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 16, "kv_cache_dtype": kv_cache}
    prompts: list[dict[str, list[int]]] = [
        {"prompt_token_ids": list(text_ids(name, length, first))} for length, first in ((130, 3), (40, 9), (61, 2))
    ]
    tight = {"num_gpu_blocks_override": 24, "swap_space": 0.01, "preemption_mode": mode}
    beams = LLM(tiny_model(name), enable_prefix_caching=True, **tight, **options)
    plain = LLM(tiny_model(name), **options)
    try:
        found = beams.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=14))
        assert beams.llm_engine.core.stats()["num_preemptions"] > 0
        for prompt, output in zip(prompts, found, strict=True):
            assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 3
            for sequence in output.sequences:
                params = SamplingParams(max_tokens=1, prompt_logprobs=0)
                (scored,) = plain.generate({"prompt_token_ids": sequence.tokens}, params, use_tqdm=False)
                of_tokens = [
                    position[token].logprob
                    for token, position in zip(sequence.tokens, scored.prompt_logprobs, strict=True)
                    if position is not None
                ]
                own = of_tokens[len(prompt["prompt_token_ids"]) - 1 :]
                assert sequence.cum_logprob == pytest.approx(sum(own), abs=ROUNDING * len(own))
    finally:
        beams.shutdown()
        plain.shutdown()


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_bytes_change_little(name: str) -> None:
    """Of random models; int8 is finer than E4M3, which has three bits of mantissa."""
    prompt = {"prompt_token_ids": list(text_ids(name, 300, 3))}
    found: dict[str, list[float]] = {}
    for kv_cache in ("auto", "int8", "fp8_per_token_head"):
        llm = LLM(tiny_model(name), dtype="float32", kv_cache_dtype=kv_cache, max_model_len=512, enforce_eager=True)
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        llm.shutdown()
        positions = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found[kv_cache] = [position[token].logprob for token, position in positions]
    changes = {
        name: statistics.median(abs(a - b) for a, b in zip(found[name], found["auto"], strict=True))
        for name in ("int8", "fp8_per_token_head")
    }
    assert 0 < 2 * changes["int8"] < changes["fp8_per_token_head"] < 0.5, changes
    assert changes["int8"] < 0.06, changes


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
