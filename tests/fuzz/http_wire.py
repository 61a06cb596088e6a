"""A client that sends bytes as they are and reads just enough of HTTP/1.1 to know where an answer ends."""

from __future__ import annotations

import asyncio
import dataclasses

from tests.fuzz.hostile_requests import HostileRequest


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back: `status` 0 means that the connection ended without an answer."""

    status: int
    body: bytes


class Connection:
    """A connection that is opened again whenever the server closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: HostileRequest) -> Answer:
        """Send a request and read its answer to the end.

        Raises:
            OSError: the server does not listen any more.
        """
        for attempt in (0, 1):
            fresh = self._writer is None
            reader, writer = await self._open()
            try:
                writer.write(request.wire)
                answer = await self._read(reader, request)
            except (ConnectionError, asyncio.IncompleteReadError):
                answer = Answer(0, b"")
            if request.cut_short or answer.status == 0:
                self.close()
            # the server may have closed a connection that it kept alive just as the request went out
            if answer.status or fresh or attempt:
                return answer
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Leave at once."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self._reader, self._writer

    async def _read(self, reader: asyncio.StreamReader, request: HostileRequest) -> Answer:
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        status = int(lines[0].split()[1])
        headers = dict(line.split(b": ", 1) for line in lines[1:] if b": " in line)
        if request.cut_short:
            return Answer(status, b"")
        body = b""
        if not request.head.startswith(b"HEAD") and status not in (204, 304):
            if headers.get(b"transfer-encoding") == b"chunked":
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    body += (await reader.readexactly(size + 2))[:-2]
                await reader.readexactly(2)
            else:
                body = await reader.readexactly(int(headers.get(b"content-length", 0)))
        if headers.get(b"connection") == b"close":
            self.close()
        return Answer(status, body)
