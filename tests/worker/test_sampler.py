"""The sampler alone, on logits made for the purpose."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


EDITS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "random": {"temperature": 1.0},
    "bias": {"logit_bias": {9: 30.0}},
    "penalty": {"repetition_penalty": 1.9},
    "allowed": {"allowed_token_ids": [4, 5]},
    "min_tokens": {"min_tokens": 3},
    "processor": {"logits_processors": [lambda _ids, logits: logits.mul_(-1)]},
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_plan_is_kept_only_while_rows_and_parameters_are_the_same(edit: str) -> None:
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = SamplingParams(temperature=0.0)
    after = SamplingParams(**({"temperature": 0.0, "seed": 1} | EDITS[edit]))
    batch = InputBatch(4, 32, 16, VOCAB_SIZE)
    sampler = Sampler(batch, RAW_LOGPROBS, torch.device("cpu"))
    slots = np.array([0, 1])
    for params in (before, after):
        rows = [NewRow(slot, f"r{slot}", [1], 1, 0, [slot], params, slot, [2]) for slot in (0, 1)]
        batch.apply(SchedulerOutput(0, [], rows, [], [], []))
        for _ in range(2):
            found = sample(sampler, logits.clone(), [0, 1]).token_ids
            assert found.tolist() == sample(make_sampler(params, params), logits.clone(), [0, 1]).token_ids.tolist()
        # ids that are forbidden until a row is long enough depend on the step
        assert (sampler.plan(slots) is sampler.plan(slots.copy())) == (params.min_tokens == 0)
        assert sampler.plan(slots) is not sampler.plan(slots[::-1].copy())
    batch.apply(SchedulerOutput(0, [0, 1], [], [], [], []))
    assert sampler.plan(slots).needed == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("all_ask", [True, False], ids=["all ask", "one asks"])
@pytest.mark.parametrize("edit", EDITS)
def test_raw_logprobs_are_those_of_the_logits_before_edits(edit: str, all_ask: bool, dtype: torch.dtype) -> None:
    """Equal ones in the order of their ids, whatever becomes of the logits, in which many are equal."""
    logits = torch.randn(2, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).round().to(dtype)
    params = SamplingParams(**({"temperature": 0.0, "seed": 1} | EDITS[edit]), logprobs=20)
    other = params if all_ask else SamplingParams(temperature=0.0)
    sampled = sample(make_sampler(params, other), logits.clone(), [0, 1])
    found = sampled.logprobs
    assert found is not None and len(found.ranks) == 1 + all_ask
    for row in range(1 + all_ask):
        raw = logits[row].double()
        own = int(sampled.token_ids[row])
        ids = found.token_ids[row].tolist()
        assert ids == [own, *sorted(range(VOCAB_SIZE), key=lambda id_: (-float(raw[id_]), id_))[:20]]
        torch.testing.assert_close(found.logprobs[row].double(), raw.log_softmax(-1)[ids], rtol=0, atol=1e-6)
        assert int(found.ranks[row]) == 1 + int((raw > raw[own]).sum())


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=6)


@given(st.lists(st.tuples(WORDS, st.lists(st.integers(0, 3), max_size=8)), min_size=1, max_size=4))
def test_bad_words_of_all_lengths_beside_each_other(rows: list[tuple[list[list[int]], list[int]]]) -> None:
    """Against the plain definition: a word's last token is forbidden where the output ends with the others."""
    prompt = [0, 1, 2, 3]
    batch = InputBatch(len(rows), 32, 16, VOCAB_SIZE)
    greedy = SamplingParams(temperature=0.0)
    new = [
        NewRow(slot, str(slot), prompt + output, len(prompt), 0, [slot], greedy, 0, [], bad_words=words)
        for slot, (words, output) in enumerate(rows)
    ]
    batch.apply(SchedulerOutput(0, [], new, [], [], []))
    sampler = Sampler(batch, RAW_LOGPROBS, torch.device("cpu"))
    slots = np.arange(len(rows))
    logits = torch.zeros(len(rows), VOCAB_SIZE)
    # the same dtype and the same memory as a step's: edited in place
    sampler.sample(logits, sampler.plan(slots), torch.from_numpy(batch.num_tokens[slots]))
    for row, (words, output) in enumerate(rows):
        banned = {last for *start, last in words if output[max(0, len(output) - len(start)) :] == start}
        assert set(np.flatnonzero(logits[row] == -torch.inf).tolist()) == banned


def test_a_long_bad_word_takes_its_own_length_alone() -> None:
    """A table as wide as the longest word of any row, with a line for every word, took 179 GiB of one request."""
    greedy = SamplingParams(temperature=0.0)
    words = [[[5] * 20_000], [[6, 7]] * 10_000]
    rows = [NewRow(slot, str(slot), [1], 1, 0, [slot], greedy, 0, [], bad_words=words[slot]) for slot in (0, 1)]
    batch = InputBatch(2, 32, 16, VOCAB_SIZE)
    tracemalloc.start()
    try:
        batch.apply(SchedulerOutput(0, [], rows, [], [], []))
        Sampler(batch, RAW_LOGPROBS, torch.device("cpu")).plan(np.arange(2))
        # 40,000 tokens in all; a few numbers of 8 bytes for each
        assert tracemalloc.get_traced_memory()[1] < 8e6
    finally:
        tracemalloc.stop()


