"""The sampler alone, on logits made for the purpose."""

from __future__ import annotations

import numpy as np
import torch

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NewRow, SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.sampling.sampler import PROCESSED_LOGITS, RAW_LOGITS, RAW_LOGPROBS, Sampled, Sampler

VOCAB_SIZE = 64


def make_sampler(*params: SamplingParams, logprobs_mode: str = RAW_LOGPROBS) -> Sampler:
    """A sampler whose slots 0, 1, … hold one-token prompts with the given parameters."""
    batch = InputBatch(max(4, len(params)), 32, 16, VOCAB_SIZE)
    rows = [NewRow(slot, f"r{slot}", [1], 1, 0, [slot], each, slot, [2]) for slot, each in enumerate(params)]
    batch.apply(SchedulerOutput(0, [], rows, [], [], []))
    return Sampler(batch, logprobs_mode, torch.device("cpu"))


def sample(sampler: Sampler, logits: torch.Tensor, slots: list[int]) -> Sampled:
    """The first token that rows generate after their one-token prompts."""
    return sampler.sample(logits, sampler.plan(np.array(slots)), torch.ones(len(slots), dtype=torch.int64))


def test_bfloat16_logits_are_biased_in_float32() -> None:
    """At 64 bfloat16 has steps of 0.5: a bias of 0.1 would be lost, and the lowest id would win."""
    logits = torch.full((2, VOCAB_SIZE), 64.0, dtype=torch.bfloat16)
    sampler = make_sampler(SamplingParams(temperature=0.0, logit_bias={40: 0.1}), SamplingParams(temperature=0.0))
    for _ in range(2):
        assert sample(sampler, logits.clone(), [0, 1]).token_ids.tolist() == [40, 0]


def test_the_float32_buffer_grows_with_the_rows() -> None:
    sampler = make_sampler(*[SamplingParams(temperature=0.0, logit_bias={slot: 50.0}) for slot in range(6)])
    for slots in ([5], [0, 3], [4, 2, 1, 0], [1]):
        logits = torch.randn(len(slots), VOCAB_SIZE).bfloat16()
        assert sample(sampler, logits, slots).token_ids.tolist() == slots


def test_greedy_rows_take_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, [7, 9, 30]] = 1.0
    logits[1, [50, 4]] = 2.0
    greedy = SamplingParams(temperature=0.0)
    alone = sample(make_sampler(greedy, greedy), logits.clone(), [0, 1]).token_ids
    three = make_sampler(greedy, greedy, SamplingParams())
    beside = sample(three, torch.cat((logits, torch.zeros(1, VOCAB_SIZE))), [0, 1, 2]).token_ids
    assert alone.tolist() == beside[:2].tolist() == [7, 4]


def test_more_logprobs_than_vocabulary_gives_all_of_it() -> None:
    sampler = make_sampler(SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE + 5))
    logprobs = sample(sampler, torch.randn(1, VOCAB_SIZE), [0]).logprobs
    assert logprobs is not None
    assert sorted(logprobs.token_ids[0, 1:].tolist()) == list(range(VOCAB_SIZE))
    np.testing.assert_allclose(logprobs.logprobs[0, 1:].exp().sum(), 1.0, rtol=1e-5)


def test_logits_in_place_of_logprobs() -> None:
    logits = torch.randn(1, VOCAB_SIZE)
    biased = logits.clone()
    biased[0, 9] += 3.0
    params = SamplingParams(temperature=0.5, top_k=4, logit_bias={9: 3.0}, logprobs=4, seed=1)
    for mode, expected in ((RAW_LOGITS, logits), (PROCESSED_LOGITS, biased / 0.5)):
        found = sample(make_sampler(params, logprobs_mode=mode), logits.clone(), [0]).logprobs
        assert found is not None
        ids = found.token_ids[0]
        torch.testing.assert_close(found.logprobs[0], expected[0, ids])
        assert ids[1:].tolist() == expected.topk(4).indices[0].tolist()
