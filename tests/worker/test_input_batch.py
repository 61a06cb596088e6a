"""Slots and batch building against a plain, slow definition that keeps Python lists per row."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_vllm.ops.decode_inputs import DecodeInputs
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.step import NewRow, SchedulerOutput
from ascend_vllm.worker.input_batch import HostBatch, InputBatch

NUM_SLOTS = 4
MAX_MODEL_LEN = 40
BLOCK_SIZE = 8
VOCAB_SIZE = 1000


@dataclasses.dataclass
class PlainRow:
    """A row as one would write it down."""

    tokens: list[int]
    prompt_len: int
    computed: int
    blocks: list[int]


def new_row(slot: int, tokens: list[int], blocks: list[int], computed: int = 0) -> NewRow:
    return NewRow(slot, f"r{slot}", tokens, len(tokens), computed, blocks, SamplingParams(), 0, [])


def step_of(**changes: object) -> SchedulerOutput:
    fields: dict[str, object] = {
        "step_id": 0,
        "freed_slots": [],
        "new_rows": [],
        "slots": [],
        "num_scheduled_tokens": [],
        "new_blocks": [],
    }
    return SchedulerOutput(**(fields | changes))  # type: ignore[arg-type]


def check(batch: HostBatch, rows: dict[int, PlainRow], slots: list[int], counts: list[int]) -> None:
    """Compares a built batch with loops over tokens."""
    input_ids, positions, slot_mapping, query_start, seq_lens, indices, sampling = [], [], [], [0], [], [], []
    for slot, count in zip(slots, counts, strict=True):
        row = rows[slot]
        for position in range(row.computed, row.computed + count):
            input_ids.append(row.tokens[position])
            positions.append(position)
            slot_mapping.append(row.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        query_start.append(query_start[-1] + count)
        seq_lens.append(row.computed + count)
        if row.computed + count == len(row.tokens):
            indices.append(query_start[-1] - 1)
            sampling.append(slot)
    assert batch.input_ids.tolist() == input_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slot_mapping
    assert batch.query_start.tolist() == query_start
    assert batch.seq_lens.tolist() == seq_lens
    assert batch.logits_indices.tolist() == indices
    assert batch.sampling_slots.tolist() == sampling
    assert batch.max_query_len == max(counts)
    assert batch.max_seq_len == max(seq_lens)
    for found, slot, length in zip(batch.block_table, slots, seq_lens, strict=True):
        used = -(-length // BLOCK_SIZE)
        assert found[:used].tolist() == rows[slot].blocks[:used]


def make_batch(is_native: bool) -> InputBatch:
    """Slots whose decoding steps are gathered by the native call, or by numpy."""
    if is_native and not load_native_library():
        pytest.skip("no library")
    with mock.patch.object(DecodeInputs, "is_available", return_value=is_native):
        return InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)


@pytest.mark.parametrize("is_native", [True, False])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_run_of_steps_builds_the_plain_batches(is_native: bool, data: st.DataObject) -> None:
    batch = make_batch(is_native)
    rows: dict[int, PlainRow] = {}
    next_block = 1
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        freed = data.draw(st.lists(st.sampled_from(sorted(rows)), unique=True), label="freed") if rows else []
        for slot in freed:
            del rows[slot]
        step = step_of(freed_slots=freed)
        for slot in sorted(set(range(NUM_SLOTS)) - rows.keys()):
            if not data.draw(st.booleans(), label=f"slot {slot} enters"):
                continue
            tokens = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30))
            computed = data.draw(st.integers(0, len(tokens) - 1))
            blocks = [next_block + i for i in range(-(-len(tokens) // BLOCK_SIZE))]
            next_block += len(blocks)
            rows[slot] = PlainRow(list(tokens), len(tokens), computed, list(blocks))
            step.new_rows.append(new_row(slot, tokens, blocks, computed))
        slots, counts = [], []
        for slot in data.draw(st.permutations(sorted(rows)), label="order"):
            missing = len(rows[slot].tokens) - rows[slot].computed
            if rows[slot].computed >= MAX_MODEL_LEN or not data.draw(st.booleans(), label=f"slot {slot} runs"):
                continue
            count = min(data.draw(st.integers(1, missing)), MAX_MODEL_LEN - rows[slot].computed)
            needed = -(-(rows[slot].computed + count) // BLOCK_SIZE) - len(rows[slot].blocks)
            if needed > 0:
                added = [next_block + i for i in range(needed)]
                next_block += needed
                rows[slot].blocks += added
                step.new_blocks.append((slot, added))
            slots.append(slot)
            counts.append(count)
        batch.apply(step)
        if not slots:
            continue
        slots_np, counts_np = np.array(slots), np.array(counts)
        built = batch.build(slots_np, counts_np)
        check(built, rows, slots, counts)
        batch.advance(slots_np, counts_np)
        sampled = np.arange(len(built.sampling_slots)) + 500
        batch.append(built.sampling_slots, sampled)
        for slot, count in zip(slots, counts, strict=True):
            rows[slot].computed += count
        for slot, token in zip(built.sampling_slots.tolist(), sampled.tolist(), strict=True):
            rows[slot].tokens.append(token)
        for slot, row in rows.items():
            assert batch.token_ids[slot, : batch.num_tokens[slot]].tolist() == row.tokens
            assert batch.num_computed_tokens[slot] == row.computed
            assert batch.prompt_lens[slot] == row.prompt_len


def test_dtypes_are_those_of_the_forward_batch() -> None:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    batch.apply(step_of(new_rows=[new_row(0, [1, 2, 3], [7]), new_row(2, [4], [9])]))
    forward = batch.build(np.array([2, 0]), np.array([1, 3])).to_device(torch.device("cpu"))
    for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
        assert getattr(forward, name).dtype == torch.int64, name
    for name in ("query_start", "seq_lens", "block_table"):
        assert getattr(forward, name).dtype == torch.int32, name
    assert forward.block_table.tolist() == [[9], [7]]


def test_a_reused_slot_keeps_nothing_of_its_last_row() -> None:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    busy = SamplingParams(
        temperature=0.7, logprobs=3, min_tokens=5, logit_bias={3: 1.0}, allowed_token_ids=[3, 4], presence_penalty=1.0
    )
    batch.apply(step_of(new_rows=[NewRow(1, "a", [1] * 20, 20, 0, [4, 5, 6], busy, 9, [2])]))
    batch.apply(step_of(freed_slots=[1]))
    assert batch.sampling.features[1] == 0
    plain = SamplingParams(temperature=0.0)
    batch.apply(step_of(new_rows=[NewRow(1, "b", [8, 9], 2, 0, [3], plain, 0, [2])]))
    assert batch.sampling.features[1] == 0
    built = batch.build(np.array([1]), np.array([2]))
    assert built.input_ids.tolist() == [8, 9]
    assert built.slot_mapping.tolist() == [3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1]


@pytest.mark.parametrize(("scheduled", "words"), [(4, "3 tokens known"), (3, "1 blocks of 8")])
def test_a_step_that_does_not_fit_says_which_row(scheduled: int, words: str) -> None:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    computed = 0 if scheduled == 4 else 6
    tokens = [1] * (3 + computed)
    batch.apply(step_of(new_rows=[new_row(1, tokens, [7], computed)]))
    with pytest.raises(ValueError, match=f"slot 1: .*{words}"):
        batch.build(np.array([1]), np.array([scheduled]))


@pytest.mark.parametrize("is_native", [True, False])
def test_a_decoding_row_without_a_block_is_refused(is_native: bool) -> None:
    batch = make_batch(is_native)
    batch.apply(step_of(new_rows=[new_row(0, [1], [5]), new_row(2, [1] * 9, [7], 8)]))
    with pytest.raises(ValueError, match=r"slot 2: .*1 blocks of 8"):
        batch.build(np.array([0, 2]), np.array([1, 1]))


def test_one_token_of_a_longer_prompt_is_no_decoding_step() -> None:
    batch = make_batch(is_native=True)
    batch.apply(step_of(new_rows=[new_row(0, [1], [5]), new_row(2, [3, 4], [7])]))
    built = batch.build(np.array([0, 2]), np.array([1, 1]))
    assert built.input_ids.tolist() == [1, 3]
    assert built.sampling_slots.tolist() == [0]


def test_a_row_longer_than_a_slot_is_refused() -> None:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    with pytest.raises(ValueError, match="request r0 has 41 tokens"):
        batch.apply(step_of(new_rows=[new_row(0, [1] * 41, [1])]))


def test_a_full_sequence_has_a_place_for_its_last_token() -> None:
    batch = InputBatch(NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    batch.apply(step_of(new_rows=[new_row(3, [1] * MAX_MODEL_LEN, [1, 2, 3, 4, 5])]))
    built = batch.build(np.array([3]), np.array([MAX_MODEL_LEN]))
    batch.append(built.sampling_slots, np.array([77]))
    assert batch.token_ids[3, MAX_MODEL_LEN] == 77


@pytest.mark.parametrize("most_drafts", [0, 3])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_drafts_are_gathered_as_by_numpy(most_drafts: int, data: st.DataObject) -> None:
    """Also where some rows have none, and rows that compute prompts beside them; without room, only by numpy."""
    batches = []
    for is_native in (True, False):
        if is_native and not load_native_library():
            pytest.skip("no library")
        with mock.patch.object(DecodeInputs, "is_available", return_value=is_native):
            sizes = (NUM_SLOTS, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
            batches.append(InputBatch(*sizes, max_drafts=most_drafts))
    step, slots, counts = step_of(), [], []
    for slot in data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True), label="slots"):
        tokens = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=MAX_MODEL_LEN - 3))
        missing = data.draw(st.sampled_from([1, 1, 1, len(tokens)]), label="missing")
        drafts = data.draw(st.lists(st.integers(0, 1), max_size=3), label="drafts")
        blocks = list(range(1 + 10 * slot, 1 + 10 * slot - (-(len(tokens) + 3) // BLOCK_SIZE)))
        step.new_rows.append(new_row(slot, tokens, blocks, len(tokens) - missing))
        step.drafts.append((slot, drafts))
        slots.append(slot)
        counts.append(missing + len(drafts))
    built = []
    for batch in batches:
        batch.apply(step)
        built.append(batch.build(np.array(slots), np.array(counts)))
    native, plain = built
    for field in ("input_ids", "positions", "slot_mapping", "query_start", "seq_lens", "logits_indices"):
        found, expected = getattr(native, field), getattr(plain, field)
        assert found.tolist() == expected.tolist(), field
        assert found.dtype == expected.dtype
    assert native.sampling_slots.tolist() == plain.sampling_slots.tolist()
    assert (native.num_places is None) == (plain.num_places is None)
    if native.num_places is not None and plain.num_places is not None:
        assert native.num_places.tolist() == plain.num_places.tolist()
    assert (native.max_query_len, native.max_seq_len) == (plain.max_query_len, plain.max_seq_len)
    for index, length in enumerate(native.seq_lens.tolist()):
        used = -(-length // BLOCK_SIZE)
        assert native.block_table[index, :used].tolist() == plain.block_table[index, :used].tolist()
    assert plain.num_places is not None
    # right drafts, wrong ones, and what is sampled where all tokens are forbidden
    ids = st.sampled_from([-1, 0, 1])
    sampled = np.array(data.draw(st.lists(ids, min_size=(count := int(plain.num_places.sum())), max_size=count)))
    tables, kept = [], []
    for batch, one in zip(batches, built, strict=True):
        assert one.num_places is not None
        batch.advance(np.array(slots), np.array(counts))
        tables.append(batch.accept(one.sampling_slots, one.num_places, sampled))
        ends = batch.num_tokens[slots].tolist()
        rows = [batch.token_ids[slot, :end].tolist() for slot, end in zip(slots, ends, strict=True)]
        kept.append([ends, batch.num_computed_tokens[slots].tolist(), rows])
    assert tables[0].tolist() == tables[1].tolist()
    assert tables[0].dtype == tables[1].dtype
    assert kept[0] == kept[1]


@pytest.mark.skipif(not load_native_library(), reason="needs the compiled library")
@pytest.mark.parametrize("shift", [0, 1])
def test_several_tokens_need_blocks_and_room(shift: int) -> None:
    """Row 1 has two blocks and, with the token that a head reads ahead, one place less."""
    token_ids = np.arange(3 * (2 * BLOCK_SIZE + 1), dtype=np.int32).reshape(3, -1)
    table = np.arange(6, dtype=np.int32).reshape(3, 2)
    lengths = np.zeros(3, np.int64)
    inputs = DecodeInputs(token_ids, table, np.full(3, 2), lengths, lengths, BLOCK_SIZE, 4)
    slots, counts = np.array([1, 0]), np.array([3, 1])
    most = 2 * BLOCK_SIZE
    assert inputs.gather_several(slots, np.array([most - 3, 2]), counts, shift) == most
    assert inputs.input_ids[:4].tolist() == [*(token_ids[1, most - 3 + shift : most + shift]), 2 + shift]
    assert inputs.last_tokens[:2].tolist() == [2, 3]
    assert inputs.query_start[:3].tolist() == [0, 3, 4]
    assert inputs.gather_several(slots, np.array([most - 2, 2]), counts, shift) == 0
    assert inputs.gather_several(slots, np.array([most - 3, 2]), counts, 2) == 0
