"""Where the workers of a group meet. No torch here: whoever starts workers need not load it."""

from __future__ import annotations

import socket

import msgspec

LOOPBACK = "127.0.0.1"


class Rendezvous(msgspec.Struct, frozen=True):
    """A store on the loopback interface, which the first worker keeps.

    Attributes:
        port: of the store.
        listening_socket: descriptor of a socket that listens there, for the first worker; None for the others.
    """

    port: int
    listening_socket: int | None = None


def listen() -> socket.socket:
    """A socket on a free port of the loopback interface, for the first worker to take over."""
    return socket.create_server((LOOPBACK, 0))
