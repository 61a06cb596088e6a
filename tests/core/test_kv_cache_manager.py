"""Allocating, sharing and freeing blocks; no request writes a block that another one reads."""

from __future__ import annotations

import pytest

from ascend_vllm.core.kv.manager import NULL_BLOCK, KVCacheManager, NoFreeBlocksError
from ascend_vllm.core.request import Request
from ascend_vllm.types.step import MoveKind
from tests.core.kv_cache_requests import append, make_request

COPY, SWAP_OUT, SWAP_IN = MoveKind.COPY, MoveKind.SWAP_OUT, MoveKind.SWAP_IN


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> None:
    """Allocates a request's blocks, and computes its first tokens."""
    num_tokens = request.num_tokens if num_tokens is None else num_tokens
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens = num_tokens
    manager.cache_full_blocks(request, num_tokens)


def admit(manager: KVCacheManager, request: Request) -> int:
    """Admits a request with its cached blocks; returns their number."""
    shared = manager.find_cached_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens, shared=shared) == request.block_ids
    request.num_computed_tokens = len(shared) * manager.block_size
    return len(shared)


def computed_pair(num_tokens: int, num_computed: int, **kwargs: int) -> tuple[KVCacheManager, Request, Request]:
    """A manager (8 blocks of 4), a computed request and a fork of it."""
    manager = KVCacheManager(8, 4, **kwargs)
    parent, child = make_request("p", num_tokens), make_request("c", num_tokens)
    compute(manager, parent)
    assert manager.fork(child, parent, num_computed, num_tokens)
    child.num_computed_tokens = num_computed
    return manager, parent, child


# ---- blocks for tokens -------------------------------------------------------------------------------------


def test_slots_grow_by_whole_blocks() -> None:
    manager, request = KVCacheManager(4, 4), make_request("r", 4)
    assert [len(manager.allocate_slots(request, n) or []) for n in (1, 4, 5, 8, 16)] == [1, 0, 1, 0, 2]
    assert len(request.block_ids) == 4
    assert (manager.pool.usage, manager.num_tokens, manager.pool.num_free) == (1.0, 16, 0)
    manager.free(request)
    manager.free(request)
    assert (request.block_ids, manager.pool.usage) == ([], 0.0)


def test_failing_allocation_changes_nothing() -> None:
    manager, request = KVCacheManager(3, 4), make_request("r", 4)
    assert manager.allocate_slots(request, 8) is not None
    before = list(request.block_ids)
    assert manager.allocate_slots(request, 16) is None
    assert (request.block_ids, manager.pool.num_free) == (before, 1)


def test_reserved_blocks_stay_free() -> None:
    manager, request = KVCacheManager(3, 4), make_request("r", 4)
    assert manager.allocate_slots(request, 8, num_reserved_blocks=2) is None
    assert manager.allocate_slots(request, 8, num_reserved_blocks=1) is not None


def test_watermark_is_a_hundredth() -> None:
    assert [KVCacheManager(n, 4).watermark_blocks for n in (50, 100, 250)] == [0, 1, 2]


# ---- prefix cache ------------------------------------------------------------------------------------------


def test_nothing_is_found_without_prefix_caching() -> None:
    manager = KVCacheManager(8, 4)
    request = make_request("a", 12)
    compute(manager, request)
    other = make_request("b", 12)
    assert manager.find_cached_blocks(other) == []
    assert (request.block_hashes, other.block_hashes, request.num_cached_blocks) == ([], [], 0)


def test_equal_contents_are_cached_once() -> None:
    manager = KVCacheManager(8, 4, enable_prefix_caching=True)
    first, second = make_request("a", 8), make_request("b", 8)
    # both before either is computed
    assert admit(manager, first) == admit(manager, second) == 0
    compute(manager, first)
    compute(manager, second)
    assert second.num_cached_blocks == 2
    assert len(manager.pool.ids_by_hash) == 2
    assert manager.find_cached_blocks(make_request("c", 9)) == first.block_ids
    assert manager.violations([first, second]) == []


