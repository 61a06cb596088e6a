"""What the processes of test_pool run: each job is the name of what happens, and an argument."""

from __future__ import annotations

import os
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    if setup == b"broken":
        raise ValueError

    def answer(job: bytes) -> bytes:
        name, _, argument = job.partition(b" ")
        if name == b"echo":
            return setup + argument
        if name == b"answer":
            return bytes(int(argument))
        if name == b"sleep":
            time.sleep(float(argument))
        elif name == b"exit":
            os._exit(int(argument))
        elif name == b"abort":
            os.abort()
        elif name == b"stall":
            # the beginning of an answer, and nothing behind it
            descriptors = [int(entry.name) for entry in pathlib.Path("/proc/self/fd").iterdir()]
            (channel,) = filter(_is_socket, descriptors)
            os.write(channel, b"\x00\x00\x00\x09\x00")
            time.sleep(60)
        elif name == b"write":
            with tempfile.TemporaryFile(buffering=0) as file:
                file.write(b"x")
        elif name == b"keep":
            _kept.append(bytearray(int(argument)))
        elif name == b"environment":
            return str([os.getpid(), os.getsid(0), os.nice(0)]).encode()
        return b"done"

    return answer


_kept: list[bytearray] = []


def _is_socket(descriptor: int) -> bool:
    try:
        socket.socket(fileno=os.dup(descriptor)).close()
    except OSError:
        return False
    return True
