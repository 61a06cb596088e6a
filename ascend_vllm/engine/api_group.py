"""The API-server processes of one server (--api-server-count), as one of them sees them.

They are forked from one parent, which also starts the engine cores. Each has sockets of its own to every core, and
clients' connections of its own. What concerns the whole server is shared in three ways:

- numbers, such as how many sequences a process has, are in memory that all of them map (`SharedCounts`);
- what only one request at a time may have, such as an id that a client chose, is a file in the server's private
  directory (`ApiGroup.take`);
- anything else is asked of the others over Unix domain sockets in that directory (`ApiGroup.ask_others`), or answered
  by the first process for all of them (see `entrypoints/http/forwarding.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import fcntl
import functools
import hashlib
import inspect
import itertools
import mmap
import os
import pathlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ascend_vllm.errors import EngineDeadError
from ascend_vllm.logger import init_logger

if TYPE_CHECKING:
    from ascend_vllm.engine.core_process import AttachedCore

logger = init_logger(__name__)

_BACKLOG = 1024
# bytes of a message's length
_HEADER = 4
# the name of a message that is the head of a forwarded request
HTTP = "http"


class Count(enum.IntEnum):
    """A number that every process publishes, for each engine core or, under rank 0, for all of them."""

    # unfinished sequences, and those that are being tokenised
    SEQUENCES = 0
    # prompt tokens of requests without an output token
    PREFILL_TOKENS = 1
    # requests in progress, for /load
    LOAD = 2
    # unfinished sequences that were routed to the core
    ROUTED = 3
    # tokens of the core's requests since the start
    PROMPT_TOKENS = 4
    GENERATION_TOKENS = 5


class SharedCounts:
    """Numbers that each process writes for itself and reads of the others; made before the processes are forked.

    Args:
        num_processes: API-server processes.
        num_engines: engine cores.

    Attributes:
        index: this process's; set after the fork.
    """

    def __init__(self, num_processes: int, num_engines: int) -> None:
        self.index = 0
        self._num_processes = num_processes
        self._num_engines = num_engines
        memory = mmap.mmap(-1, 8 * num_processes * num_engines * len(Count))
        self._values = memoryview(memory).cast("q")
        # record locks belong to a process, also on a descriptor that was inherited
        self._lock_file = os.memfd_create("api_server_counts")

    def publish(self, count: Count, value: int, rank: int = 0) -> None:
        """Sets a number of this process."""
        self._values[self._position(self.index, count, rank)] = value

    def of_others(self, count: Count, rank: int = 0) -> int:
        """The sum of a number over the other processes."""
        values = (
            self._values[self._position(index, count, rank)]
            for index in range(self._num_processes)
            if index != self.index
        )
        return sum(values)

    @contextlib.contextmanager
    def lock(self) -> Generator[None, None, None]:
        """Keeps the other processes out while numbers are compared and changed; never awaits within."""
        fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    def _position(self, index: int, count: Count, rank: int) -> int:
        return (index * self._num_engines + rank) * len(Count) + count


class FrameStream:
    """Messages over a connection: a length in four bytes, then msgpack.

    Args:
        reader, writer: of the connection.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self) -> Any:
        """The next message; must not be cancelled unless the connection is closed afterwards.

        Raises:
            EOFError, OSError: there is no further one.
        """
        length = int.from_bytes(await self._reader.readexactly(_HEADER))
        return msgspec.msgpack.decode(await self._reader.readexactly(length))

    async def write(self, message: Any) -> None:
        """Sends a message; waits while the other end does not read.

        Raises:
            OSError: the connection is closed.
        """
        data = msgspec.msgpack.encode(message)
        self._writer.write(len(data).to_bytes(_HEADER) + data)
        await self._writer.drain()

    async def read_to_end(self) -> None:
        """Reads what the other end still sends, until it closes the connection."""
        with contextlib.suppress(OSError):
            while await self._reader.read(1 << 16):
                pass

    def close(self) -> None:
        self._writer.close()