def test_found_blocks_without_owner_count_against_the_free_ones() -> None:
    manager = KVCacheManager(4, 4, enable_prefix_caching=True)
    first = make_request("a", 12)
    compute(manager, first)
    manager.free(first)
    request = make_request("b", 16)
    shared = manager.find_cached_blocks(request)
    assert (len(shared), manager.pool.num_free) == (3, 4)
    assert manager.allocate_slots(request, 16, 1, shared) is None
    assert manager.allocate_slots(request, 17, 0, shared) is None
    assert (request.block_ids, manager.pool.num_free, manager.find_cached_blocks(request)) == ([], 4, shared)
    block_ids = manager.allocate_slots(request, 16, 0, shared)
    assert block_ids == request.block_ids
    assert block_ids is not request.block_ids
    assert (request.block_ids[:3], request.num_cached_blocks, manager.pool.num_free) == (shared, 3, 0)


def test_found_blocks_with_an_owner_cost_nothing() -> None:
    manager = KVCacheManager(4, 4, enable_prefix_caching=True)
    first, second = make_request("a", 12), make_request("b", 13)
    compute(manager, first)
    assert admit(manager, second) == 3
    assert manager.pool.num_free == 0
    manager.free(first)
    assert manager.pool.num_free == 0
    manager.free(second)
    assert manager.pool.num_free == 4


def test_a_chunk_may_need_less_than_was_found() -> None:
    manager = KVCacheManager(4, 4, enable_prefix_caching=True)
    compute(manager, make_request("a", 12))
    request = make_request("b", 13)
    assert manager.allocate_slots(request, 2, 0, manager.find_cached_blocks(request)) == request.block_ids
    assert len(request.block_ids) == 3


def test_hashes_are_computed_once() -> None:
    manager = KVCacheManager(4, 4, enable_prefix_caching=True)
    request = make_request("a", 13)
    manager.find_cached_blocks(request)
    first = list(request.block_hashes)
    # would give other hashes
    request.token_ids[:] = [7] * 13
    manager.find_cached_blocks(request)
    assert request.block_hashes == first
    assert len(first) == 3


# ---- forks and copy-on-write -------------------------------------------------------------------------------


def test_a_fork_shares_full_blocks_and_copies_the_last() -> None:
    manager, parent, child = computed_pair(10, 9)
    assert child.block_ids[:2] == parent.block_ids[:2]
    assert manager.take_moves() == [(COPY, parent.block_ids[2], child.block_ids[2])]
    assert manager.take_moves() == []
    assert manager.pool.num_free == 4
    assert manager.violations([parent, child], copies_pending=False) == []


def test_a_fork_within_a_full_block_copies_it() -> None:
    manager, parent, child = computed_pair(8, 7, enable_prefix_caching=True)
    assert manager.take_moves() == [(COPY, parent.block_ids[1], child.block_ids[1])]
    assert child.num_cached_blocks == 1
    assert manager.violations([parent, child], copies_pending=False) == []


@pytest.mark.parametrize("num_computed", [0, 4, 8])
def test_a_fork_between_blocks_copies_nothing(num_computed: int) -> None:
    manager, parent, child = computed_pair(9, num_computed)
    assert manager.take_moves() == []
    assert [a == b for a, b in zip(child.block_ids, parent.block_ids, strict=True)] == [
        (index + 1) * 4 <= num_computed for index in range(3)
    ]


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    manager = KVCacheManager(5, 4)
    parent, child = make_request("p", 10), make_request("c", 10)
    compute(manager, parent)
    assert not manager.fork(child, parent, 9, 10, num_reserved_blocks=2)
    assert not manager.fork(child, parent, 9, 21)
    assert not manager.fork(child, parent, 13, 14)
    assert (child.block_ids, manager.take_moves(), manager.pool.num_free) == ([], [], 2)
    assert manager.fork(child, parent, 9, 10, num_reserved_blocks=1)


def test_only_a_request_without_blocks_can_share_others() -> None:
    manager, parent, child = computed_pair(8, 8, enable_prefix_caching=True)
    with pytest.raises(ValueError, match="request c holds blocks and cannot share others"):
        manager.share_all(child, parent)
    with pytest.raises(ValueError, match="request c holds blocks"):
        manager.fork(child, parent, 4, 8)
    with pytest.raises(ValueError, match="request c holds blocks"):
        manager.allocate_slots(child, 12, 0, parent.block_ids)


