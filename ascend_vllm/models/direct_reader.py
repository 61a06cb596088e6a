"""Reads parts of a file ahead of their use, past the system's file cache.

A mapped file is read into the file cache, whose memory a virtual machine may first have to get from its host, and is
entered into the page tables a few pages at a time. For a file that cannot stay in the cache all of that is wasted.
Here the disk writes into one piece of memory, which is used again and again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import errno
import mmap
import os
import pathlib
from collections.abc import Iterator, Sequence

from ascend_vllm.platforms.weight_reserve import ask_for_huge_pages

# what disks read directly starts and ends at multiples of their sectors, of which this is a multiple
_ALIGNMENT = 4096
# one read, of which several are under way: a disk is fastest with a queue of long reads
_READ_BYTES = 4 << 20
_NUM_READS = 4
_AHEAD_BYTES = 256 << 20


@dataclasses.dataclass
class _Part:
    """A part of the file, and its place in the memory: both in bytes, from and to multiples of the alignment."""

    start: int
    end: int
    reads: list[concurrent.futures.Future[int]]


class DirectReader:
    """Parts of a file in a given order; to be closed after use.

    Args:
        path: of the file.
        parts: start and end of each part in bytes, none of them empty; parts may overlap.
        ahead_bytes: memory for what is read ahead; a larger part takes as much as it has.

    Raises:
        OSError: the file cannot be opened, or its file system has no direct reads.

    Example:
        >>> with contextlib.closing(DirectReader(path, [(8, 4096), (0, 8)])) as reader:
        ...     lengths = [len(part) for part in reader]
        >>> lengths
        [4088, 8]
    """

    def __init__(self, path: pathlib.Path, parts: Sequence[tuple[int, int]], ahead_bytes: int = _AHEAD_BYTES) -> None:
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EINVAL, "the system has no direct reads")
        self._parts = parts
        largest = max((_aligned_up(end) - _aligned_down(start) for start, end in parts), default=0)
        self._memory = mmap.mmap(-1, max(ahead_bytes, largest), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ask_for_huge_pages(self._memory)
        self._view = memoryview(self._memory)
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            # some file systems open a file, but cannot read it so
            self._read(0, 0, _ALIGNMENT)
        except OSError:
            os.close(self._file)
            raise
        self._pool = concurrent.futures.ThreadPoolExecutor(_NUM_READS, "direct-reader")

    def close(self) -> None:
        """Ends reading. Parts that have been yielded stay as they are."""
        self._pool.shutdown(cancel_futures=True)
        os.close(self._file)

    def __iter__(self) -> Iterator[memoryview]:
        """Yields the bytes of each part, valid until the next one.

        Raises:
            OSError: the disk cannot be read.
            EOFError: the file ends before the part does.
        """
        # parts in the memory, in the order of the file's parts: the first is in use, the others are being read
        held: collections.deque[_Part] = collections.deque()
        num_begun = 0
        for start, end in self._parts:
            while num_begun < len(self._parts):
                place = self._place(held, *self._parts[num_begun])
                if place is None:
                    break
                held.append(self._begin(place, *self._parts[num_begun]))
                num_begun += 1
            part = held[0]
            num_read = sum(read.result() for read in part.reads)
            if _aligned_down(start) + num_read < end:
                raise EOFError(f"the file ends before byte {end}")
            offset = part.start + start % _ALIGNMENT
            yield self._view[offset : offset + end - start]
            held.popleft()

    def _place(self, held: collections.deque[_Part], start: int, end: int) -> int | None:
        """Where in the memory a part of the file can be put; None: not before others are gone."""
        size = _aligned_up(end) - _aligned_down(start)
        if not held:
            return 0
        first, last = held[0], held[-1]
        if last.start < first.start:
            return last.end if last.end + size <= first.start else None
        if last.end + size <= len(self._memory):
            return last.end
        return 0 if size <= first.start else None

    def _begin(self, place: int, start: int, end: int) -> _Part:
        """Begins to read a part of the file to a place in the memory."""
        start, end = _aligned_down(start), _aligned_up(end)
        reads = [
            self._pool.submit(self._read, place + at - start, at, min(_READ_BYTES, end - at))
            for at in range(start, end, _READ_BYTES)
        ]
        return _Part(place, place + end - start, reads)

    def _read(self, place: int, offset: int, num_bytes: int) -> int:
        return os.preadv(self._file, [self._view[place : place + num_bytes]], offset)


def _aligned_down(offset: int) -> int:
    return offset // _ALIGNMENT * _ALIGNMENT


def _aligned_up(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
