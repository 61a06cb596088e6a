"""Device memory, copies and their accounts: what torch_npu gets, and what the runtime refuses."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sysconfig

import pytest
import torch
import torch_npu

from tests.npu import acl

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _device() -> None:
    torch.npu.set_device(0)


def test_fresh_memory_holds_no_usable_number() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32):
        # a pool of its own: torch's caching allocator may have room in segments that other tests still use
        with torch.npu.use_mem_pool(torch.npu.MemPool()):
            there = torch.empty(6 * MIB, dtype=dtype, device="npu")[:: 1 << 10].cpu()
        assert (there.isnan() if dtype.is_floating_point else there > 1 << 30).all()


def test_freed_memory_is_gone_for_good() -> None:
    pointer = acl.malloc(4096)
    acl.write(pointer, b"secret")
    acl.call("aclrtFree", pointer)
    content = ctypes.create_string_buffer(16)
    assert acl.code("aclrtMemcpy", content, 16, pointer, 16, acl.DEVICE_TO_HOST) == acl.PARAM_INVALID
    assert "the source is not device memory of 16 bytes (freed, or too small)" in acl.message()
    assert acl.code("aclrtFree", pointer) == acl.PARAM_INVALID
    again = acl.malloc(4096)
    assert again.value != pointer.value
    acl.call("aclrtFree", again)


@pytest.mark.parametrize(
    ("destination", "source", "kind", "text"),
    [
        ("device", "device", acl.HOST_TO_DEVICE, "the source is device memory"),
        ("device", "device", acl.DEVICE_TO_HOST, "the destination is device memory"),
        ("host", "host", acl.HOST_TO_DEVICE, "the destination is not device memory of 64 bytes (it is host memory)"),
        ("host", "host", acl.DEVICE_TO_HOST, "the source is not device memory of 64 bytes (it is host memory)"),
        ("device", "host", acl.DEVICE_TO_DEVICE, "the source is not device memory"),
    ],
)
def test_copies_the_wrong_way_are_refused(destination: str, source: str, kind: int, text: str) -> None:
    sides = {"device": acl.malloc(64), "host": ctypes.create_string_buffer(64)}
    for function in ("aclrtMemcpy", "aclrtMemcpyAsync"):
        stream = (None,) if function == "aclrtMemcpyAsync" else ()
        answer = acl.code(function, sides[destination], 64, sides[source], 64, kind, *stream)
        assert answer == acl.PARAM_INVALID and text in acl.message()
    acl.call("aclrtFree", sides["device"])


def test_copies_end_where_the_memory_ends() -> None:
    pointer = acl.malloc(64)
    content = ctypes.create_string_buffer(128)
    assert acl.code("aclrtMemcpy", pointer, 128, content, 65, acl.HOST_TO_DEVICE) == acl.PARAM_INVALID
    assert acl.code("aclrtMemcpy", pointer, 32, content, 64, acl.HOST_TO_DEVICE) == acl.PARAM_INVALID
    assert "64 bytes do not fit into the destination's 32" in acl.message()
    acl.call("aclrtMemcpy", pointer, 64, content, 64, acl.HOST_TO_DEVICE)
    acl.call("aclrtFree", pointer)


def test_pinned_memory_is_told_from_other_memory() -> None:
    pinned = torch.arange(5.0).pin_memory()
    assert pinned.is_pinned() and not torch.arange(5.0).is_pinned()
    there = pinned.to("npu", non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(there.cpu(), pinned)


def test_devices_have_memory_of_their_own() -> None:
    torch.npu.empty_cache()
    free, total = torch.npu.mem_get_info(0)
    assert total == 1 << 30
    other_free, _ = torch.npu.mem_get_info(1)
    # not in segments that other tests still use
    pool = torch.npu.MemPool()
    with torch.npu.use_mem_pool(pool):
        held = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:0")
    assert torch.npu.mem_get_info(0)[0] <= free - 64 * MIB
    assert torch.npu.mem_get_info(1)[0] == other_free
    del held, pool
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info(0)[0] == free
    there = torch.arange(4.0).to("npu:1").to("npu:0")
    assert there.device == torch.device("npu:0") and torch.equal(there.cpu(), torch.arange(4.0))


def test_too_much_memory_is_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB"):
        torch.empty(2 << 30, dtype=torch.uint8, device="npu")
    assert acl.code("aclrtMalloc", ctypes.byref(acl.Handle()), 2 << 30, 0) == acl.OUT_OF_MEMORY
    torch.empty(MIB, dtype=torch.uint8, device="npu")  # the device works on


class _PhysicalProperties(ctypes.Structure):
    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("location_id", ctypes.c_uint32),
        ("location_type", ctypes.c_int),
        ("reserve", ctypes.c_uint64),
    )


def test_physical_memory_keeps_its_content_where_it_is_mapped() -> None:
    size = 2 * MIB
    free = torch.npu.mem_get_info(0)[0]
    first, second = (acl.made("aclrtReserveMemAddress", size, 0, None, 0) for _ in range(2))
    assert torch.npu.mem_get_info(0)[0] == free, "addresses cost no memory"
    properties = _PhysicalProperties(location_type=1)
    handle = acl.made("aclrtMallocPhysical", size, ctypes.byref(properties), 0)
    assert torch.npu.mem_get_info(0)[0] == free - size
    acl.call("aclrtMapMem", first, size, 0, handle, 0)
    assert acl.read(first, 4) == b"\xff\x7f\xff\x7f", "fresh memory is poisoned"
    acl.write(first, b"kept")
    assert acl.code("aclrtMapMem", second, size, 0, handle, 0) == acl.PARAM_INVALID
    assert acl.code("aclrtFreePhysical", handle) == acl.PARAM_INVALID and "still mapped" in acl.message()
    assert acl.code("aclrtReleaseMemAddress", first) == acl.PARAM_INVALID
    acl.call("aclrtUnmapMem", first)
    assert acl.code("aclrtMemset", first, 4, 0, 4) == acl.PARAM_INVALID, "nothing is behind the addresses now"
    acl.call("aclrtMapMem", second, size, 0, handle, 0)
    assert acl.read(second, 4) == b"kept"
    acl.call("aclrtUnmapMem", second)
    acl.call("aclrtFreePhysical", handle)
    assert torch.npu.mem_get_info(0)[0] == free
    assert acl.code("aclrtFreePhysical", handle) == acl.INVALID_HANDLE
    for pointer in (first, second):
        acl.call("aclrtReleaseMemAddress", pointer)


SOURCE = """
#include <acl/acl_rt.h>
static long live = 0;
extern "C" void* take(size_t bytes, int, aclrtStream) {
  void* pointer = nullptr;
  if (aclrtMalloc(&pointer, bytes, ACL_MEM_MALLOC_HUGE_FIRST) == 0) ++live;
  return pointer;
}
extern "C" void give(void* pointer, size_t, int, aclrtStream) { if (aclrtFree(pointer) == 0) --live; }
extern "C" long count() { return live; }
"""


def test_an_allocator_of_ones_own(tmp_path: pathlib.Path) -> None:
    source, library = tmp_path / "allocator.cpp", tmp_path / "allocator.so"
    source.write_text(SOURCE)
    include = pathlib.Path(torch_npu.__file__).parent / "include" / "third_party" / "acl" / "inc"
    compiler = sysconfig.get_config_var("CXX").split()[0]
    libraries = [f"-L{directory}" for directory in os.environ["LD_LIBRARY_PATH"].split(":")]
    command = [compiler, "-shared", "-fPIC", f"-I{include}", source, *libraries, "-lascendcl", "-o", library]
    subprocess.run(command, check=True, timeout=60)
    count = ctypes.CDLL(str(library)).count
    pool = torch.npu.MemPool(torch.npu.memory.NPUPluggableAllocator(str(library), "take", "give").allocator())
    with torch.npu.use_mem_pool(pool):
        held = torch.arange(6.0).to("npu")
    assert count() == 1 and torch.equal(held.cpu(), torch.arange(6.0))
    del held, pool
    torch.npu.empty_cache()
    assert count() == 0
