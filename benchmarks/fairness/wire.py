"""A minimal HTTP/1.1 client: makes requests as bytes, and finds where answers end."""

from __future__ import annotations

import json
import socket
from typing import Any

HOST = "127.0.0.1"
MODEL = "benchmark"
_PIECE = 1 << 18


def post_bytes(path: str, body: bytes, *headers: str) -> bytes:
    """A POST of bytes with the content type of JSON."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def post(path: str, body: Any) -> bytes:
    """A POST of a JSON value."""
    return post_bytes(path, json.dumps(body).encode())


def get(path: str, *headers: str) -> bytes:
    """A GET."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


class ClosedError(ConnectionError):
    """The server closed the connection before the answer's end."""


class Answers:
    """The answers on one connection, which are read to their ends and discarded."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def head(self) -> bytes:
        """Reads the head of the next answer, without the empty line.

        Raises:
            OSError: the connection ended.
        """
        while b"\r\n\r\n" not in self._rest:
            self._rest += self._receive()
        head, _, self._rest = self._rest.partition(b"\r\n\r\n")
        return head.lower()

    def skip(self) -> int:
        """Reads an answer; returns its status.

        Raises:
            OSError: the connection ended.
        """
        head = self.head()
        status = int(head[9:12])
        if b"transfer-encoding: chunked" in head:
            self._skip_chunks()
        else:
            _, _, after = head.partition(b"content-length: ")
            self._skip_bytes(int(after.partition(b"\r")[0] or 0))
        if b"connection: close" in head:
            self._sock.close()
        return status

    def _skip_chunks(self) -> None:
        # a chunked answer is the last one of the connection: nothing follows its end
        while not self._rest.endswith(b"0\r\n\r\n"):
            self._rest = self._rest[-8:] + self._receive()
        self._rest = b""

    def _skip_bytes(self, count: int) -> None:
        while len(self._rest) < count:
            count -= len(self._rest)
            self._rest = self._receive()
        self._rest = self._rest[count:]

    def _receive(self) -> bytes:
        data = self._sock.recv(_PIECE)
        if not data:
            raise ClosedError
        return data
