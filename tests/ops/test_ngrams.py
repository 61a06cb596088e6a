"""Drafts by n-grams: the tables against the definition, and both against texts done by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.ngrams import NgramTables, drafts_of
from ascend_vllm.types.step import NO_DRAFT

# text, k, shortest, longest, pads → drafts
BY_HAND = [
    # the longest n-gram decides, though a shorter one occurs earlier
    (([7, 9, 1, 7, 5, 2, 1, 7], 2, 1, 2, False), [5, 2]),
    # the first of several occurrences
    (([1, 2, 3, 1, 2, 4, 1, 2], 2, 1, 3, False), [3, 1]),
    # the end of the text, by both versions' rules
    (([1, 2, 3, 1, 2], 5, 2, 2, False), [3, 1, 2]),
    (([1, 2, 3, 1, 2], 5, 2, 2, True), [3, 1, 2, 2, 2]),
    # an occurrence may overlap the end
    (([4, 4, 4], 2, 1, 2, False), [4]),
    (([1, 2, 3, 4], 2, 1, 2, True), []),
    (([1, 2, 1], 2, 2, 3, False), []),
    (([1], 2, 1, 3, False), []),
]


def tables_of(rows: list[list[int]], *limits: int, room: int = 64, pads: bool = False) -> NgramTables:
    token_ids = np.zeros((len(rows), room), np.int32)
    for slot, row in enumerate(rows):
        token_ids[slot, : len(row)] = row
    return NgramTables(token_ids, np.array([len(row) for row in rows]), *limits, pads=pads)


@pytest.mark.parametrize(("arguments", "expected"), BY_HAND, ids=str)
def test_both_rules_by_hand(arguments: tuple[list[int], int, int, int, bool], expected: list[int]) -> None:
    text, count, shortest, longest, pads = arguments
    assert drafts_of(np.array(text, np.int32), count, shortest, longest, pads=pads) == expected
    found = tables_of([text], shortest, longest, pads=pads).drafts(np.array([0]), count)
    assert ([] if found is None else found[0][found[0] != NO_DRAFT].tolist()) == expected


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("limits", [(1, 1), (1, 4), (3, 5)])
def test_growing_texts_find_what_the_definition_finds(limits: tuple[int, int], pads: bool) -> None:
    """Three rows grow by different numbers of tokens, beyond the room of their first tables; one is replaced."""
    rng = np.random.default_rng(0)
    room, count = 900, 4
    token_ids = rng.integers(0, 6, (3, room)).astype(np.int32)
    # numbers whose hashes share their low bits, if hashes were the numbers themselves
    token_ids[1] *= 1 << 20
    num_tokens = np.array([1, 3, 2])
    tables = NgramTables(token_ids, num_tokens, *limits, pads=pads)
    for step in range(140):
        slots = np.array([0, 1, 2])[: 2 + step % 2]
        found = tables.drafts(slots, count)
        for row, slot in enumerate(slots.tolist()):
            expected = drafts_of(token_ids[slot, : num_tokens[slot]], count, *limits, pads=pads)
            drafts = [] if found is None else found[row][found[row] != NO_DRAFT].tolist()
            assert drafts == expected, (step, slot)
        num_tokens += np.minimum(rng.integers(0, 9, 3), room - num_tokens)
        if step == 70:
            tables.clear(1)
            token_ids[1], num_tokens[1] = rng.integers(0, 6, room), 5


def test_nothing_is_drafted_without_an_occurrence() -> None:
    assert tables_of([[1, 2, 3], [4, 5, 6]], 1, 3).drafts(np.array([1, 0]), 3) is None


@pytest.mark.skipif(not load_native_library(), reason="the kernels are not built")
def test_a_step_of_a_long_text_takes_no_time_that_grows_with_it() -> None:
    length = 32_768
    token_ids = np.random.default_rng(0).integers(0, 50_000, (1, length + 2_000)).astype(np.int32)
    num_tokens = np.array([length])
    tables = NgramTables(token_ids, num_tokens, 1, 4, pads=False)
    slots = np.array([0])
    tables.drafts(slots, 5)
    started = time.process_time()
    for _ in range(1_000):
        num_tokens += 2
        tables.drafts(slots, 5)
    # 20 microseconds on an idle processor
    assert time.process_time() - started < 0.1
