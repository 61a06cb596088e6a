"""A small HTTP/1.1 client for load generation, with little work per event, so that it measures the server.

It supports the answers of inference servers: bodies with a content length, and chunked ones, such as event streams.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple


class HttpError(Exception):
    """An answer other than 200.

    Attributes:
        status: the HTTP status.
        body: the response's body.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:500]}")
        self.status = status
        self.body = body


class Connection(NamedTuple):
    """The streams of a connection, which is used for one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpClient:
    """Sends requests to one server over connections that are reused.

    Args:
        base_url: for example ``http://127.0.0.1:8000``.
        headers: sent with every request.
        verify: refuse https servers with an untrusted certificate.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None, *, verify: bool = True) -> None:
        self._url = urllib.parse.urlsplit(base_url.rstrip("/"))
        self._verify = verify
        sent = {"Host": self._url.netloc, "Content-Type": "application/json"} | dict(headers or {})
        self._head = _header_lines(sent)
        self._idle: list[Connection] = []

    async def get(self, path: str) -> bytes:
        """The body of the answer to a GET.

        Raises:
            HttpError: the status is not 200.
        """
        return b"".join([data async for _, data in self._request("GET", path, b"")])

    async def get_json(self, path: str) -> Any:
        """The decoded JSON of the answer to a GET; see `get`."""
        return json.loads(await self.get(path))

    async def post_stream(self, path: str, body: Any, separator: bytes) -> AsyncIterator[tuple[float, bytes]]:
        """Parts of the answer to a POST, cut at `separator`, each with its time of arrival (perf_counter).

        Raises:
            HttpError: the status is not 200; the text is from the server.
        """
        pending = b""
        async for moment, data in self._request("POST", path, json.dumps(body).encode()):
            *whole, pending = (pending + data).split(separator)
            for chunk in whole:
                yield moment, chunk
        if pending.strip():
            yield time.perf_counter(), pending

    async def post(
        self, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> list[tuple[float, bytes]]:
        """The chunks of the answer to a POST, each with its time of arrival (perf_counter).

        They are not parsed, so that the client takes as little CPU time as possible during the measurement.

        Raises:
            HttpError: the status is not 200.
        """
        return [chunk async for chunk in self._request("POST", path, body, headers)]

    async def check_reachable(self) -> None:
        """Opens a connection and closes it again.

        Raises:
            OSError: nobody listens at the address, or TLS cannot be set up.
        """
        (await self._connect()).writer.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().writer.close()

    async def _connect(self) -> Connection:
        """An idle connection that the server has not closed, as servers do after some seconds, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            connection.writer.close()
        context = None
        if self._url.scheme == "https":
            context = ssl.create_default_context() if self._verify else ssl._create_unverified_context()
        port = self._url.port or (443 if context else 80)
        return Connection(*await asyncio.open_connection(self._url.hostname, port, ssl=context, limit=2**24))

    async def _request(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[tuple[float, bytes]]:
        connection = await self._connect()
        reader, writer = connection
        finished = False
        try:
            lines = f"{self._head}{_header_lines(headers or {})}Content-Length: {len(body)}\r\n\r\n"
            writer.write(f"{method} {self._url.path}{path} HTTP/1.1\r\n{lines}".encode() + body)
            status, answered = await _read_head(reader)
            chunks = _read_body(reader, answered)
            if status != 200:
                text = b"".join([data async for _, data in chunks]).decode(errors="replace")
                raise HttpError(status, text)
            async for chunk in chunks:
                yield chunk
            finished = answered.get("connection", "").lower() != "close"
        finally:
            if finished:
                self._idle.append(connection)
            else:
                writer.close()


def _header_lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.split(":", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), {name.lower(): value.strip() for name, value in headers.items()}


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[tuple[float, bytes]]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            data = await reader.readexactly(size + 2)
            yield time.perf_counter(), data[:-2]
        await reader.readline()
    elif length := int(headers.get("content-length", "0")):
        data = await reader.readexactly(length)
        yield time.perf_counter(), data
