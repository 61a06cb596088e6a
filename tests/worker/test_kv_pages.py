"""Pages of the KV cache are in memory before blocks are used, and not long before."""

from __future__ import annotations

import mmap
import pathlib
import platform
import struct
import time

import pytest
import torch

from ascend_vllm.attention.cpu import CpuAttention
from ascend_vllm.platforms.host_memory import allocate_on_first_use
from ascend_vllm.sampling_params import SamplingParams
from ascend_vllm.types.kv_cache import KEY_VALUE, LATENT, KVCacheSpec
from ascend_vllm.types.step import NewRow, SchedulerOutput
from ascend_vllm.worker.kv_pages import PagesAhead
from ascend_vllm.worker.worker import Worker
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

_VERSION = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
needs_linux = pytest.mark.skipif(
    platform.system() != "Linux" or _VERSION < (5, 14), reason="MADV_POPULATE_WRITE is of Linux 5.14"
)

NUM_BLOCKS, BLOCK_BYTES = 256, 64 << 10
# what is allocated ahead: one to two huge pages
LEAST, MOST = (2 << 20) // BLOCK_BYTES, (4 << 20) // BLOCK_BYTES


def is_resident(tensor: torch.Tensor) -> bool:
    """Whether the page of a tensor's first byte is in memory: bit 63 of its entry in the page map."""
    with pathlib.Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(tensor.data_ptr() // mmap.PAGESIZE * 8)
        return bool(struct.unpack("<Q", pagemap.read(8))[0] >> 63)


def step_with(*, new: list[int] | None = None, appended: list[int] | None = None) -> SchedulerOutput:
    rows = []
    if new is not None:
        rows.append(NewRow(0, "row", [1], 1, 0, new, SamplingParams(), seed=0, stop_token_ids=[]))
    return SchedulerOutput(0, [], rows, [0], [1], [] if appended is None else [(0, appended)])


def wait_for(planes: list[torch.Tensor], block: int) -> None:
    end = time.monotonic() + 30
    while not all(is_resident(plane[block]) for plane in planes):
        assert time.monotonic() < end, f"block {block} has no page"
        time.sleep(0.01)


@pytest.fixture
def planes() -> list[torch.Tensor]:
    return list(allocate_on_first_use(2 * NUM_BLOCKS * BLOCK_BYTES).view(2, NUM_BLOCKS, BLOCK_BYTES).unbind(0))


@needs_linux
def test_pages_are_allocated_ahead_of_the_blocks_that_are_used(planes: list[torch.Tensor]) -> None:
    pages = PagesAhead(planes)
    wait_for(planes, MOST - 1)
    assert not any(is_resident(plane[MOST + LEAST]) for plane in planes)
    assert pages.next_block <= LEAST + 2
    pages.extend(LEAST + 2)
    wait_for(planes, 2 * LEAST + 2)
    pages.extend(100)
    wait_for(planes, 100 + LEAST)
    assert not any(is_resident(plane[100 + 2 * MOST]) for plane in planes)
    assert not planes[0].any()
    pages.close()


@needs_linux
def test_the_last_block_is_the_end(planes: list[torch.Tensor]) -> None:
    pages = PagesAhead(planes)
    pages.extend(NUM_BLOCKS - 1)
    wait_for(planes, NUM_BLOCKS - 1)
    assert pages.num_blocks == pages.next_block == NUM_BLOCKS
    pages.close()


@needs_linux
def test_nothing_is_allocated_after_the_end(planes: list[torch.Tensor]) -> None:
    pages = PagesAhead(planes)
    pages.close()
    pages.extend(200)
    time.sleep(0.05)
    assert not any(is_resident(plane[200]) for plane in planes)


@pytest.mark.parametrize(
    ("kind", "dtype", "scales", "num_planes"),
    [
        (KEY_VALUE, "bfloat16", False, 2),
        (KEY_VALUE, "int8", True, 2),
        (LATENT, "bfloat16", False, 1),
        (LATENT, "int8", True, 1),
    ],
)
def test_planes_cover_a_layer(kind: str, dtype: str, scales: bool, num_planes: int) -> None:
    shape = (2, 16, 2, 32) if kind == KEY_VALUE else (1, 16, 1, 96)
    spec = KVCacheSpec(kind, shape, dtype, shape[:-1] if scales else None, "bfloat16")
    backend, memory = CpuAttention(16), torch.zeros(5 * spec.block_bytes, dtype=torch.uint8)
    planes = backend.host_planes(backend.make_cache(memory, 5, spec))
    assert [plane.shape for plane in planes] == [(5, spec.block_bytes // num_planes)] * num_planes
    for plane in planes:
        assert plane.is_contiguous()
        plane += 1
    assert (memory == 1).all()


@needs_linux
def test_a_worker_allocates_them() -> None:
    worker = Worker(make_config(tiny_model("qwen2")))
    worker.load_model()
    # 2 KiB in each of the six planes
    worker.initialize_cache(8192)
    pages = worker._pages
    assert pages is not None
    planes = list(pages._planes)
    assert len(planes) == 6
    wait_for(planes, 2000)
    assert not is_resident(planes[0][4500])
    before = pages.num_blocks
    worker.execute_model(step_with(new=[0, 20, 3]))
    worker.execute_model(step_with())
    assert pages.num_blocks == before < 3500
    worker.execute_model(step_with(new=[3500]))
    wait_for(planes, 4500)
    worker.execute_model(step_with(appended=[5000]))
    wait_for(planes, 6000)
    del planes
    worker.sleep(1)
    assert not pages._planes
    worker.wake_up()
    assert worker._pages is not pages
    worker.shutdown()
