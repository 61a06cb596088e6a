"""What a limited process runs: ``python -m ascend_vllm.sandbox.child MODULE:FUNCTION LIMITS DESCRIPTOR``.

The function is called once, with the contents of the file behind the descriptor, and returns a function from jobs to
answers. Standard input is a socket in `multiprocessing`'s framing. A first, empty message says that the process is
ready; then jobs come in, and for each one goes out a byte, whether the process ends after it, with the answer. The
end of the socket ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import os
import pathlib
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

# the exit code when a job needed more memory than it may
EXIT_MEMORY = 3
# of Linux: the signal that a process gets when the thread that started it ends
_PR_SET_PDEATHSIG = 1
# a process that keeps more than this part of its memory after a job is replaced
_KEPT_PART = 0.25


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one job may take.

    Attributes:
        wall_s: seconds from the job to the answer; `pool` enforces them.
        cpu_s: seconds of CPU time, and up to one more, since the system counts whole ones. It enforces them even when
            the server is gone.
        memory_bytes: address space beyond what the process has when it is ready.
        niceness: added to the process's, 0 to 19.
    """

    wall_s: float
    cpu_s: int
    memory_bytes: int
    niceness: int = 0


def serve(prepare: Callable[[bytes], Callable[[bytes], bytes]], setup: bytes, limits: Limits) -> None:
    """Answers jobs until the socket of standard input ends.

    Args:
        prepare: loads, without limits, what would else be loaded at the first job.
        setup: for `prepare`.
        limits: of each job.

    Raises:
        MemoryError: a job needed more than it may.
        EOFError, OSError: the socket has ended.
    """
    answer = prepare(setup)
    with _take_channel() as channel:
        os.nice(limits.niceness)
        # where Linux shares the processors among sessions first, this process's session is nice, too
        with contextlib.suppress(OSError):
            pathlib.Path("/proc/self/autogroup").write_text(str(limits.niceness))
        base = _address_space_bytes()
        _lower_limit(resource.RLIMIT_AS, base + limits.memory_bytes)
        # no file is written, neither by a job nor by the end of this process
        _lower_limit(resource.RLIMIT_FSIZE, 0)
        _lower_limit(resource.RLIMIT_CORE, 0)
        channel.send_bytes(b"")
        is_last = False
        while not is_last:
            job = channel.recv_bytes()
            used = resource.getrusage(resource.RUSAGE_SELF)
            # the system counts from the process's start
            _lower_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + limits.cpu_s)
            found = answer(job)
            del job
            is_last = _address_space_bytes() - base > limits.memory_bytes * _KEPT_PART
            channel.send_bytes(bytes((is_last,)) + found)


def _take_channel() -> Connection:
    """The socket of standard input; the standard streams become /dev/null."""
    channel = Connection(os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return channel


def _address_space_bytes() -> int:
    # Linux: pages of the whole address space are the first figure
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _lower_limit(kind: int, limit: int) -> None:
    """Sets a soft limit, at most the hard one."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def main() -> int:
    """Runs the process; returns its exit code."""
    # Linux kills it with its parent; elsewhere the limit on CPU time and the socket end it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    module, _, name = sys.argv[1].partition(":")
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    file = int(sys.argv[3])
    setup = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    try:
        serve(getattr(importlib.import_module(module), name), setup, limits)
    except MemoryError:
        return EXIT_MEMORY
    except (EOFError, OSError):
        # the server closed the socket, or has ended
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