def test_a_beam_copies_the_block_it_writes() -> None:
    manager = KVCacheManager(4, 4)
    first, second = make_request("a", 6), make_request("b", 6)
    compute(manager, first)
    manager.share_all(second, first)
    second.num_computed_tokens = 6
    assert second.block_ids == first.block_ids
    assert manager.violations([first, second]) == []
    assert len(manager.violations([first, second], copies_pending=False)) == 2
    old = first.block_ids[1]
    assert manager.make_writable(second, 1) == (1, second.block_ids[1])
    assert manager.take_moves() == [(COPY, old, second.block_ids[1])]
    assert first.block_ids == [second.block_ids[0], old]
    # now neither block is shared
    assert manager.make_writable(first, 1) is None
    assert manager.make_writable(second, 1) is None
    assert manager.violations([first, second], copies_pending=False) == []


def test_nothing_is_copied_where_the_next_block_is_new() -> None:
    manager = KVCacheManager(4, 4)
    first, second = make_request("a", 8), make_request("b", 8)
    compute(manager, first)
    manager.share_all(second, first)
    assert manager.make_writable(second, 2) is None
    assert manager.take_moves() == []


def test_a_copy_without_a_free_block_is_an_error() -> None:
    manager = KVCacheManager(2, 4)
    first, second = make_request("a", 6), make_request("b", 6)
    compute(manager, first)
    manager.share_all(second, first)
    with pytest.raises(NoFreeBlocksError, match="request b shares block 1 and none is free"):
        manager.make_writable(second, 1)
    assert (second.block_ids, manager.take_moves()) == (first.block_ids, [])
    manager.free(first)
    assert manager.make_writable(second, 1) is None


def test_a_block_that_will_be_written_is_not_found() -> None:
    manager = KVCacheManager(4, 4, enable_prefix_caching=True)
    first, second = make_request("a", 8), make_request("b", 8)
    compute(manager, first)
    manager.share_all(second, first)
    second.num_computed_tokens = 6
    manager.free(first)
    assert len(manager.violations([second])) == 1
    assert manager.make_writable(second, 1) is None
    assert manager.violations([second], copies_pending=False) == []
    assert len(manager.find_cached_blocks(make_request("c", 9))) == second.num_cached_blocks == 1


def test_a_copy_of_a_cached_block_is_not_in_the_cache() -> None:
    manager = KVCacheManager(4, 4, enable_prefix_caching=True)
    first, second = make_request("a", 8), make_request("b", [0, 1, 2, 3, 4, 5, 60, 70])
    compute(manager, first)
    manager.share_all(second, first)
    second.num_computed_tokens = 6
    assert manager.make_writable(second, 1) == (1, second.block_ids[1])
    assert second.num_cached_blocks == 1
    assert len(manager.find_cached_blocks(make_request("c", 9))) == 2


def test_a_fork_does_not_take_over_hashes_of_tokens_it_does_not_have() -> None:
    manager = KVCacheManager(8, 4, enable_prefix_caching=True)
    parent, child = make_request("p", 9), make_request("c", [0, 1, 2, 3, 9, 9, 9, 9, 9])
    # it has hashes of all its tokens, but only some are computed
    assert manager.find_cached_blocks(parent) == []
    compute(manager, parent, 4)
    assert manager.fork(child, parent, 4, 9)
    child.num_computed_tokens = 4
    compute(manager, child)
    compute(manager, parent)
    assert manager.violations([parent, child], copies_pending=False) == []
    for request in (parent, child):
        assert manager.find_cached_blocks(make_request("d", request.token_ids)) == request.block_ids[:2]


def test_a_beam_does_not_take_over_hashes_of_tokens_it_may_not_have() -> None:
    manager = KVCacheManager(8, 4, enable_prefix_caching=True)
    first, second = make_request("a", 7), make_request("b", 7)
    compute(manager, first)
    manager.share_all(second, first)
    second.num_computed_tokens = 7
    manager.make_writable(second, 1)
    for request, token_id in ((first, 50), (second, 60)):
        append(request, token_id)
        compute(manager, request)
    assert manager.violations([first, second], copies_pending=False) == []
    for request in (first, second):
        assert manager.find_cached_blocks(make_request("c", [*request.token_ids, 1])) == request.block_ids


# ---- swapping ----------------------------------------------------------------------------------------------


