"""The inside of a limited process: it answers one job after the other, and the system counts what it takes.

Standard input is a socket on which the server speaks. A message is four bytes of length and that many bytes: a job
comes in, a `Verdict` of one byte and the answer go out. The first message is empty and says that the process is
ready. The end of the socket ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
import os
import pathlib
import resource
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

# of a message: its length
HEAD_BYTES = 4
# the process's exit code when its memory does not even suffice for an answer
EXIT_MEMORY = 3
# of Linux: the signal that a process gets when the thread that started it ends
_PR_SET_PDEATHSIG = 1
# a process that keeps more than this part of its memory after a job gives way to a new one
_KEPT_PART = 0.25


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one job may take.

    Attributes:
        wall_s: seconds from the job to the answer; the server watches over them.
        cpu_s: seconds of CPU time, and up to one more: the system counts whole ones. It watches over them also when
            nobody else does any more.
        memory_bytes: address space beyond what the process has when it is ready.
        niceness: how far the process stands back behind the others of the machine, 0 to 19.
    """

    wall_s: float
    cpu_s: int
    memory_bytes: int
    niceness: int = 0


class Verdict(enum.IntFlag):
    """What the process says of itself with an answer."""

    # it takes the next job
    GOES_ON = 0
    # it ends after this answer
    IS_LAST = 1
    # the job needed more memory than it may: there is no answer
    OUT_OF_MEMORY = 2


def serve(prepare: Callable[[], Callable[[bytes], bytes]], limits: Limits) -> int:
    """Answers jobs until the socket of standard input ends.

    Args:
        prepare: loads what would else be loaded at the first job, without limits, and returns what makes an answer of
            a job. A MemoryError of that tells the server that the job needs more than it may.
        limits: of each job.

    Returns:
        The exit code: 0, or `EXIT_MEMORY`.
    """
    _end_with_parent()
    answer = prepare()
    with _take_channel() as channel:
        _stand_back(limits.niceness)
        base = _address_space_bytes()
        _lower_limit(resource.RLIMIT_AS, base + limits.memory_bytes)
        # no file is written, neither by a job nor by the end of this process
        _lower_limit(resource.RLIMIT_FSIZE, 0)
        _lower_limit(resource.RLIMIT_CORE, 0)
        try:
            send(channel, b"")
            while _answer_next(channel, answer, limits, base):
                pass
        except MemoryError:
            return EXIT_MEMORY
        except OSError:  # the server has gone while it was told something
            return 0
    return 0


def _answer_next(channel: socket.socket, answer: Callable[[bytes], bytes], limits: Limits, base: int) -> bool:
    """Answers one job.

    Returns:
        Whether the process can take another one.
    """
    job = receive(channel)
    if job is None:
        return False
    _limit_cpu(limits.cpu_s)
    found, verdict = b"", Verdict.OUT_OF_MEMORY | Verdict.IS_LAST
    with contextlib.suppress(MemoryError):
        found, verdict = answer(job), Verdict.GOES_ON
    del job
    if _address_space_bytes() - base > limits.memory_bytes * _KEPT_PART:
        verdict |= Verdict.IS_LAST
    send(channel, bytes([verdict]) + found)
    return Verdict.IS_LAST not in verdict


def send(channel: socket.socket, message: bytes) -> None:
    """Sends one message."""
    channel.sendall(len(message).to_bytes(HEAD_BYTES))
    channel.sendall(message)


def receive(channel: socket.socket) -> bytes | None:
    """The next message; None at the end of the socket."""
    head = _receive_exactly(channel, HEAD_BYTES)
    return None if head is None else _receive_exactly(channel, int.from_bytes(head))


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        piece = channel.recv(min(size - len(received), 1 << 20))
        if not piece:
            return None
        received += piece
    return bytes(received)


def _end_with_parent() -> None:
    """Linux kills this process when its parent dies; elsewhere the limit on CPU time and the socket do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _stand_back(niceness: int) -> None:
    os.nice(niceness)
    # where Linux shares the processors among sessions first, this process's session stands back
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/autogroup").write_text(str(niceness))


def _address_space_bytes() -> int:
    # Linux: pages of the whole address space are the first figure
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _lower_limit(kind: int, limit: int) -> None:
    """Sets a soft limit, at most the hard one."""
    _, hard = resource.getrlimit(kind)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (soft, hard))


def _limit_cpu(cpu_s: int) -> None:
    """So many seconds from now on, for the system counts from the process's start."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + cpu_s)


def _take_channel() -> socket.socket:
    """The socket of standard input, which is nothing's input afterwards, nor its output."""
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    return channel
