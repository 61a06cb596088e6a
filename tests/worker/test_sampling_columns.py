"""Lists per slot against a plain dict of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_vllm.worker.sampling.columns import RaggedTable, ragged_arange

NUM_SLOTS = 5


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 7))))
def test_ragged_arange_is_a_loop_of_ranges(runs: list[tuple[int, int]]) -> None:
    starts = np.array([start for start, _ in runs], np.int64)
    counts = np.array([count for _, count in runs], np.int64)
    expected = [i for start, count in runs for i in range(start, start + count)]
    assert ragged_arange(starts, counts).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 600)), max_size=30),
    st.permutations(range(NUM_SLOTS)),
)
def test_gather_gives_what_was_set_last(writes: list[tuple[int, int]], order: list[int]) -> None:
    table = RaggedTable(NUM_SLOTS)
    plain: dict[int, tuple[list[int], list[float]]] = {}
    for number, (slot, length) in enumerate(writes):
        ids, values = list(range(number, number + length)), [float(number)] * length
        table.set(slot, ids, values)
        plain[slot] = (ids, values)
    index, ids_found, values_found = table.gather(np.array(order, np.int64))
    rows = [plain.get(slot, ([], [])) for slot in order]
    assert index.tolist() == [i for i, (ids, _) in enumerate(rows) for _ in ids]
    assert ids_found.tolist() == [token for ids, _ in rows for token in ids]
    assert values_found.tolist() == [value for _, values in rows for value in values]


def test_memory_follows_what_is_in_use() -> None:
    table = RaggedTable(2)
    for _ in range(100):
        table.set(0, list(range(5000)))
    assert len(table._ids) <= 4 * 5000
    table.set(0, ())
    index, _, _ = table.gather(np.array([0, 1]))
    assert len(index) == 0