def test_requests_are_swapped_together() -> None:
    manager, parent, child = computed_pair(10, 9, num_cpu_blocks=4)
    manager.take_moves()
    device = [parent.block_ids, child.block_ids]
    assert manager.can_swap_out([parent, child])
    manager.swap_out([parent, child])
    assert manager.take_moves() == [
        (SWAP_OUT, source, target)
        for source, target in zip(
            [*device[0], device[1][2]], [*parent.cpu_block_ids, child.cpu_block_ids[2]], strict=True
        )
    ]
    assert parent.block_ids == child.block_ids == []
    assert parent.cpu_block_ids[:2] == child.cpu_block_ids[:2]
    assert (manager.pool.usage, manager.cpu_pool.usage, manager.cpu_pool.num_blocks) == (0.0, 1.0, 4)
    assert manager.violations([parent, child]) == []
    cpu = [*parent.cpu_block_ids, child.cpu_block_ids[2]]
    assert manager.swap_in([parent, child], 0)
    assert manager.take_moves() == [
        (SWAP_IN, source, target) for source, target in zip(cpu, [*parent.block_ids, child.block_ids[2]], strict=True)
    ]
    assert parent.block_ids[:2] == child.block_ids[:2]
    assert parent.cpu_block_ids == child.cpu_block_ids == []
    assert (manager.pool.num_free, manager.cpu_pool.usage) == (4, 0.0)
    assert manager.violations([parent, child], copies_pending=False) == []


def test_a_full_cpu_pool_takes_nothing() -> None:
    manager, parent, child = computed_pair(10, 9, num_cpu_blocks=3)
    manager.take_moves()
    assert manager.can_swap_out([parent])
    assert not manager.can_swap_out([parent, child])
    with pytest.raises(ValueError, match="4 blocks asked for, 3 are free"):
        manager.swap_out([parent, child])
    assert (len(parent.block_ids), parent.cpu_block_ids, manager.take_moves()) == (3, [], [])
    assert manager.violations([parent, child]) == []
    # what stays keeps what was shared
    manager.swap_out([parent])
    assert manager.pool.num_free == 5
    assert manager.violations([parent, child]) == []
    with pytest.raises(ValueError, match="swapped out already"):
        manager.swap_out([parent])
    with pytest.raises(ValueError, match="on the device already"):
        manager.swap_in([child], 0)


def test_swapping_in_needs_room_for_the_extra_blocks() -> None:
    manager, request = KVCacheManager(4, 4, num_cpu_blocks=4), make_request("r", 8)
    compute(manager, request)
    manager.swap_out([request])
    manager.take_moves()
    assert not manager.swap_in([request], 3)
    assert (request.block_ids, len(request.cpu_block_ids), manager.take_moves()) == ([], 2, [])
    assert manager.swap_in([request], 2)
    assert manager.pool.num_free == 2


def test_moves_are_in_the_order_in_which_blocks_are_allocated_again() -> None:
    manager = KVCacheManager(2, 4, num_cpu_blocks=4)
    first, second, third = (make_request(name, 6) for name in "abc")
    compute(manager, first)
    manager.swap_out([first])
    compute(manager, second)
    manager.take_moves()
    device, cpu = second.block_ids, first.cpu_block_ids
    manager.swap_out([second])
    assert manager.swap_in([first], 0)
    manager.free(first)
    assert manager.swap_in([second], 0)
    manager.free(second)
    compute(manager, third)
    moves = manager.take_moves()
    assert [kind for kind, _, _ in moves] == [SWAP_OUT, SWAP_OUT, SWAP_IN, SWAP_IN, SWAP_IN, SWAP_IN]
    # the first request gets the blocks of the second one, which is swapped out before
    assert {source for _, source, _ in moves[:2]} == {target for _, _, target in moves[2:4]} == set(device)
    assert [source for _, source, _ in moves[2:4]] == cpu


def test_the_cpu_blocks_of_a_swapped_request_are_freed() -> None:
    manager, parent, child = computed_pair(10, 9, num_cpu_blocks=4)
    manager.swap_out([parent, child])
    manager.free(parent)
    assert manager.cpu_pool.usage == 0.75
    manager.free(child)
    assert (manager.cpu_pool.usage, manager.pool.usage, child.cpu_block_ids) == (0.0, 0.0, [])


def test_swapped_contents_are_found_and_cached_again() -> None:
    manager = KVCacheManager(4, 4, num_cpu_blocks=4, enable_prefix_caching=True)
    request, other = make_request("a", 8), make_request("b", [9] * 16)
    compute(manager, request)
    manager.swap_out([request])
    assert len(manager.find_cached_blocks(make_request("c", 9))) == 2
    compute(manager, other)
    assert manager.find_cached_blocks(make_request("c", 9)) == []
    manager.free(other)
    assert manager.swap_in([request], 0)
    assert manager.find_cached_blocks(make_request("c", 9)) == []
    manager.cache_full_blocks(request, 8)
    assert manager.find_cached_blocks(make_request("c", 9)) == request.block_ids
    assert manager.violations([request]) == []


