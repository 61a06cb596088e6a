"""Hashes of blocks: equal for equal contents, and for nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_vllm.core.kv.block_hash import extend_block_hashes

Keys = list[tuple[int, str]]


def hashes_of(token_ids: list[int], keys: Keys | None = None, block_size: int = 4) -> list[bytes]:
    """Hashes of all full blocks."""
    hashes: list[bytes] = []
    extend_block_hashes(hashes, len(token_ids) // block_size, token_ids, keys or [], block_size)
    return hashes


def num_equal(first: list[bytes], second: list[bytes]) -> int:
    """The number of blocks that two sequences can share; checks that all later hashes differ."""
    equal = [a == b for a, b in zip(first, second, strict=True)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


TOKENS = list(range(100, 116))


def test_a_changed_token_changes_its_block_and_later_ones() -> None:
    for position in range(16):
        changed = TOKENS.copy()
        changed[position] = 7
        assert num_equal(hashes_of(TOKENS), hashes_of(changed)) == position // 4


def test_equal_blocks_at_different_positions_differ() -> None:
    assert len(set(hashes_of([5] * 16))) == 4


@pytest.mark.parametrize("keys", [[(0, "salt:a")], [(0, "lora:1")], [(0, "salt:a"), (0, "lora:1")], [(3, "x")]])
def test_keys_of_the_first_block_share_nothing(keys: Keys) -> None:
    assert num_equal(hashes_of(TOKENS), hashes_of(TOKENS, keys)) == 0
    assert hashes_of(TOKENS, keys) == hashes_of(TOKENS, keys[::-1])


@pytest.mark.parametrize(("position", "num_shared"), [(3, 0), (4, 1), (7, 1), (8, 2), (15, 3), (16, 4), (99, 4)])
def test_a_later_key_leaves_earlier_blocks_shareable(position: int, num_shared: int) -> None:
    image = [(position, "image:1")]
    assert num_equal(hashes_of(TOKENS), hashes_of(TOKENS, image)) == num_shared
    assert num_equal(hashes_of(TOKENS, image), hashes_of(TOKENS, [(position, "image:2")])) == num_shared


def test_keys_are_kept_apart() -> None:
    """Boundaries between keys and their positions matter."""
    variants: list[Keys] = [
        [],
        [(0, "")],
        [(0, "ab")],
        [(0, "a"), (0, "b")],
        [(0, "b"), (0, "a"), (0, "")],
        [(0, "a"), (1, "b")],
        [(1, "a"), (0, "b")],
        [(0, "a\0\0\0b")],
        [(0, "\ud800")],
    ]
    assert len({hashes_of(TOKENS, keys)[0] for keys in variants}) == len(variants)


@given(
    token_ids=st.lists(st.sampled_from([0, 1, 255, 65_536, 2**31 - 1]), max_size=40),
    keys=st.lists(st.tuples(st.integers(0, 45), st.text(max_size=3)), max_size=4),
    block_size=st.sampled_from([1, 2, 5, 16]),
    data=st.data(),
)
def test_appending_hashes_step_by_step_gives_the_same(
    token_ids: list[int], keys: Keys, block_size: int, data: st.DataObject
) -> None:
    hashes: list[bytes] = []
    for end in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4))):
        extend_block_hashes(hashes, end // block_size, token_ids[:end], keys, block_size)
        assert len(hashes) == end // block_size
    assert hashes == hashes_of(token_ids, keys, block_size)[: len(hashes)]


@given(st.data())
def test_different_contents_have_different_hashes(data: st.DataObject) -> None:
    contents = st.tuples(
        st.lists(st.integers(0, 2), min_size=4, max_size=4),
        st.lists(st.tuples(st.integers(0, 1), st.text("ab", max_size=2)), max_size=3).map(sorted),
    )
    first, second = data.draw(contents), data.draw(contents)
    assert (hashes_of(*first) == hashes_of(*second)) == (first == second)


def test_unknown_tokens_have_no_hash() -> None:
    hashes: list[bytes] = []
    with pytest.raises(ValueError, match="7 tokens do not fill 2 blocks of 4"):
        extend_block_hashes(hashes, 2, TOKENS[:7], [], 4)
    assert hashes == []
