"""The ring of shared memory: every message reaches every reader whole and in order, whatever its length."""

from __future__ import annotations

import random
import threading

import pytest

from ascend_vllm.distributed.shm_ring import RingAbandonedError, RingEnds, RingReader, RingWriter

CAPACITY = 1024


def _messages(seed: int) -> list[bytes]:
    """Of all lengths, some many times as long as the ring."""
    rng = random.Random(seed)
    lengths = [0, 1, 7, 8, 9, CAPACITY // 4, CAPACITY, 5000, *(rng.randrange(400) for _ in range(300))]
    rng.shuffle(lengths)
    return [rng.randbytes(length) for length in lengths]


@pytest.mark.parametrize("num_readers", [1, 3])
def test_messages_arrive_whole_and_in_order(num_readers: int) -> None:
    ends = RingEnds.create(num_readers, CAPACITY)
    messages = _messages(num_readers)
    received: list[list[bytes]] = [[] for _ in range(num_readers)]

    def read(index: int) -> None:
        reader = RingReader(ends.of_reader(index))
        received[index] = [reader.read() for _ in messages]

    threads = [threading.Thread(target=read, args=(index,)) for index in range(num_readers)]
    for thread in threads:
        thread.start()
    writer = RingWriter(ends)
    for message in messages:
        writer.write(message)
    for thread in threads:
        thread.join(30)
    assert received == [messages] * num_readers
    ends.close()


def test_a_writer_waits_for_the_slowest_reader() -> None:
    ends = RingEnds.create(2, CAPACITY)
    writer, fast, slow = RingWriter(ends), RingReader(ends.of_reader(0)), RingReader(ends.of_reader(1))
    pieces = [bytes([number]) * 200 for number in range(4)]
    for piece in pieces:
        writer.write(piece)
        assert fast.read() == piece
    late = threading.Thread(target=writer.write, args=(b"late" * 50,))
    late.start()
    late.join(0.05)
    assert late.is_alive()
    assert [slow.read() for _ in pieces] == pieces
    late.join(30)
    assert fast.read() == slow.read() == b"late" * 50
    ends.close()


def test_waiting_for_room_can_be_given_up() -> None:
    ends = RingEnds.create(1, CAPACITY)
    writer = RingWriter(ends)
    asked = []

    def is_abandoned() -> bool:
        asked.append(True)
        return len(asked) > 1

    with pytest.raises(RingAbandonedError):
        writer.write(bytes(3 * CAPACITY), is_abandoned)
    ends.close()
