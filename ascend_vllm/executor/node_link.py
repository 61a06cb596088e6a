"""The connection between node 0 and another node of --nnodes, and what they tell each other through it.

A message is a header (its kind, the rank of a worker, the length) and its contents: msgpack, a text, or a record of
`wire` as it came out of a ring. That the other end is gone without a word is noticed by the kernel, which asks it
when nothing else is sent; a process that is busy, or gets no processor, cannot be mistaken for one that is gone.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import select
import socket
import struct
import threading
import time

import msgspec

from ascend_vllm.config.engine import EngineConfig

# what somebody who is not known yet may send
_MAX_GREETING_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
# a message up to this length is copied behind its header, so that both are one packet
_MAX_COPIED_BYTES = 1 << 16
_HEADER = struct.Struct("<BIQ")


class MessageKind(enum.IntEnum):
    """What a message is."""

    # to node 0
    HELLO = 0xA5
    ANSWER = 1
    LOSS = 2
    # from node 0
    REFUSAL = 3
    SETUP = 4
    ORDER = 5
    END = 6


_KINDS = frozenset(MessageKind)


class Message(msgspec.Struct, frozen=True):
    """A message that came.

    Attributes:
        kind: what it is.
        rank: of the worker that an ANSWER comes from.
        contents: Hello or NodeSetup in msgpack; a record of ANSWER and ORDER; the text of LOSS (how a worker or the
            node ended), REFUSAL and END (why the engine ends; empty: it was told to).
    """

    kind: MessageKind
    rank: int
    contents: bytes

    @property
    def text(self) -> str:
        """Of a kind that has one."""
        return self.contents.decode(errors="replace")


class Hello(msgspec.Struct, frozen=True):
    """Who a node is. Nothing that it sends is looked at before; fields that another version lacks are empty.

    Attributes:
        version: of this package there.
        node_rank: its --node-rank.
        nnodes: its --nnodes.
        tensor_parallel_size: its --tensor-parallel-size.
        pipeline_parallel_size: its --pipeline-parallel-size.
        device: "cpu" or "npu".
        model: digest of the model's config.json there.
        problem: why it cannot take part; empty: it can.
    """

    version: str
    node_rank: int = 0
    nnodes: int = 0
    tensor_parallel_size: int = 0
    pipeline_parallel_size: int = 0
    device: str = ""
    model: str = ""
    problem: str = ""


class NodeSetup(msgspec.Struct, frozen=True):
    """What a node is told when all are there.

    Attributes:
        config: of the engine; the directory of the model is node 0's.
        first_rank: of its workers; there are as many as `config.parallel` says for each node.
        host: address of the store where the workers meet.
        port: of the store.
        search_path: where node 0 finds modules; functions that it calls in workers may come from there.
    """

    config: EngineConfig
    first_rank: int
    host: str
    port: int
    search_path: list[str]


class LinkLostError(Exception):
    """The other end is gone, or says what cannot be understood."""


class NodeLink:
    """One end of the connection. One thread takes messages, any may send.

    Args:
        sock: connected; it belongs to this object.
        timeout_s: seconds without an answer of the other machine's kernel after which it counts as gone.

    Attributes:
        address: of the other machine.
        own_address: of this machine, at which the other one reaches it.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._socket = sock
        self._timeout_s = timeout_s
        self.address = str(sock.getpeername()[0])
        self.own_address = str(sock.getsockname()[0])
        self._sending = threading.Lock()
        self._data = bytearray()
        self._messages: collections.deque[Message] = collections.deque()
        self._is_trusted = False
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        interval_s = max(1, round(timeout_s / 4))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        # of what was sent and of questions alike; it decides how many of these may stay without an answer, too
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000)))

    def fileno(self) -> int:
        """A descriptor that is readable when `take` has something to take."""
        return self._socket.fileno()

    def trust(self) -> None:
        """From now on messages may have any length."""
        self._is_trusted = True

    def send(self, kind: MessageKind, contents: bytes = b"", rank: int = 0) -> None:
        """Sends a message; waits while the other end does not take it.

        Raises:
            OSError: the other end is gone.
        """
        header = _HEADER.pack(kind, rank, len(contents))
        with self._sending:
            if len(contents) <= _MAX_COPIED_BYTES:
                self._socket.sendall(header + contents)
            else:
                self._socket.sendall(header)
                self._socket.sendall(contents)

    def finish(self, kind: MessageKind, text: str) -> None:
        """Sends a last message if that takes no waiting, and nothing any more; who waits in `send` fails."""
        contents = text.encode()[:_MAX_COPIED_BYTES]
        is_free = self._sending.acquire(blocking=False)
        try:
            with contextlib.suppress(OSError):
                if is_free:
                    self._socket.send(_HEADER.pack(kind, 0, len(contents)) + contents, socket.MSG_DONTWAIT)
                # what was sent still goes out, and then the end
                self._socket.shutdown(socket.SHUT_RDWR if not is_free else socket.SHUT_WR)
        finally:
            if is_free:
                self._sending.release()

    def take(self) -> list[Message]:
        """The messages that are complete with what is there to be read; waits for something if there is nothing.

        Raises:
            LinkLostError: the other end is gone; its text says how, as the end of a sentence.
        """
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except TimeoutError:
            raise LinkLostError(
                f"nothing was heard of it for {self._timeout_s:g} seconds (ASCEND_VLLM_NODE_TIMEOUT_S)"
            ) from None
        except OSError as error:
            raise LinkLostError(f"the connection is lost: {error.strerror or error}") from None
        if not data:
            raise LinkLostError("it has closed the connection")
        self._data += data
        pending = list(self._messages)
        self._messages.clear()
        return pending + self._parse()

    def _parse(self) -> list[Message]:
        messages, start = [], 0
        while len(self._data) - start >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._data, start)
            if kind not in _KINDS or (length > _MAX_GREETING_BYTES and not self._is_trusted):
                raise LinkLostError("what it says is no message of ascend-vllm")
            end = start + _HEADER.size + length
            if len(self._data) < end:
                break
            messages.append(Message(MessageKind(kind), rank, bytes(self._data[start + _HEADER.size : end])))
            start = end
        del self._data[:start]
        return messages

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message; waits for it.

        Raises:
            LinkLostError: the other end is gone, or says nothing within the time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            if deadline is not None and not self._is_readable(deadline - time.monotonic()):
                raise LinkLostError(f"it says nothing for {timeout_s:g} seconds")
            self._messages.extend(self.take())
        return self._messages.popleft()

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))

    def is_lost(self) -> bool:
        """Whether the other end has closed the connection, as far as is known without waiting."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def drain(self, timeout_s: float) -> None:
        """Reads until the other end has closed the connection: what it has not read yet would be lost otherwise."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(LinkLostError):
            while self._is_readable(deadline - time.monotonic()):
                self.take()

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
