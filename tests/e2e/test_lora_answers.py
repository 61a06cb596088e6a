"""LoRA adapters: answers of a mixed batch are those of the adapters merged into transformers' model."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.lora.request import LoRARequest
from tests.lora_adapters import ALL_LINEAR, Adapter, merged, write_adapter
from tests.tiny_models import tiny_model

ADAPTERS = (
    Adapter("all", rank=16),
    Adapter("small", rank=4),
    Adapter("wide", rank=64, alpha=32),
    Adapter("root", rank=8, takes_root=True),
    Adapter("attention", modules=("q_proj", "v_proj"), as_torch=True),
    Adapter("mlp", modules=("gate_proj", "down_proj")),
    Adapter("one-layer", layers=(1,)),
    Adapter("patterns", ranks={"q_proj": 12, "down_proj": 3}, alphas={"o_proj": 40.0}),
)
LENGTHS = (3, 40, 17, 1, 29, 8, 60, 2, 33, 5)


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 384, (length,), generator=generator).tolist()


def greedy(model: Any, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities by transformers."""
    sequence, logprobs = list(ids), []
    with torch.no_grad():
        for _ in range(count):
            scores = model(torch.tensor([sequence])).logits[0, -1].float().log_softmax(-1)
            sequence.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return sequence[len(ids) :], logprobs


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 32,
            "max_num_seqs": 32,
            "enable_prefix_caching": True,
            "block_size": 16,
        },
        {"num_scheduler_steps": 4, "max_num_seqs": 3, "max_loras": 2, "max_cpu_loras": 3},
        {"tensor_parallel_size": 2, "max_loras": 3},
    ],
    ids=["plain", "chunks", "few", "ranks"],
)
def test_a_mixed_batch_equals_merged_models(tmp_path: pathlib.Path, name: str, options: dict[str, Any]) -> None:
    model = tiny_model(name, dtype="float32")
    paths = [write_adapter(tmp_path / adapter.name, model, adapter) for adapter in ADAPTERS]
    requests = [
        LoRARequest(adapter.name, n + 1, path) for n, (adapter, path) in enumerate(zip(ADAPTERS, paths, strict=True))
    ]
    chosen: list[LoRARequest | None] = [None, *requests, None]
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    settings = {"max_loras": 8, "max_lora_rank": 64} | options
    llm = LLM(model, dtype="float32", enable_lora=True, **settings)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False, lora_request=chosen
    )
    llm.shutdown()
    whole = merged(model, paths[0], Adapter("none", alpha=0.0))
    models = {
        request.lora_name: merged(model, request.lora_path, adapter)
        for request, adapter in zip(requests, ADAPTERS, strict=True)
    }
    texts = set()
    for ids, lora, output in zip(prompts, chosen, outputs, strict=True):
        tokens, logprobs = greedy(whole if lora is None else models[lora.lora_name], ids, 12)
        assert output.lora_request == lora
        (found,) = output.outputs
        assert found.token_ids == tokens, lora
        got = [entry[token].logprob for entry, token in zip(found.logprobs or [], tokens, strict=True)]
        assert got == pytest.approx(logprobs, abs=2e-4)
        texts.add(tuple(tokens))
    assert len(texts) > len(ALL_LINEAR)
