"""How a step's rows are divided into calls of the Ascend attention operators."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from ascend_vllm.attention.ascend_plan import (
    MAX_DECODED_TOKENS,
    MAX_EXPANDED_TOKENS,
    LatentPart,
    Part,
    Precision,
    RowKind,
    split_byte_rows,
    split_latent_rows,
    split_rows,
)

ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=30)


def split(rows: list[tuple[int, int]], precision: Precision, *, by_kind: bool) -> list[Part]:
    """The parts of rows given as (tokens of the step, cached tokens)."""
    query_start = np.cumsum([0, *(count for count, _ in rows)], dtype=np.int32)
    return split_rows(query_start, np.array([sum(row) for row in rows], np.int32), precision, by_kind=by_kind)


def kind_of(count: int, cached: int) -> RowKind:
    """The kind of a row."""
    if count == 1:
        return RowKind.DECODE
    return RowKind.PREFIX if cached else RowKind.PROMPT


@hypothesis.given(rows=ROWS, precise=st.tuples(st.booleans(), st.booleans(), st.booleans()), by_kind=st.booleans())
def test_parts_are_the_rows_in_their_order(
    rows: list[tuple[int, int]], precise: tuple[bool, bool, bool], by_kind: bool
) -> None:
    parts = split(rows, Precision(*precise), by_kind=by_kind)
    assert [row for part in parts for row in rows[part.rows]] == rows
    assert parts[0].tokens.start == 0
    for part, after in itertools.pairwise(parts):
        assert part.tokens.stop == after.tokens.start
        assert part.rows.stop == after.rows.start
    for part in parts:
        mine = rows[part.rows]
        kinds = {kind_of(*row) for row in mine}
        assert part.query_ends == np.cumsum([count for count, _ in mine]).tolist()
        assert part.query_ends[-1] == part.tokens.stop - part.tokens.start
        assert part.seq_lens == [sum(row) for row in mine]
        assert part.kinds == kinds
        # a row may be computed in high precision that it does not need, never without what it needs
        assert part.high_precision == any(precise[kind] for kind in kinds)
        if by_kind:
            assert kinds == {part.kind}
            assert part.high_precision == precise[part.kind]
    assert by_kind or len(parts) == 1


@pytest.mark.parametrize("by_kind", [True, False])
def test_decoding_rows_are_one_part(by_kind: bool) -> None:
    [part] = split([(1, 5), (1, 0), (1, 900)], Precision(), by_kind=by_kind)
    assert part == Part(
        RowKind.DECODE, False, slice(0, 3), slice(0, 3), [1, 2, 3], [6, 1, 901], frozenset({RowKind.DECODE})
    )


def test_rows_of_all_kinds_are_one_part() -> None:
    rows = [(1, 5), (3, 8), (4, 0), (2, 0)]
    assert [part.rows for part in split(rows, Precision(), by_kind=False)] == [slice(0, 4)]
    assert [part.rows for part in split(rows, Precision(), by_kind=True)] == [slice(0, 1), slice(1, 2), slice(2, 4)]


CACHED_ROWS = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 1, 70, 3000, 9000])), min_size=1, max_size=20
)


def split_latent(rows: list[tuple[int, int]]) -> list[LatentPart]:
    """The parts of latent attention of rows given as (tokens of the step, cached tokens)."""
    query_start = np.cumsum([0, *(count for count, _ in rows)], dtype=np.int32)
    return split_latent_rows(query_start, np.array([sum(row) for row in rows], np.int32))


@hypothesis.given(rows=CACHED_ROWS)
def test_parts_of_latent_attention_are_the_rows_in_their_order(rows: list[tuple[int, int]]) -> None:
    parts = split_latent(rows)
    assert [row for part in parts for row in rows[part.rows]] == rows
    assert parts[0].tokens.start == 0
    for part, after in itertools.pairwise(parts):
        assert part.tokens.stop == after.tokens.start
        # what could be one call is one
        assert part.is_absorbed != after.is_absorbed or not part.is_absorbed
    for part in parts:
        mine = rows[part.rows]
        assert part.query_ends == np.cumsum([count for count, _ in mine]).tolist()
        assert part.query_ends[-1] == part.tokens.stop - part.tokens.start
        assert part.seq_lens == [sum(row) for row in mine]
        assert part.max_query_len == max(count for count, _ in mine)
        for count, cached in mine:
            assert part.is_absorbed == (count == 1 or (cached > 0 and count <= MAX_DECODED_TOKENS))
        # every chunk but the last is full, and the last one has no more than so many cached tokens
        cached = sum(cached for _, cached in mine)
        assert list(part.chunk_starts) == list(range(0, part.chunk_starts[-1] + 1, MAX_EXPANDED_TOKENS))
        assert part.is_absorbed or 0 <= cached - part.chunk_starts[-1] <= MAX_EXPANDED_TOKENS
        assert len(mine) == 1 or len(part.chunk_starts) == 1


def test_rows_of_latent_attention() -> None:
    rows = [(1, 9000), (3, 5), (1, 0), (5, 0), (20, 4000), (20, 96), (20, 1), (20, 9000), (9, 0)]
    assert [(part.is_absorbed, part.rows, part.chunk_starts) for part in split_latent(rows)] == [
        (True, slice(0, 3), (0,)),
        (False, slice(3, 6), (0,)),
        (False, slice(6, 7), (0,)),
        (False, slice(7, 8), (0, 4096, 8192)),
        (False, slice(8, 9), (0,)),
    ]


@hypothesis.given(rows=CACHED_ROWS)
def test_parts_over_bytes_are_the_rows_in_their_order(rows: list[tuple[int, int]]) -> None:
    counts, seq_lens = [count for count, _ in rows], [sum(row) for row in rows]
    query_start = np.cumsum([0, *counts], dtype=np.int32)
    parts = split_byte_rows(query_start, np.array(seq_lens, np.int32), Precision(prefix=True, prompt=False))
    assert [row for part in parts for row in rows[part.rows]] == rows
    assert [token for part in parts for token in range(part.tokens.start, part.tokens.stop)] == list(
        range(sum(counts))
    )
    for part in parts:
        mine = rows[part.rows]
        assert part.query_lens == [count for count, _ in mine]
        assert part.query_ends == np.cumsum(part.query_lens).tolist()
        assert part.kv_ends == np.cumsum(part.seq_lens).tolist()
        assert part.is_fresh == all(cached == 0 for _, cached in mine)
        assert part.high_precision == any(cached for _, cached in mine)
        for count, cached in mine:
            assert part.is_decoded == (count == 1 or (cached > 0 and count <= MAX_DECODED_TOKENS))
        assert part.is_decoded or len(mine) == 1 or sum(cached for _, cached in mine) <= MAX_EXPANDED_TOKENS
