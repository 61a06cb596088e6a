"""Masks in the sampler: alone, with the other ways to forbid tokens, and where nothing is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams
from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from ascend_vllm.types.step import NO_TOKEN, NewRow
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.sampling.sampler import Sampled, Sampler
from tests.tiny_models import VOCAB_SIZE, tiny_model
from tests.worker.worker_driver import make_config, make_prompt, outputs_of, running_core, token_ids_of

V = 70


def sample(rows: list[SamplingParams], masks: dict[int, list[int]], mode: str = "raw_logprobs") -> Sampled:
    """Samples a token per row; `masks` are ids that some rows may get."""
    batch = InputBatch(len(rows), 16, 16, V)
    for slot, params in enumerate(rows):
        batch.sampling.set(NewRow(slot, str(slot), [1], 1, 0, [0], params, seed=slot, stop_token_ids=[2]))
    batch.num_tokens[:] = 1
    sampler = Sampler(batch, mode, torch.device("cpu"))
    plan = sampler.plan(np.arange(len(rows)))
    if masks:
        bits = np.zeros((len(masks), 96), np.uint8)
        for row, ids in zip(bits, masks.values(), strict=True):
            row[ids] = 1
        bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        plan = sampler.constrain(plan, np.array(list(masks), np.int64), bitmask)
    logits = torch.linspace(0, 5, V).repeat(len(rows), 1)
    return sampler.sample(logits, plan, torch.ones(len(rows), dtype=torch.int64))


def test_masked_rows_get_allowed_tokens_and_others_any() -> None:
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=5.0)
    ids = sample([greedy, greedy, drawn, greedy], {3: [0, 31], 0: [64, 5], 2: [33]}).token_ids
    assert ids.tolist() == [64, V - 1, 33, 31]


def test_masks_act_together() -> None:
    rows = [
        SamplingParams(temperature=0.0, allowed_token_ids=[3, 4, 50]),
        SamplingParams(temperature=0.0, logit_bias={7: 100.0, 8: 99.0}),
        SamplingParams(temperature=0.0, min_tokens=3),
        SamplingParams(temperature=0.0, allowed_token_ids=[3]),
        SamplingParams(temperature=0.0, min_tokens=3),
    ]
    masks = {0: [4, 60], 1: [8, 9], 2: [1, 2], 3: [4], 4: [2]}
    assert sample(rows, masks).token_ids.tolist() == [4, 8, 1, NO_TOKEN, NO_TOKEN]
    # without masks nothing changes
    assert sample(rows, {}).token_ids.tolist() == [50, 7, V - 1, 3, V - 1]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_of_masked_rows(mode: str) -> None:
    rows = [SamplingParams(temperature=0.0, logprobs=2), SamplingParams(temperature=0.0, logprobs=2)]
    sampled = sample(rows, {0: [10, 20], 1: []}, mode)
    assert sampled.token_ids.tolist() == [20, NO_TOKEN]
    assert sampled.logprobs is not None
    top = sampled.logprobs.token_ids[0].tolist()
    # the model's own probabilities know of no mask
    assert top == ([20, 69, 68] if mode == "raw_logprobs" else [20, 20, 10])


def request(request_id: str, structured: dict[str, Any] | None = None, **params: Any) -> EngineCoreRequest:
    bad_words = params.pop("bad_word_ids", [])
    wanted = None if structured is None else StructuredOutputsParams(**structured)
    params = {"max_tokens": 24, "temperature": 0.0, "structured_outputs": wanted, **params}
    prompt = make_prompt(9, len(request_id))
    return EngineCoreRequest(request_id, prompt, SamplingParams(**params), 2, 0.0, bad_words=bad_words)


def run(requests: list[EngineCoreRequest], **options: Any) -> dict[str, tuple[list[int], EngineCoreOutput]]:
    with running_core(tiny_model("qwen2"), **options) as core:
        found = outputs_of(core, requests)
    return {name: (token_ids_of(outputs), outputs[-1]) for name, outputs in found.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_scheduler_steps": 4, "async_scheduling": True},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "async_scheduling": True},
    ],
    ids=str,
)
def test_through_the_engine(options: dict[str, Any]) -> None:
    """Free requests get what they get without constrained ones; nothing left to sample ends one request only."""
    free = [request("free"), request("free, drawn", temperature=1.0, seed=3)]
    guided = [
        request("digits", {"regex": "[0-9]{3}-[a-f]+!"}, temperature=1.5, seed=1),
        request("logprobs", {"choice": ["yes", "no"]}, logprobs=3),
        request("guidance", {"json": {"type": "integer", "multipleOf": 7, "maximum": 99, "minimum": 20}}),
    ]
    nothing = [
        request("allowed and bad", allowed_token_ids=[70], bad_word_ids=[[70]]),
        request("bad at the third", allowed_token_ids=[70, 71], bad_word_ids=[[70, 70], [70, 71], [71]]),
        request("mask and allowed", {"regex": "[0-9]+"}, allowed_token_ids=[0]),
    ]
    alone = run(free, **options)
    results = run([*free, *nothing, *guided], **options)
    for message in free:
        assert results[message.request_id][0] == alone[message.request_id][0]
    for message in nothing:
        tokens, output = results[message.request_id]
        assert output.finish_reason is FinishReason.ERROR
        assert (output.error or "").startswith("No token is left to sample")
        assert NO_TOKEN not in tokens
    assert results["bad at the third"][0] == [70]
    for message in guided:
        assert results[message.request_id][1].finish_reason is FinishReason.STOP
        assert results[message.request_id][0][-1] == 2


def test_masks_are_as_wide_as_the_logits() -> None:
    config = make_config(tiny_model("qwen2"))
    assert config.model.vocab_size == VOCAB_SIZE
    logits, rows = torch.zeros(2, 64), torch.tensor([1])
    with pytest.raises(RuntimeError, match="bitmask must be a contiguous int32 matrix of 2 columns"):
        torch.ops.ascend_vllm.apply_token_bitmask(logits, torch.zeros(1, 3, dtype=torch.int32), rows)
    with pytest.raises(IndexError, match="row 2 is outside logits of 2 rows"):
        torch.ops.ascend_vllm.apply_token_bitmask(logits, torch.zeros(1, 2, dtype=torch.int32), rows + 1)
    assert not logits.any()
