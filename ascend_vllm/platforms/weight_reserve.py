"""Memory for a model's weights that a thread has written to before there is a model.

A page costs most when it is first written: the kernel zeroes it, and a virtual machine may have to get it from its
host, which takes seconds for a gigabyte and goes no faster on several cores. Meanwhile the worker imports torch, on
one core.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import pathlib
import threading
import weakref
from collections.abc import Generator
from contextvars import ContextVar

import psutil

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.platforms.host import available_memory_bytes

# written at a time: the thread waits for the interpreter's lock in between
_STEP_BYTES = 16 << 20
_NUMA_NODES = pathlib.Path("/sys/devices/system/node/online")


class WeightReserve:
    """One range of memory, which is given out in pieces. A piece goes back to the system when its last user drops it.

    Args:
        num_bytes: of the range, which a thread begins to write at once, from its start.

    Raises:
        OSError: there is not so much address space.
    """

    def __init__(self, num_bytes: int) -> None:
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ask_for_huge_pages(self._pages)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._taken = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._write, name="weight-reserve", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        for start in range(0, len(self._pages), _STEP_BYTES):
            if self._stopping:
                return
            # through ctypes: without the interpreter's lock
            ctypes.memset(self._address + start, 0, min(_STEP_BYTES, len(self._pages) - start))

    def _stop(self) -> None:
        self._stopping = True
        self._thread.join()

    def take(self, num_bytes: int) -> memoryview | None:
        """A piece of zeros that begins at a page; None: none of this size is left. The first call ends writing."""
        self._stop()
        start = self._taken
        end = start + -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > len(self._pages):
            return None
        self._taken = end
        piece = memoryview(self._pages)[start : start + num_bytes]
        weakref.finalize(piece, self._pages.madvise, mmap.MADV_DONTNEED, start, end - start).atexit = False
        return piece

    def close(self) -> None:
        """Gives back what has not been taken; nothing can be taken any more."""
        self._stop()
        if self._taken < len(self._pages):
            self._pages.madvise(mmap.MADV_DONTNEED, self._taken)
        self._taken = len(self._pages)


_RESERVE: ContextVar[WeightReserve | None] = ContextVar("reserve", default=None)


@contextlib.contextmanager
def taking_from(reserve: WeightReserve | None) -> Generator[None]:
    """Has `take_reserved` take pieces of a reserve, which is closed in the end."""
    token = _RESERVE.set(reserve)
    try:
        yield
    finally:
        _RESERVE.reset(token)
        if reserve is not None:
            reserve.close()


def take_reserved(num_bytes: int) -> memoryview | None:
    """A piece of the reserve in use, see `WeightReserve.take`; None: there is none."""
    reserve = _RESERVE.get()
    return None if reserve is None else reserve.take(num_bytes)


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Has the kernel put memory into huge pages where it can."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # EINVAL: the kernel has no huge pages
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def reserve_for(config: EngineConfig) -> WeightReserve | None:
    """A reserve for a worker's weights, of the size of its part of the files; to be called before torch is imported.

    None where it is of no use: on other devices, for weights that are made up, and with several NUMA nodes, where the
    thread that will read a page should write it first. At most half of what is free is taken, so that the files, if
    they are cached, stay there until they have been read.
    """
    if config.device.device != "cpu" or config.load.load_format not in ("auto", "safetensors"):
        return None
    try:
        if _NUMA_NODES.read_text().strip() != "0":
            return None
        in_files = sum(path.stat().st_size for path in pathlib.Path(config.model.model).glob("*.safetensors"))
        room = min(psutil.virtual_memory().free, available_memory_bytes()) // 2
        num_bytes = min(in_files // config.parallel.world_size, room)
        return WeightReserve(num_bytes) if num_bytes > _STEP_BYTES else None
    except OSError:
        # without it loading takes longer
        return None