def test_the_longest_allowed_lists_in_many_rows() -> None:
    """Ids that are allowed alone cost a bit each and no more, and the sampler one mask for a row."""
    num_rows, vocab_size = 64, 150_000
    allowed = list(range(0, vocab_size, 2))
    params = SamplingParams(temperature=0.0, allowed_token_ids=allowed)
    batch = InputBatch(num_rows, 32, 16, vocab_size)
    rows = [NewRow(slot, str(slot), [1], 1, 0, [slot], params, 0, []) for slot in range(num_rows)]
    tracemalloc.start()
    try:
        batch.apply(SchedulerOutput(0, [], rows, [], [], []))
        sampler = Sampler(batch, RAW_LOGPROBS, torch.device("cpu"))
        sampler.plan(np.arange(num_rows))
        assert tracemalloc.get_traced_memory()[1] < 3 * num_rows * vocab_size / 8
    finally:
        tracemalloc.stop()
    logits = torch.zeros(1, vocab_size)
    logits[0, [7, 1001, 149_998]] = torch.tensor([9.0, 8.0, 7.0])
    assert sample(sampler, logits, [3]).token_ids.tolist() == [149_998]


RICH = SamplingParams(temperature=0.9, top_k=30, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.4)
PARAMS = (
    RICH,
    SamplingParams(temperature=0.0, frequency_penalty=0.7),
    SamplingParams(temperature=1.2, min_p=0.01, allowed_token_ids=list(range(10, 40))),
    SamplingParams(temperature=1.0, logit_bias={7: 4.0}, logprobs=2),
    SamplingParams(temperature=0.0),
)


def generate(params: tuple[SamplingParams, ...], *, fused: bool, num_steps: int = 1) -> list[list[int]]:
    """Tokens of a few steps, of which the second constrains a row, and the fourth replaces row 0 by another."""
    generator = torch.Generator().manual_seed(5)
    batch = InputBatch(len(params), 32, 16, VOCAB_SIZE)
    rows = [
        NewRow(slot, f"r{slot}", [1, 5 + slot, VOCAB_SIZE + 3], 3, 0, [slot], each, slot, [2])
        for slot, each in enumerate(params)
    ]
    batch.apply(SchedulerOutput(0, [], rows, [], [], []))
    sampler = Sampler(batch, RAW_LOGPROBS, torch.device("cpu"), host_memory=not fused, fused=fused)
    slots = np.arange(len(params))
    answers = []
    for step in range(6):
        if step == 3:
            new = NewRow(0, "new", [9, 9, 8], 3, 0, [0], RICH, 77, [2])
            batch.apply(SchedulerOutput(0, [0], [new], [], [], []))
        plan = sampler.plan(slots, num_steps)
        if step == 1 and num_steps == 1:
            bitmask = np.full((1, VOCAB_SIZE // 32), 0x0F0F0F0F, np.int32)
            plan = sampler.constrain(plan, np.array([2]), bitmask)
        assert (plan.fused is not None) == fused
        for number in range(num_steps):
            num_tokens = torch.from_numpy(batch.num_tokens[slots])
            logits = torch.randn(len(params), VOCAB_SIZE, generator=generator) * 3
            ids = sampler.sample(logits, plan, num_tokens, number).token_ids
            if number + 1 < num_steps:
                sampler.remember(plan, ids, num_tokens)
            batch.append(slots, ids.numpy())
            answers.append(ids.tolist())
    return answers


@pytest.mark.parametrize("num_steps", [1, 3])
def test_one_op_samples_what_many_do(num_steps: int) -> None:
    """Penalties, masks, biases, filters and draws, with counts that are kept from step to step."""
    expected = generate(PARAMS, fused=False, num_steps=num_steps)
    assert generate(PARAMS, fused=True, num_steps=num_steps) == expected
    assert len({ids[0] for ids in expected}) > 2


def test_one_op_samples_at_the_positions_of_drafts() -> None:
    """Each with the counts up to it, and the row's own counts are right afterwards."""
    answers = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(6)
        batch = InputBatch(2, 32, 16, VOCAB_SIZE)
        rows = [
            NewRow(slot, f"r{slot}", [1, 4], 2, 0, [slot], each, slot, [2]) for slot, each in enumerate(PARAMS[:2])
        ]
        batch.apply(SchedulerOutput(0, [], rows, [], [], []))
        sampler = Sampler(batch, RAW_LOGPROBS, torch.device("cpu"), host_memory=not fused, fused=fused)
        # drafts behind the tokens of row 0
        batch.token_ids[0, 2:4] = 7
        ids = []
        for slots, num_tokens in (([0, 0, 0, 1], [2, 3, 4, 2]), ([0, 1], [4, 3]), ([0, 1], [5, 4])):
            plan = sampler.plan(np.array(slots), num_tokens=np.array(num_tokens))
            assert (plan.fused is not None) == fused
            logits = torch.randn(len(slots), VOCAB_SIZE, generator=generator)
            sampled = sampler.sample(logits, plan, torch.tensor(num_tokens)).token_ids
            ids.append(sampled.tolist())
            last = sampled[-2:] if len(slots) == 2 else sampled[-1:]
            for slot, token in zip([0, 1][-len(last) :], last.tolist(), strict=True):
                batch.token_ids[slot, num_tokens[slot - 2]] = token
        answers.append(ids)
    assert answers[0] == answers[1]
