"""What the allocator takes and gives back, how much of a card can be filled, and how fast blocks are swapped."""

from __future__ import annotations

import time

import torch

from ascend_vllm.attention.ascend import AscendAttention
from ascend_vllm.config.cache import CacheConfig
from ascend_vllm.tools.doctor.kit.rows import Status
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session
from ascend_vllm.types.kv_cache import KEYS_AND_VALUES
from ascend_vllm.types.step import MoveKind
from ascend_vllm.worker.block_mover import BlockMover

_MIB = 1 << 20
_SHARE = 0.9
# that a runtime may keep after everything is released
_KEPT_BYTES = 64 * _MIB
_BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE = 128, 8, 128


def cases(session: Session) -> list[Case]:
    """See `steps`."""
    return [
        Case("before and after emptying", lambda: _emptying(session)),
        Case("fill at 0.9", lambda: _fill(session)),
        Case("swap", lambda: _swap(session)),
    ]


def _emptying(session: Session) -> Result:
    """Free memory: with nothing allocated, with tensors and an operator's workspace, freed, and emptied."""
    platform = session.platform
    platform.release_memory()
    start = platform.free_bytes()
    numbers = torch.randn(session.size(256, 16) * _MIB // 4, device="npu")
    ordered = numbers.sort()
    session.npu.synchronize()
    full = platform.free_bytes()
    del numbers, ordered
    freed = platform.free_bytes()
    platform.release_memory()
    emptied = platform.free_bytes()
    return Result.of(
        start - emptied <= _KEPT_BYTES and full < emptied,
        f"{(start - emptied) // _MIB} MiB are not given back",
        start_bytes=start,
        full_bytes=full,
        freed_bytes=freed,
        emptied_bytes=emptied,
    )


def _fill(session: Session) -> Result:
    """Takes what a server takes with --gpu-memory-utilization 0.9."""
    platform = session.platform
    size = platform.kv_cache_bytes(CacheConfig(_BLOCK_SIZE, gpu_memory_utilization=_SHARE), 0)
    if size <= 0:
        return Result(Status.SKIPPED, message="other processes leave no room on the NPU")
    begin = time.perf_counter()
    # a simulated device is memory of this machine
    memory = platform.allocate(session.size(size, min(size, 64 * _MIB)), torch.device("npu:0"))
    memory[-1] = 7
    is_written = bool(memory[-1].item() == 7)
    seconds = time.perf_counter() - begin
    free = platform.free_bytes()
    del memory
    platform.release_memory()
    return Result.of(is_written, "the last byte is not as written", size_bytes=size, free_bytes=free, time_s=seconds)


def _swap(session: Session) -> Result:
    """Blocks to the host and back, as sequences are swapped."""
    num_layers, num_blocks = session.size((8, 64), (1, 4))
    session.begin()
    backend = AscendAttention(_BLOCK_SIZE)
    spec = KEYS_AND_VALUES.spec(_BLOCK_SIZE, _KV_HEADS, _HEAD_SIZE, "float16")
    shape = backend.kv_cache_shape(num_blocks, spec)
    caches = [torch.randn(shape).half().npu() for _ in range(num_layers)]  # type: ignore[attr-defined]
    kept = [cache.cpu() for cache in caches]
    mover = BlockMover(backend, caches, [torch.zeros(shape).half() for _ in caches], torch.device("npu:0"))
    blocks, rates = range(num_blocks), {}
    total = num_layers * num_blocks * spec.block_bytes
    for kind, name in ((MoveKind.SWAP_OUT, "out"), (MoveKind.SWAP_IN, "in")):
        if kind == MoveKind.SWAP_IN:
            for cache in caches:
                cache.zero_()
        session.npu.synchronize()
        begin = time.perf_counter()
        mover.move([(kind, block, block) for block in blocks])
        session.npu.synchronize()
        rates[f"{name}_gb_per_s"] = total / (time.perf_counter() - begin) / 1e9
    is_same = all(torch.equal(cache.cpu(), before) for cache, before in zip(caches, kept, strict=True))
    return Result.of(is_same, "blocks differ after they came back", **rates)