class ApiGroup:
    """One of the API-server processes, and how it reaches the others.

    Made once, before the processes are forked; then each of them calls `join`, and their parent `close`.

    Args:
        num_processes: API-server processes.
        num_engines: engine cores.
        directory: private to the server; its path is short enough for sockets.

    Attributes:
        index: this process's number.
        size: the number of processes.
        counts: of all processes.
        cores: the engine cores, by their ranks; set after the fork.
        handlers: what the others may ask for, by name; called with their arguments, may be async.
        on_http: answers a request that another process forwards; its first message has been read.

    Example::

        group = ApiGroup(2, 1, directory)
        ...  # fork
        group.join(index)
        group.handlers["number"] = lambda: group.index
        async with group.answering():
            numbers = await group.ask_others("number")
    """

    def __init__(self, num_processes: int, num_engines: int, directory: pathlib.Path) -> None:
        self.index = 0
        self.size = num_processes
        self.counts = SharedCounts(num_processes, num_engines)
        self.cores: Sequence[AttachedCore] = ()
        self.handlers: dict[str, Callable[..., Any]] = {}
        self.on_http: Callable[[Any, FrameStream], Awaitable[None]] | None = None
        self._directory = directory
        self._keys = directory / "keys"
        self._keys.mkdir()
        self._numbers = itertools.count()
        # bound before the fork, so that a process that is ready first can already connect to the others
        self._sockets = [self._listener(index) for index in range(num_processes)]

    @property
    def is_first(self) -> bool:
        """Whether this process answers what concerns all of them."""
        return self.index == 0

    def join(self, index: int) -> None:
        """Makes this process the one of this number."""
        self.index = self.counts.index = index
        for other, sock in enumerate(self._sockets):
            if other != index:
                sock.close()

    def close(self) -> None:
        """Closes the sockets; for the parent."""
        for sock in self._sockets:
            sock.close()

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncGenerator[None, None]:
        """Within, this process answers the others."""
        server = await asyncio.start_unix_server(self._answer, sock=self._sockets[self.index])
        try:
            yield
        finally:
            server.close()

    async def connect(self, index: int) -> FrameStream:
        """Opens a connection to another process.

        Raises:
            EngineDeadError: it is gone.
        """
        try:
            return FrameStream(*await asyncio.open_unix_connection(self._path(index)))
        except OSError as error:
            raise EngineDeadError(f"API server {index} is gone: {error.strerror}") from error

    async def ask_others(self, name: str, *args: Any) -> list[Any]:
        """Calls a handler of all other processes; returns their results by the processes' numbers.

        Raises:
            EngineDeadError: one of them is gone, or failed.
        """
        others = [index for index in range(self.size) if index != self.index]
        return await asyncio.gather(*(self.ask(index, name, *args) for index in others))

    def take(self, key: str, limit: int = 1) -> Callable[[], None] | None:
        """Takes one of the places that a key has in all processes together.

        Args:
            key: any text.
            limit: places of the key.

        Returns:
            A function that gives it back; None: all places are taken.
        """
        directory = self._keys / hashlib.sha256(key.encode()).hexdigest()
        place = directory / f"{self.index}-{next(self._numbers)}"
        with self.counts.lock():
            directory.mkdir(exist_ok=True)
            if sum(1 for _ in directory.iterdir()) >= limit:
                return None
            place.touch()
        return functools.partial(self._give_back, place)

    def _give_back(self, place: pathlib.Path) -> None:
        with self.counts.lock():
            place.unlink(missing_ok=True)
            # others may have places of the key
            with contextlib.suppress(OSError):
                place.parent.rmdir()

    def _path(self, index: int) -> str:
        return str(self._directory / f"api-{index}")

    def _listener(self, index: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(self._path(index))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        return sock

    async def ask(self, index: int, name: str, *args: Any) -> Any:
        """Calls a handler of another process; returns its result.

        Raises:
            EngineDeadError: it is gone, or failed.
        """
        stream = await self.connect(index)
        try:
            await stream.write([name, args])
            result, error = await stream.read()
        except (OSError, EOFError) as error:
            raise EngineDeadError(f"API server {index} is gone: it did not answer") from error
        finally:
            stream.close()
        if error is not None:
            raise EngineDeadError(f"API server {index} failed: {error}")
        return result

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = FrameStream(reader, writer)
        try:
            name, content = await stream.read()
            if name == HTTP:
                if self.on_http is not None:
                    await self.on_http(content, stream)
                return
            await stream.write(await self._call(name, content))
        except (OSError, EOFError):
            # the other process has ended, or its client has
            return
        except Exception:
            # what the connection's end tells the other process
            logger.exception("An answer to another API server failed")
        finally:
            stream.close()

    async def _call(self, name: str, args: Sequence[Any]) -> tuple[Any, str | None]:
        """Calls a handler; returns its result, and the text of its error."""
        try:
            result = self.handlers[name](*args)
            return (await result if inspect.isawaitable(result) else result), None
        except Exception as error:
            logger.exception("Another API server's call of %s failed", name)
            return None, f"{type(error).__name__}: {error}"
