"""Forked rows and replaced blocks: rows that share what they computed and go on apart."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import MoveKind, NewRow, SchedulerOutput
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.sampling.columns import ALLOWED_IDS
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import Driver, generate, make_prompt, started_worker

NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE = 5, 40, 8, 100

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logprobs=3, min_tokens=2),
    SamplingParams(temperature=0.0, logit_bias={3: 1.0, 9: -2.0}, allowed_token_ids=[3, 9, 4]),
    SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1),
    SamplingParams(temperature=0.0, allowed_token_ids=list(range(50)), min_tokens=9),
)
COLUMNS = (
    "features",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "min_tokens",
    "num_logprobs",
)
TABLES = ("stop_ids", "logit_bias")


@dataclasses.dataclass
class Plain:
    """Everything a slot holds, as Python objects."""

    tokens: list[int]
    computed: int
    prompt_len: int
    blocks: list[int]
    limit: int
    columns: list[float]
    tables: list[tuple[list[int], list[float]]]
    # of a row that has some; what another has left in the slot means nothing
    allowed_ids: list[int] | None


def read(batch: InputBatch, slot: int) -> Plain:
    tables = [getattr(batch.sampling, name).gather(np.array([slot]))[1:] for name in TABLES]
    return Plain(
        batch.token_ids[slot, : batch.num_tokens[slot]].tolist(),
        int(batch.num_computed_tokens[slot]),
        int(batch.prompt_lens[slot]),
        batch.block_table[slot, : batch.num_blocks[slot]].tolist(),
        int(batch.max_num_tokens[slot]),
        [getattr(batch.sampling, name)[slot] for name in COLUMNS],
        [(ids.tolist(), values.tolist()) for ids, values in tables],
        batch.sampling.allowed_ids[slot].tolist() if batch.sampling.features[slot] & ALLOWED_IDS else None,
    )


def make_batch(lengths: list[int]) -> InputBatch:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    rows = [
        NewRow(
            slot,
            f"r{slot}",
            list(range(slot, slot + length)),
            max(1, length - 2 * slot),
            length - 1,
            list(range(10 * slot, 10 * slot - (-length // BLOCK_SIZE))),
            PARAMS[slot],
            seed=100 + slot,
            stop_token_ids=[slot, 50 + slot],
            max_num_tokens=30 + slot,
        )
        for slot, length in enumerate(lengths)
    ]
    batch.apply(SchedulerOutput(0, [], rows, [], [], []))
    return batch


def fork_step(
    forks: list[tuple[int, int, int]], replaced: list[tuple[int, int, int]] | None = None
) -> SchedulerOutput:
    return SchedulerOutput(1, [], [], [], [], [], forks=forks, replaced_blocks=replaced or [])


def test_every_column_of_the_sampling_parameters_is_forked() -> None:
    """The test's list is the class's: a column of slots that is added must be copied too."""
    sampling = make_batch([1] * NUM_SLOTS).sampling
    found = {name for name, value in vars(sampling).items() if isinstance(value, np.ndarray)}
    # `entered` tells a forked row from the one before it in its slot
    assert found == {*COLUMNS, "allowed_ids", "entered"}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=NUM_SLOTS, max_size=NUM_SLOTS),
    st.permutations(range(NUM_SLOTS)),
    st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, VOCAB_SIZE - 1)), max_size=NUM_SLOTS),
)
def test_sources_are_read_before_targets_are_written(
    lengths: list[int], targets: list[int], picks: list[tuple[int, int]]
) -> None:
    batch = make_batch(lengths)
    forks = [(target, source, token) for target, (source, token) in zip(targets, picks, strict=False)]
    before = [read(batch, slot) for slot in range(NUM_SLOTS)]
    batch.apply(fork_step(forks))
    expected = dict(enumerate(before))
    for target, source, token in forks:
        row = before[source]
        expected[target] = dataclasses.replace(row, tokens=[*row.tokens[: row.computed], token])
    for slot in range(NUM_SLOTS):
        assert read(batch, slot) == expected[slot]


def test_a_fork_keeps_its_lists_when_its_source_leaves() -> None:
    batch = make_batch([9] * NUM_SLOTS)
    of_source = read(batch, 4).tables
    batch.apply(fork_step([(0, 4, 7)]))
    batch.apply(SchedulerOutput(2, [4], [], [], [], []))
    # enough lists for the tables' memory to be compacted
    for _ in range(100):
        batch.sampling.stop_ids.set(4, list(range(50)))
    assert read(batch, 0).tables == of_source


def test_a_row_that_enters_in_the_step_can_be_forked() -> None:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    row = NewRow(2, "r", [5, 6, 7], 2, 2, [4], PARAMS[1], 9, [1])
    batch.apply(SchedulerOutput(0, [], [row], [], [], [], forks=[(0, 2, 8), (2, 2, 9)]))
    assert read(batch, 0).tokens == [5, 6, 8]
    assert read(batch, 2).tokens == [5, 6, 9]


def test_blocks_are_replaced_after_forks_and_new_blocks() -> None:
    batch = make_batch([9, 9, 9, 9, 9])
    step = fork_step([(1, 0, 3)], [(1, 0, 77), (1, 2, 78), (3, 1, 79)])
    step.new_blocks = [(1, [60, 61])]
    batch.apply(step)
    assert read(batch, 1).blocks == [77, 1, 78, 61]
    assert read(batch, 0).blocks == [0, 1]
    assert read(batch, 3).blocks == [30, 79]


@pytest.mark.parametrize("index", [-1, 2])
def test_a_block_that_is_not_there_cannot_be_replaced(index: int) -> None:
    with pytest.raises(ValueError, match=f"slot 1 has 2 blocks, .* index {index}"):
        make_batch([9] * NUM_SLOTS).apply(fork_step([], [(1, index, 3)]))


@pytest.mark.parametrize("block_size", [16, 64])
def test_forks_of_a_real_row_go_on_as_if_alone(block_size: int) -> None:
    """Three rows share all blocks but the one that is being filled, which is copied."""
    worker = started_worker(tiny_model("qwen2"), block_size=block_size)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.3, logit_bias={4: 2.0})
    prompt = make_prompt(block_size + 9)
    with Driver(worker) as driver:
        driver.add("row", prompt, params, seed=4)
        driver.steps(4)
        # the last of these takes the place of what the row sampled
        tokens = {"one": 11, "two": 12, "row": 13}
        for name in ("one", "two"):
            driver.fork(name, "row", tokens[name])
        driver.fork("row", "row", tokens["row"])
        common = driver.rows["row"].tokens[:-1]
        assert [row.tokens for row in driver.rows.values()] == [[*common, tokens[n]] for n in driver.rows]
        kinds = [kind for kind, _, _ in driver.pending.block_moves]
        assert kinds == [MoveKind.COPY, MoveKind.COPY]
        driver.steps(10)
        found = {name: row.tokens for name, row in driver.rows.items()}
        shared = driver.rows["one"].blocks[0]
        assert all(row.blocks[0] == shared for row in driver.rows.values())
        driver.rows["one"].blocks, driver.rows["two"].blocks = [], []
    for name, token in tokens.items():
        alone = generate(worker, [*common, token], params, 10, seed=4, num_prompt_tokens=len(prompt))
        assert found[name][len(prompt) :] == alone
