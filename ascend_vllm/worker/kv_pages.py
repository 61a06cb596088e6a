"""Pages of the KV cache: a thread has the system allocate them before blocks in them are written.

The first write to a page waits until the system has cleared it; on a virtual machine whose host has to find memory,
that took 4 ms for each huge page. Blocks are used in order, so all layers begin a page at the same token, and the
step with that token took 0.2 s longer. Memory for blocks that are far from being used is not taken.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence

import torch

from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.host import lower_priority

logger = init_logger(__name__)

# pages are allocated at least so many bytes before a block that is used, in each plane: a huge page
_LEAST_AHEAD_BYTES = 2 << 20
# bytes that are allocated in a call
_CALL_BYTES = 2 << 20
# of the thread
_NICENESS = 10
# it rests so many times as long as a call took: threads that compute wait for each other, so that the system gives it
# half of a core in spite of its niceness
_REST = 4
# MADV_POPULATE_WRITE of Linux 5.14 and later; `mmap` has no name for it
_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


class PagesAhead:
    """Allocates pages of a KV cache in CPU memory ahead of the blocks that rows get.

    Args:
        planes: [num_blocks, bytes] uint8 each, contiguous: the parts of the blocks that are neighbours in memory.

    Attributes:
        num_blocks: so many blocks, from the first one, have pages, or will have them soon.
        next_block: once a row has this block, or a later one, `extend` has something to do.

    Example::

        pages = PagesAhead([memory.view(num_blocks, -1)])
        if block >= pages.next_block:
            pages.extend(block)
        pages.close()  # before the memory is freed
    """

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self._planes = planes
        self._most = planes[0].shape[0]
        self._ahead = max(-(-_LEAST_AHEAD_BYTES // plane.shape[1]) for plane in planes)
        self._lock = threading.Lock()
        # while there is something to allocate
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._num_allocated = 0
        self.num_blocks = self.next_block = 0
        self.extend(0)

    def extend(self, block: int) -> None:
        """Has pages allocated, in a thread, for the blocks behind the last one that a row has."""
        with self._lock:
            self.num_blocks = min(block + 1 + 2 * self._ahead, self._most)
            self.next_block = self._most if self.num_blocks == self._most else self.num_blocks - self._ahead
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._allocate, name="kv-pages", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread, so that the memory can be freed."""
        self._closing.set()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._planes = ()

    def _allocate(self) -> None:
        lower_priority(_NICENESS)
        while True:
            with self._lock:
                begin, end = self._num_allocated, self.num_blocks
                if begin == end or self._closing.is_set():
                    self._thread = None
                    return
            try:
                for plane in self._planes:
                    self._populate(plane.data_ptr() + begin * plane.shape[1], (end - begin) * plane.shape[1])
            except OSError as error:
                # an older system: pages are allocated when they are written
                logger.debug("Pages of the KV cache are not allocated ahead: %s", error)
                self._closing.set()
            self._num_allocated = end

    def _populate(self, address: int, num_bytes: int) -> None:
        end = address + num_bytes
        address -= address % mmap.PAGESIZE
        while address < end and not self._closing.is_set():
            size = min(_CALL_BYTES, end - address)
            start = time.perf_counter()
            # without the interpreter's lock
            if _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            address += size
            self._closing.wait(_REST * (time.perf_counter() - start))
