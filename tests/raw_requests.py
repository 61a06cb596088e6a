"""Requests over bare sockets, whose other end a test can close when it likes."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

from tests.server import Server


def post_raw(server: Server, path: str, body: dict[str, object], headers: Sequence[str] = ()) -> socket.socket:
    """A connection with a request sent and nothing read."""
    data = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    sock.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
    return sock


def read_events(sock: socket.socket, count: int) -> bytes:
    """What came until there were so many events."""
    received = b""
    while received.count(b"data: ") < count:
        data = sock.recv(65536)
        assert data, received
        received += data
    return received


def read_rest(sock: socket.socket) -> bytes:
    """What comes until the server closes the connection, which is closed here too."""
    with sock:
        return b"".join(iter(lambda: sock.recv(65536), b""))
