"""A ring of shared memory that carries messages from one process to several, the same to each.

The memory has no name and is reached through descriptors that children inherit, so nothing is left of it when the
processes are gone, however they end. Who waits sleeps in the kernel: a message is announced to each reader by an
eventfd, and each reader tells by another that it has taken it. Those calls also order the accesses to the memory,
which holds nothing but messages.

A message lies in pieces, each behind a header of 8 bytes (its length, and whether it is the last); a piece never
wraps around, and begins where 8 divides the position.
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
# how often a writer without room looks whether it is of use to wait
_POLL_MS = 100


class RingAbandonedError(Exception):
    """A reader of the ring takes nothing any more."""


class RingEnds(msgspec.Struct, frozen=True):
    """Descriptors of a ring, the same numbers in all processes that inherit them.

    Attributes:
        memory: the memory.
        capacity: its size in bytes, a multiple of 32.
        posted: an eventfd for each reader, which counts what it may take.
        taken: an eventfd for each reader, which counts what it has taken.
    """

    memory: int
    capacity: int
    posted: tuple[int, ...]
    taken: tuple[int, ...]

    @classmethod
    def create(cls, num_readers: int, capacity: int = CAPACITY_BYTES) -> RingEnds:
        """A new ring; its memory is taken as it is written."""
        memory = os.memfd_create("ascend_vllm_ring")
        os.ftruncate(memory, capacity)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        posted = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE) for _ in range(num_readers))
        return cls(memory, capacity, posted, tuple(os.eventfd(0, flags) for _ in range(num_readers)))

    def of_reader(self, reader: int) -> RingEnds:
        """The ends that one reader needs."""
        return RingEnds(self.memory, self.capacity, (self.posted[reader],), (self.taken[reader],))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them."""
        return (self.memory, *self.posted, *self.taken)

    def close(self) -> None:
        """Closes the descriptors in this process; what is mapped stays so."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class RingWriter:
    """The end of a ring that messages enter. Use it from one thread at a time.

    Args:
        ends: of the ring, for all readers.
    """

    def __init__(self, ends: RingEnds) -> None:
        self._ends = ends
        self._memory = mmap.mmap(ends.memory, ends.capacity)
        # bytes written since the beginning, and those of them that all readers have taken
        self._written = 0
        self._free_up_to = 0
        # number and end of each piece that somebody still has to take
        self._pieces: collections.deque[tuple[int, int]] = collections.deque()
        self._num_pieces = 0
        self._num_taken = [0] * len(ends.taken)

    def write(self, message: bytes, is_abandoned: Callable[[], bool] = lambda: False) -> None:
        """Sends a message; waits while there is no room for it.

        Args:
            message: of any length; one longer than the ring goes through it while readers take it.
            is_abandoned: asked while there is no room; true ends the waiting.

        Raises:
            RingAbandonedError: there will be no room.
        """
        rest = memoryview(message)
        while True:
            start, room = _place(self._written, self._ends.capacity)
            piece = rest[: min(room, self._ends.capacity // 4)]
            rest = rest[len(piece) :]
            end = start + _HEADER.size + -(-len(piece) // _ALIGNMENT) * _ALIGNMENT
            self._wait_for_room(end, is_abandoned)
            offset = start % self._ends.capacity
            _HEADER.pack_into(self._memory, offset, len(piece), not rest)
            self._memory[offset + _HEADER.size : offset + _HEADER.size + len(piece)] = piece
            self._written = end
            self._num_pieces += 1
            self._pieces.append((self._num_pieces, end))
            for descriptor in self._ends.posted:
                os.eventfd_write(descriptor, 1)
            if not rest:
                return

    def _wait_for_room(self, end: int, is_abandoned: Callable[[], bool]) -> None:
        """Returns when everything up to `end` may be written."""
        if end - self._free_up_to <= self._ends.capacity:
            return
        self._count_taken()
        while end - self._free_up_to > self._ends.capacity:
            if is_abandoned():
                raise RingAbandonedError("a reader of the ring takes nothing any more")
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
        while self._pieces and self._pieces[0][0] <= by_all:
            _, self._free_up_to = self._pieces.popleft()


class RingReader:
    """One of the ends at which messages leave a ring. Use it from one thread at a time.

    Args:
        ends: of this reader alone, see `RingEnds.of_reader`.

    Attributes:
        descriptor: readable when `take` has something to take.
    """

    def __init__(self, ends: RingEnds) -> None:
        self._memory = mmap.mmap(ends.memory, ends.capacity)
        self._capacity = ends.capacity
        (self.descriptor,) = ends.posted
        (self._taken,) = ends.taken
        self._read = 0
        self._pieces: list[bytes] = []

    def read(self) -> bytes:
        """The next message; waits for it."""
        while (message := self.take()) is None:
            pass
        return message

    def take(self) -> bytes | None:
        """Waits for the next piece; the message if it was its last one."""
        os.eventfd_read(self.descriptor)
        start, _ = _place(self._read, self._capacity)
        offset = start % self._capacity
        length, is_last = _HEADER.unpack_from(self._memory, offset)
        self._pieces.append(self._memory[offset + _HEADER.size : offset + _HEADER.size + length])
        self._read = start + _HEADER.size + -(-length // _ALIGNMENT) * _ALIGNMENT
        os.eventfd_write(self._taken, 1)
        if not is_last:
            return None
        message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        return message


def _place(position: int, capacity: int) -> tuple[int, int]:
    """Where the next piece begins that comes behind a position, and how long it may be without wrapping around."""
    tail = capacity - position % capacity
    if tail <= _HEADER.size:
        position, tail = position + tail, capacity
    return position, tail - _HEADER.size