# ---- sliding window ----------------------------------------------------------------------------------------


def test_blocks_that_left_the_window_are_freed() -> None:
    manager, request = KVCacheManager(8, 4, sliding_window=5), make_request("r", 20)
    manager.allocate_slots(request, 20)
    blocks = list(request.block_ids)
    held = []
    for num_computed in range(21):
        request.num_computed_tokens = num_computed
        manager.free_out_of_window(request)
        held.append(sum(block_id != NULL_BLOCK for block_id in request.block_ids))
        assert manager.violations([request]) == []
    # a token at position 8 attends to 4 … 8, so that the first block is not needed from there on
    assert held == [5] * 8 + [4] * 4 + [3] * 4 + [2] * 4 + [1]
    assert request.block_ids == [NULL_BLOCK] * 4 + blocks[4:]
    assert manager.allocate_slots(request, 21) is not None
    assert len(request.block_ids) == 6
    manager.free(request)
    assert manager.pool.num_free == 8


def test_without_a_window_all_blocks_stay() -> None:
    manager, request = KVCacheManager(8, 4), make_request("r", 20)
    compute(manager, request)
    manager.free_out_of_window(request)
    assert NULL_BLOCK not in request.block_ids


def test_null_blocks_keep_their_positions() -> None:
    """They survive swapping, forking and sharing."""
    manager = KVCacheManager(8, 4, num_cpu_blocks=4, sliding_window=5)
    parent, fork, beam = make_request("p", 14), make_request("f", 14), make_request("b", 14)
    compute(manager, parent)
    manager.free_out_of_window(parent)
    assert [block_id == NULL_BLOCK for block_id in parent.block_ids] == [True, True, False, False]
    manager.swap_out([parent])
    assert (parent.cpu_block_ids[:2], manager.cpu_pool.usage) == ([NULL_BLOCK] * 2, 0.5)
    assert manager.swap_in([parent], 0)
    manager.share_all(beam, parent)
    # a token at position 11 attends to 7, whose block is freed
    assert not manager.can_fork(parent, 11)
    assert not manager.fork(fork, parent, 11, 14)
    assert manager.fork(fork, parent, 13, 14)
    beam.num_computed_tokens, fork.num_computed_tokens = 14, 13
    requests = [parent, fork, beam]
    assert all(request.block_ids[:2] == [NULL_BLOCK] * 2 for request in requests)
    assert len({request.block_ids[2] for request in requests}) == 1
    assert manager.violations(requests) == []
    for request in requests:
        manager.free(request)
    assert (manager.pool.num_free, manager.cpu_pool.usage) == (8, 0.0)


# ---- audit -------------------------------------------------------------------------------------------------


def test_violations_are_found() -> None:
    manager = KVCacheManager(8, 4, num_cpu_blocks=2, enable_prefix_caching=True, sliding_window=9)
    request, other = make_request("r", 8), make_request("o", 8)
    compute(manager, request, 4)
    request.num_computed_tokens = 5
    assert manager.violations([request]) == ["request r has 5 computed tokens in 1 blocks of 4"]
    request.num_computed_tokens = 3
    assert manager.violations([request]) == ["block 0, which request r writes, is in the prefix cache"]
    request.num_computed_tokens = 4
    request.token_ids[0] = 77
    assert manager.violations([request]) == [
        "block 0 is cached under another hash than that of request r's tokens",
        "request r has hashes of other tokens than its own",
    ]
    request.token_ids[0] = 0
    compute(manager, request)
    manager.share_all(other, request)
    assert manager.violations([request, other]) == [
        f"block {n}, which request o writes, is in the prefix cache" for n in (0, 1)
    ] + ["block 1, which request o writes, is shared"]
    manager.free(other)
    request.block_ids[1] = NULL_BLOCK
    assert manager.violations([request]) == [
        "block 1 has 1 references and 0 owners",
        "request r has given back a block behind one that it holds",
        "request r has given back 1 blocks of which it still sees some",
    ]
    request.block_ids[1] = 1
    request.cpu_block_ids = [0]
    assert manager.violations([request]) == [
        "CPU pool: block 0 has 0 references and 1 owners",
        "request r holds blocks both on the device and in CPU memory",
    ]
