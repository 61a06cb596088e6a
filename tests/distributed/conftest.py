"""A checkpoint whose sizes are hard to shard, and the results of a single worker."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.outputs import RequestOutput
from tests.tiny_models import draw_weights, save_tokenizer

# not divisible by any number of ranks, and larger than the tokenizer's vocabulary
ODD_VOCAB_SIZE = 397
# all scheduler features that work with tensor parallelism
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 128,
    "block_size": 16,
    "max_num_seqs": 8,
    "swap_space": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "max_num_batched_tokens": 64,
    "num_scheduler_steps": 3,
    "seed": 0,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SYSTEM = "The quick brown fox jumps over the lazy dog while the sun shines on the hills. "
PROMPTS = [SYSTEM + text for text in ("Hello! How are you?", "1 2 3 4", "Blocks of the cache hold keys; " * 5)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For every worker: the workers of a test share the machine with each other and with other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Directory of a model with 4 heads, 2 KV heads and a tied head over 397 tokens."""
    directory: pathlib.Path = tmp_path_factory.mktemp("models") / "odd"
    config = transformers.Qwen2Config(
        vocab_size=ODD_VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=112,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    draw_weights(model, seed=7)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture(scope="module")
def alone(odd_model: str) -> Iterator[LLM]:
    """One worker in this process; per module, since others would find other tokens cached."""
    llm = LLM(odd_model, **OPTIONS)
    yield llm
    llm.shutdown()


def generate(llm: LLM, params: SamplingParams = GREEDY, prompts: list[str] | None = None) -> list[RequestOutput]:
    """Outputs for prompts, by default `PROMPTS`."""
    return llm.generate(prompts or PROMPTS, params, use_tqdm=False)


def ids_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of every choice of every output."""
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


def assert_greedy_tokens_are_equal(alone: LLM, shared: LLM) -> None:
    """Generates twice, so that the second time the prompts are cached."""
    assert alone.reset_prefix_cache()
    for _ in range(2):
        expected, got = generate(alone), generate(shared)
        assert ids_of(got) == ids_of(expected)
        assert [output.num_cached_tokens for output in got] == [output.num_cached_tokens for output in expected]
    assert got[0].num_cached_tokens
