"""Listening sockets of libraries that cannot be told to close them: found in this process, and made deaf.

Workers find each other once, and the libraries that connect them go on listening. Whoever connects then, as often as
a process may have files open, ends the process.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import socket
import struct

from ascend_vllm.logger import init_logger

logger = init_logger(__name__)

_OWN_DESCRIPTORS = pathlib.Path("/proc/self/fd")
# of Linux, which Python's socket has no name for
_SO_ATTACH_FILTER = 26
# one instruction: keep nothing of a packet
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)


def listening_sockets() -> set[int]:
    """Descriptors of this process's sockets that listen for connections over a network."""
    return {int(entry.name) for entry in _OWN_DESCRIPTORS.iterdir() if _listens(int(entry.name))}


def _listens(descriptor: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(is_listening) and sock.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:
        # no socket, or closed meanwhile
        return False


def deafen(descriptor: int) -> None:
    """Has a listening socket hear of no further connection; those that it has accepted stay as they are.

    Who connects gets no answer. The descriptor stays valid, for the library that it belongs to.
    """
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    # a number of instructions, and where they are
    filter_ = struct.pack("@HP", len(_DROP_ALL) // 8, ctypes.addressof(program))
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
    except OSError as error:
        # in some sandboxes; nothing but protection is lost
        logger.warning("A port that is not needed any more stays open: %s", error.strerror or error)
