"""Blocks: taken once, given back once, shared by reference count."""

from __future__ import annotations

import pytest

from ascend_vllm.core.block_pool import BlockPool
from ascend_vllm.core.kv_cache_manager import KVCacheManager
from ascend_vllm.core.request import Request
from tests.core.memory_executor import make_request


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


def test_released_blocks_are_taken_again_in_the_same_order() -> None:
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


def make_manager(num_blocks: int) -> tuple[KVCacheManager, Request]:
    return KVCacheManager(num_blocks, block_size=4), Request(make_request("r", 4), 64, 0)


def test_slots_grow_by_whole_blocks() -> None:
    manager, request = make_manager(4)
    assert [len(manager.allocate_slots(request, n) or []) for n in (1, 4, 5, 8, 16)] == [1, 0, 1, 0, 2]
    assert len(request.block_ids) == 4
    assert manager.usage == 1.0
    manager.free(request)
    manager.free(request)
    assert (request.block_ids, manager.usage) == ([], 0.0)


def test_failing_allocation_changes_nothing() -> None:
    manager, request = make_manager(3)
    assert manager.allocate_slots(request, 8) is not None
    before = list(request.block_ids)
    assert manager.allocate_slots(request, 16) is None
    assert (request.block_ids, manager.pool.num_free) == (before, 1)


def test_reserved_blocks_stay_free() -> None:
    manager, request = make_manager(3)
    assert manager.allocate_slots(request, 8, num_reserved_blocks=2) is None
    assert manager.allocate_slots(request, 8, num_reserved_blocks=1) is not None


def test_watermark_is_a_hundredth() -> None:
    assert [KVCacheManager(n, 4).watermark_blocks for n in (50, 100, 250)] == [0, 1, 2]


def test_computed_tokens_without_a_place_are_found() -> None:
    manager, request = make_manager(3)
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 5
    assert manager.violations([request]) == ["request r has 5 computed tokens in 1 blocks of 4"]
