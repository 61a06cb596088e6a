"""The connection between node 0 and another node of --nnodes, and what they tell each other through it.

A message has a kind, the rank of a worker and contents: msgpack, a text, or a record of `wire` as it came out of a
ring. It travels in pieces: a header, a part of the contents, and a code that only the two ends can make, of both and
of the number of the piece. What was changed, left out, repeated or sent by somebody else ends the connection before
any of it is looked at. It can be read by whoever sees it.

That the other end is gone without a word is noticed by the kernel, which asks it when nothing else is sent; a process
that is busy, or gets no processor, cannot be mistaken for one that is gone.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import hmac
import select
import socket
import struct
import threading
import time

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.executor.nodes.handshake import SessionKeys

_CHUNK_BYTES = 1 << 20
# of the contents of a piece: so much is believed of a header before the code behind it is seen
_MAX_PIECE_BYTES = 1 << 20
# one that is sent without waiting
_MAX_LAST_WORDS_BYTES = 1 << 16
# kind, whether it is the last piece of the message, rank, length
_HEADER = struct.Struct("<B?II")
_NUMBER = struct.Struct("<Q")
_CODE_BYTES = 32


class MessageKind(enum.IntEnum):
    """What a message is."""

    # to node 0
    HELLO = 0
    ANSWER = 1
    LOSS = 2
    # from node 0
    REFUSAL = 3
    SETUP = 4
    ORDER = 5
    END = 6


_KINDS = frozenset(MessageKind)
_NOT_UNDERSTOOD = "what it says is no message of this connection"


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
    """Who a node is, its first message; fields that another version lacks are empty.

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


class _Pieces:
    """Codes of the pieces of one direction, in their order."""

    def __init__(self, key: bytes) -> None:
        self._start = hmac.new(key, digestmod="sha256")
        self._count = 0

    def next_code(self, header: bytes | memoryview, contents: bytes | memoryview) -> bytes:
        """The code of the next piece."""
        code = self._start.copy()
        code.update(_NUMBER.pack(self._count))
        code.update(header)
        code.update(contents)
        self._count += 1
        return code.digest()


class NodeLink:
    """One end of the connection. One thread takes messages, any may send.

    Args:
        sock: connected, and both ends have proved who they are; it belongs to this object.
        keys: of the connection, for this end.
        timeout_s: seconds without an answer of the other machine's kernel after which it counts as gone.

    Attributes:
        address: of the other machine.
        own_address: of this machine, at which the other one reaches it.
    """

    def __init__(self, sock: socket.socket, keys: SessionKeys, timeout_s: float) -> None:
        self._socket = sock
        self._timeout_s = timeout_s
        self.address = str(sock.getpeername()[0])
        self.own_address = str(sock.getsockname()[0])
        self._sending = threading.Lock()
        self._sent = _Pieces(keys.sending)
        self._received = _Pieces(keys.receiving)
        self._data = bytearray()
        # of the message whose last piece has not come
        self._contents = bytearray()
        self._messages: collections.deque[Message] = collections.deque()
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

    def send(self, kind: MessageKind, contents: bytes = b"", rank: int = 0) -> None:
        """Sends a message; waits while the other end does not take it.

        Raises:
            OSError: the other end is gone.
        """
        view = memoryview(contents)
        with self._sending:
            for start in range(0, max(1, len(view)), _MAX_PIECE_BYTES):
                part = view[start : start + _MAX_PIECE_BYTES]
                self._socket.sendall(self._piece(kind, start + len(part) == len(view), rank, part))

    def _piece(self, kind: MessageKind, is_last: bool, rank: int, contents: bytes | memoryview) -> bytes:
        """As it is sent; under `_sending`."""
        header = _HEADER.pack(kind, is_last, rank, len(contents))
        return b"".join((header, contents, self._sent.next_code(header, contents)))

    def finish(self, kind: MessageKind, text: str) -> None:
        """Sends a last message if that takes no waiting, and nothing any more; who waits in `send` fails."""
        contents = text.encode()[:_MAX_LAST_WORDS_BYTES]
        is_free = self._sending.acquire(blocking=False)
        try:
            with contextlib.suppress(OSError):
                if is_free:
                    self._socket.send(self._piece(kind, True, 0, contents), socket.MSG_DONTWAIT)
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
        messages = []
        start = 0
        with memoryview(self._data) as data:
            while len(data) - start >= _HEADER.size:
                kind, is_last, rank, length = _HEADER.unpack_from(data, start)
                if length > _MAX_PIECE_BYTES:
                    raise LinkLostError(_NOT_UNDERSTOOD)
                contents, end = start + _HEADER.size, start + _HEADER.size + length + _CODE_BYTES
                if len(data) < end:
                    break
                code = self._received.next_code(data[start:contents], data[contents : contents + length])
                if not hmac.compare_digest(code, data[contents + length : end]) or kind not in _KINDS:
                    raise LinkLostError(_NOT_UNDERSTOOD)
                self._contents += data[contents : contents + length]
                start = end
                if is_last:
                    messages.append(Message(MessageKind(kind), rank, bytes(self._contents)))
                    self._contents.clear()
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
