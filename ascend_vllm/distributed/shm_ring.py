"""A ring buffer in shared memory that broadcasts messages from one process to several.

The memory is anonymous (memfd) and shared through inherited descriptors, so the kernel frees it when the processes
end, however they end. Each reader has two eventfds: the writer posts fragments on one, the reader acknowledges them
on the other; both sides block on them. These system calls are also the memory barriers: the memory holds no counters.

A message is written as fragments. Each begins at a multiple of 8 with a header of 8 bytes (its length, and whether it
is the message's last one) and never wraps around.
"""

from __future__ import annotations

import collections
import mmap
import os
import select
import struct
from collections.abc import Callable

import msgspec

CAPACITY_BYTES = 4 << 20

_HEADER = struct.Struct("<II")
_ALIGNMENT = 8
# how often a writer that waits for room calls `is_abandoned`
_POLL_MS = 100


class RingAbandonedError(Exception):
    """A reader has stopped reading."""


class RingEnds(msgspec.Struct, frozen=True):
    """File descriptors of a ring, the same numbers in all processes that inherit them.

    Attributes:
        memory: the memfd.
        capacity: its size in bytes, a multiple of 32.
        posted: an eventfd (semaphore) per reader: fragments it has not read yet.
        taken: an eventfd per reader: fragments read since the writer last looked.
    """

    memory: int
    capacity: int
    posted: tuple[int, ...]
    taken: tuple[int, ...]

    @classmethod
    def create(cls, num_readers: int, capacity: int = CAPACITY_BYTES) -> RingEnds:
        """A new ring; its pages are allocated when they are written."""
        memory = os.memfd_create("ascend_vllm_ring")
        os.ftruncate(memory, capacity)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        posted = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for _ in range(num_readers))
        return cls(memory, capacity, posted, tuple(os.eventfd(0, flags) for _ in range(num_readers)))

    def of_reader(self, reader: int) -> RingEnds:
        """The descriptors of one reader."""
        return RingEnds(self.memory, self.capacity, (self.posted[reader],), (self.taken[reader],))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All descriptors."""
        return (self.memory, *self.posted, *self.taken)

    def close(self) -> None:
        """Closes the descriptors in this process; existing mappings stay valid."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class RingWriter:
    """Writes messages to a ring. Not thread-safe.

    Args:
        ends: of all readers.
    """

    def __init__(self, ends: RingEnds) -> None:
        self._ends = ends
        self._memory = mmap.mmap(ends.memory, ends.capacity)
        # bytes written so far, and how many of them all readers have read
        self._written = 0
        self._taken_by_all = 0
        # number and end of each fragment that some reader has not read
        self._unread: collections.deque[tuple[int, int]] = collections.deque()
        self._num_fragments = 0
        # fragments that each reader has read
        self._num_taken = [0] * len(ends.taken)

    def write(self, message: bytes, is_abandoned: Callable[[], bool] = lambda: False) -> None:
        """Sends a message; blocks while the ring is full.

        Args:
            message: of any length, also longer than the ring.
            is_abandoned: called while the ring is full; true ends the wait.

        Raises:
            RingAbandonedError: `is_abandoned` returned true.
        """
        rest = memoryview(message)
        while True:
            start, room = _next_fragment(self._written, self._ends.capacity)
            fragment = rest[: min(room, self._ends.capacity // 4)]
            rest = rest[len(fragment) :]
            end = start + _HEADER.size + -(-len(fragment) // _ALIGNMENT) * _ALIGNMENT
            self._wait_for_room(end, is_abandoned)
            offset = start % self._ends.capacity
            _HEADER.pack_into(self._memory, offset, len(fragment), not rest)
            self._memory[offset + _HEADER.size : offset + _HEADER.size + len(fragment)] = fragment
            self._written = end
            self._num_fragments += 1
            self._unread.append((self._num_fragments, end))
            for descriptor in self._ends.posted:
                os.eventfd_write(descriptor, 1)
            if not rest:
                return

    def _wait_for_room(self, end: int, is_abandoned: Callable[[], bool]) -> None:
        """Waits until the ring is free up to position `end`."""
        if end - self._taken_by_all <= self._ends.capacity:
            return
        self._count_taken()
        while end - self._taken_by_all > self._ends.capacity:
            if is_abandoned():
                raise RingAbandonedError("a reader of the ring has stopped reading")
            slowest = min(range(len(self._num_taken)), key=self._num_taken.__getitem__)
            poll = select.poll()
            poll.register(self._ends.taken[slowest], select.POLLIN)
            poll.poll(_POLL_MS)
            self._count_taken()

    def _count_taken(self) -> None:
        for reader, descriptor in enumerate(self._ends.taken):
            try:
                self._num_taken[reader] += os.eventfd_read(descriptor)
            except BlockingIOError:
                continue
        by_all = min(self._num_taken)
        while self._unread and self._unread[0][0] <= by_all:
            _, self._taken_by_all = self._unread.popleft()


class RingReader:
    """Reads messages from a ring. Not thread-safe.

    Args:
        ends: of this reader alone, see `RingEnds.of_reader`.

    Attributes:
        descriptor: readable when `take` does not block.
    """

    def __init__(self, ends: RingEnds) -> None:
        self._memory = mmap.mmap(ends.memory, ends.capacity)
        self._capacity = ends.capacity
        (self.descriptor,) = ends.posted
        (self._taken,) = ends.taken
        self._read = 0
        # fragments of a message whose last one has not come
        self._fragments: list[bytes] = []

    def read(self) -> bytes:
        """The next message; blocks until it is complete."""
        while (message := self.take()) is None:
            pass
        return message

    def take(self) -> bytes | None:
        """Reads the next fragment; blocks until there is one. Returns the message if that was its last fragment."""
        os.eventfd_read(self.descriptor)
        start, _ = _next_fragment(self._read, self._capacity)
        offset = start % self._capacity
        length, is_last = _HEADER.unpack_from(self._memory, offset)
        self._fragments.append(self._memory[offset + _HEADER.size : offset + _HEADER.size + length])
        self._read = start + _HEADER.size + -(-length // _ALIGNMENT) * _ALIGNMENT
        os.eventfd_write(self._taken, 1)
        if not is_last:
            return None
        message = self._fragments[0] if len(self._fragments) == 1 else b"".join(self._fragments)
        self._fragments = []
        return message


def _next_fragment(position: int, capacity: int) -> tuple[int, int]:
    """Start of the next fragment at or behind a position, and the bytes that fit in it before the end of the ring."""
    tail = capacity - position % capacity
    if tail <= _HEADER.size:
        position, tail = position + tail, capacity
    return position, tail - _HEADER.size
