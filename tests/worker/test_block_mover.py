"""Block moves against copying one block after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES, KVCacheSpec
from ascend_vllm.types.step import MoveKind
from ascend_vllm.worker.block_mover import BlockMover, batches

NUM_BLOCKS, NUM_CPU_BLOCKS, NUM_LAYERS = 6, 4, 2
BACKEND = CpuAttention(block_size=16)
CPU = torch.device("cpu")


def cache_spec(block_size: int) -> KVCacheSpec:
    return KEYS_AND_VALUES.spec(block_size, num_kv_heads=2, head_size=16, dtype="float32")


Move = tuple[int, int, int]


def make_caches(num_blocks: int, seed: int) -> list[torch.Tensor]:
    """Caches in which every entry is another number."""
    generator = torch.Generator().manual_seed(seed)
    shape = BACKEND.kv_cache_shape(num_blocks, cache_spec(16))
    return [torch.randn(shape, generator=generator) for _ in range(NUM_LAYERS)]


def move_one_by_one(moves: list[Move], device: list[torch.Tensor], cpu: list[torch.Tensor]) -> None:
    pools = {MoveKind.COPY: (device, device), MoveKind.SWAP_OUT: (device, cpu), MoveKind.SWAP_IN: (cpu, device)}
    for kind, source, target in moves:
        sources, targets = pools[MoveKind(kind)]
        for layer in range(NUM_LAYERS):
            targets[layer][:, target] = sources[layer][:, source].clone()


def block(kind: MoveKind, *, of_source: bool) -> st.SearchStrategy[int]:
    on_cpu = kind == (MoveKind.SWAP_IN if of_source else MoveKind.SWAP_OUT)
    return st.integers(0, (NUM_CPU_BLOCKS if on_cpu else NUM_BLOCKS) - 1)


def move_of(kind: MoveKind) -> st.SearchStrategy[Move]:
    return st.tuples(st.just(int(kind)), block(kind, of_source=True), block(kind, of_source=False))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(MoveKind).flatmap(move_of), max_size=20))
def test_moves_act_one_after_another(moves: list[Move]) -> None:
    device, cpu = make_caches(NUM_BLOCKS, 0), make_caches(NUM_CPU_BLOCKS, 1)
    expected_device, expected_cpu = [c.clone() for c in device], [c.clone() for c in cpu]
    move_one_by_one(moves, expected_device, expected_cpu)
    BlockMover(BACKEND, device, cpu, CPU).move(moves)
    for found, expected in zip(device + cpu, expected_device + expected_cpu, strict=True):
        assert torch.equal(found, expected)


@given(st.lists(st.sampled_from(MoveKind).flatmap(move_of), max_size=20))
def test_runs_keep_the_order_and_never_read_or_write_what_they_wrote(moves: list[Move]) -> None:
    runs = list(batches(moves))
    assert [(kind, s, t) for kind, sources, targets in runs for s, t in zip(sources, targets, strict=True)] == moves
    for kind, sources, targets in runs:
        assert len(set(targets)) == len(targets)
        if kind == MoveKind.COPY:
            assert all(source not in targets[:place] for place, source in enumerate(sources))


def test_independent_moves_are_one_copy_and_long_runs_are_cut() -> None:
    swap_out = [(1, block, block + 200) for block in range(150)]
    assert [len(sources) for _, sources, _ in batches(swap_out)] == [64, 64, 22]
    # taking over a block that an earlier move has emptied is no reason to wait
    assert len(list(batches([(0, 1, 2), (0, 3, 1), (0, 4, 3)]))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_a_block_goes_out_and_comes_back_bit_for_bit(dtype: torch.dtype, block_size: int) -> None:
    backend = CpuAttention(block_size)
    spec = cache_spec(block_size)
    device = [torch.randn(backend.kv_cache_shape(3, spec)).to(dtype) for _ in range(NUM_LAYERS)]
    cpu = [torch.zeros(backend.kv_cache_shape(2, spec), dtype=dtype) for _ in range(NUM_LAYERS)]
    before = [cache.clone() for cache in device]
    mover = BlockMover(backend, device, cpu, CPU)
    # out of block 2, whose place block 0 takes; back into block 1
    mover.move([(MoveKind.SWAP_OUT, 2, 1), (MoveKind.COPY, 0, 2), (MoveKind.SWAP_IN, 1, 1)])
    for found, old in zip(device, before, strict=True):
        assert torch.equal(found[:, 1], old[:, 2])
        assert torch.equal(found[:, 2], old[:, 0])
        assert torch.equal(found[:, 0], old[:, 0])


def test_swapping_without_a_pool_names_the_flag() -> None:
    mover = BlockMover(BACKEND, make_caches(2, 0), [], CPU)
    mover.move([(MoveKind.COPY, 0, 1)])
    with pytest.raises(ValueError, match="no CPU pool \\(--swap-space\\)"):
        mover.move([(MoveKind.SWAP_OUT, 0, 0)])


@pytest.mark.parametrize("move", [(MoveKind.COPY, 0, 2), (MoveKind.SWAP_IN, 9, 0), (MoveKind.SWAP_OUT, 0, 1)])
def test_a_block_that_is_not_there_is_an_error(move: Move) -> None:
    mover = BlockMover(BACKEND, make_caches(2, 0), make_caches(1, 1), CPU)
    # torch has one for reading and another for writing
    with pytest.raises((IndexError, RuntimeError)):
        mover.move([move])
