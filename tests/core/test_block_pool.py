"""Blocks: allocated and released once, shared by reference count, found by hash."""

from __future__ import annotations

import pytest

from ascend_vllm.core.kv.block_pool import BlockPool


def test_allocate_takes_each_block_once() -> None:
    pool = BlockPool(5)
    taken = pool.allocate(2) + pool.allocate(0) + pool.allocate(3)
    assert sorted(taken) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.usage) == (0, 1.0)
    assert pool.violations([taken]) == []


def test_allocate_too_many_takes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        pool.allocate(4)
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.allocate(-1)
    assert pool.num_free == 3


def test_pool_without_blocks() -> None:
    pool = BlockPool(0)
    assert (pool.allocate(0), pool.usage, pool.num_free) == ([], 0.0, 0)
    assert pool.violations([]) == []


def test_released_blocks_are_allocated_again_in_the_same_order() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.allocate(3) == blocks


def test_release_twice_is_an_error() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    pool.release([])
    with pytest.raises(ValueError, match=f"block {blocks[0]} is released twice"):
        pool.release(blocks)
    assert pool.num_free == 2


def test_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.retain(blocks[:1])
    assert pool.violations([blocks, blocks[:1]]) == []
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks[:1])
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.retain(blocks[:1])


def test_violations_are_found() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert pool.violations([]) == [f"block {block} has 1 references and 0 owners" for block in blocks]
    assert pool.violations([blocks, blocks[:1]]) == ["block 0 has 1 references and 2 owners"]
    pool._free.append(pool._free[0])
    assert "a block is twice in the free list" in pool.violations([blocks])
    del pool._free[:]
    assert "the free list and the reference counts disagree" in pool.violations([blocks])


def cached_pool(num_blocks: int, num_cached: int) -> tuple[BlockPool, list[int]]:
    """A pool with one sequence whose blocks, all cached, have been released."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(num_cached)
    for block_id in blocks:
        pool.cache(block_id, b"%d" % block_id)
    pool.release(blocks)
    return pool, blocks


def test_cached_blocks_are_found_until_they_are_allocated() -> None:
    pool, blocks = cached_pool(5, 3)
    hashes = [b"0", b"1", b"2"]
    assert (pool.num_free, len(pool.ids_by_hash), pool.usage) == (5, 3, 0.0)
    assert pool.find(hashes) == blocks
    assert pool.find([b"0", b"other", b"2"]) == [0]
    assert pool.find([b"other", b"0"]) == []
    # blocks that are not cached come first, then the sequence's last block
    assert pool.allocate(2) == [3, 4]
    assert pool.find(hashes) == blocks
    assert pool.allocate(1) == [2]
    assert (pool.find(hashes), pool.hashes[2]) == ([0, 1], None)
    assert pool.allocate(2) == [1, 0]
    assert (pool.find(hashes), len(pool.ids_by_hash)) == ([], 0)
    assert pool.violations([[0, 1, 2, 3, 4]]) == []


def test_allocation_can_take_both_kinds_of_free_blocks() -> None:
    pool, _ = cached_pool(4, 2)
    assert pool.allocate(3) == [2, 3, 1]
    assert pool.find([b"0", b"1"]) == [0]
    assert pool.violations([[1, 2, 3]]) == []


def test_a_found_block_is_held_like_any_other() -> None:
    pool, blocks = cached_pool(3, 2)
    pool.retain(blocks)
    pool.retain(blocks[:1])
    assert pool.num_free == 1
    assert pool.violations([blocks, blocks[:1]]) == []
    with pytest.raises(ValueError, match="2 blocks asked for, 1 are free"):
        pool.allocate(2)
    pool.release(blocks)
    pool.release(blocks[:1])
    assert (pool.num_free, pool.find([b"0", b"1"])) == (3, blocks)
    assert pool.violations([]) == []


def test_a_hash_has_one_block_and_a_block_one_hash() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, b"a")
    pool.cache(second, b"a")
    pool.cache(first, b"b")
    assert (pool.find([b"a"]), pool.find([b"b"])) == ([first], [])
    assert (pool.hashes[first], pool.hashes[second]) == (b"a", None)
    pool.release([first, second])
    assert pool.allocate(1) == [second]


def test_only_a_held_block_is_cached_or_written() -> None:
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="block 0 is free and holds nothing"):
        pool.cache(0, b"a")
    with pytest.raises(ValueError, match="block 0 is free and not written"):
        pool.uncache(0)
    pool.allocate(1)
    pool.cache(0, b"a")
    pool.uncache(0)
    pool.uncache(0)
    assert (pool.find([b"a"]), len(pool.ids_by_hash)) == ([], 0)
    assert pool.violations([[0]]) == []


def test_uncaching_all_blocks() -> None:
    pool, blocks = cached_pool(4, 3)
    pool.retain(blocks[:1])
    pool.uncache_all()
    assert (pool.find([b"0"]), len(pool.ids_by_hash), pool.num_free) == ([], 0, 3)
    assert pool.violations([blocks[:1]]) == []
    pool.release(blocks[:1])
    assert pool.allocate(4) == [0, 1, 2, 3]


def test_violations_of_contents_are_found() -> None:
    pool, blocks = cached_pool(3, 2)
    pool._free.append(pool._free_cached.popitem()[0])
    assert f"block {blocks[0]} is cached and in the wrong free list" in pool.violations([])
    pool, blocks = cached_pool(3, 2)
    pool.hashes[blocks[1]] = None
    wrong = pool.violations([])
    assert f"block {blocks[1]} is not cached and in the wrong free list" in wrong
    assert "the table of hashes and the blocks' hashes disagree" in wrong
