"""Finds listening sockets of libraries that cannot close them, and makes them drop new connections.

Libraries that connect workers keep listening afterwards. Clients that then open as many connections as the process
may have open files would end the process.
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
# a Linux constant that Python's socket module lacks
_SO_ATTACH_FILTER = 26
# BPF program of one instruction: drop the packet
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
    """Makes a listening socket drop all packets of new connections; accepted connections are not affected.

    Clients get no answer. The descriptor stays valid for the library that owns it.
    """
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    # number of instructions, and their address
    filter_ = struct.pack("@HP", len(_DROP_ALL) // 8, ctypes.addressof(program))
    try:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)
    except OSError as error:
        # not permitted in some sandboxes; only this protection is lost
        logger.warning("A port that is not needed any more stays open: %s", error.strerror or error)
