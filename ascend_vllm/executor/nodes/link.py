"""The connection between node 0 and another node of --nnodes, and the messages on it.

Connections are zmq's, encrypted and authenticated by CURVE. Node 0's keys are derived from the nodes' secret, the
public one, too: it is never sent, and CURVE's first message cannot be made without it. So both ends prove that they
know the secret, and messages cannot be read, changed, replayed or dropped by others. A message has a kind, the rank
of a worker and contents: msgpack, a text, or a record of `wire` as it came out of a ring. Nothing is pickled.

TCP keepalives detect a machine that has vanished; zmq's own heartbeats would also drop a process that is only busy or
gets no processor.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hmac
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.errors import ConfigError

# kind, rank
_HEADER = struct.Struct("<BI")
# frame size in which longer messages are sent
_FRAME_BYTES = 1 << 16
# limit of received frames, CURVE's overhead included: no more than that is buffered for an unauthenticated peer
_MAX_FRAME_BYTES = 1 << 17
# for a peer to prove that it knows the secret
HANDSHAKE_TIMEOUT_S = 5.0
# events of connections. Not HANDSHAKE_FAILED_PROTOCOL: libzmq (4.3.5) also reports changed messages by it, and then
# does not close their connection, because reporting has overwritten errno
_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)  # fmt: skip
# at the end, for messages still to be transmitted
_LINGER_MS = 2000
# Nobody reconnects. "Never" (-1) would be wrong: zmq then drops what was received just before the connection ended,
# such as the reason.
_RECONNECT_MS = 86_400_000


class MessageKind(enum.IntEnum):
    """Kinds of messages between node 0 and another node."""

    # to node 0
    HELLO = 0
    ANSWER = 1
    LOSS = 2
    # from node 0
    REFUSAL = 3
    SETUP = 4
    ORDER = 5
    END = 6


class Message(msgspec.Struct, frozen=True):
    """A message that came.

    Attributes:
        kind: what it is.
        rank: of the worker that an ANSWER comes from.
        contents: Hello or NodeSetup in msgpack; a record of ANSWER and ORDER; the text of LOSS (how a worker or the
            node ended), REFUSAL and END (why the engine ends; empty: an ordinary shutdown).
    """

    kind: MessageKind
    rank: int
    contents: bytes

    @property
    def text(self) -> str:
        """The contents of a LOSS, REFUSAL or END."""
        return self.contents.decode(errors="replace")


class Hello(msgspec.Struct, frozen=True):
    """A node's first message; fields that another version lacks are empty.

    Attributes:
        version: of this package there.
        node_rank, nnodes, tensor_parallel_size, pipeline_parallel_size: its flags of these names.
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
    """What a node needs to start its workers, sent when all nodes are there.

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
    """The other end is gone, or sent an invalid message; the text is the end of a sentence."""


def frames_of(kind: MessageKind, contents: bytes, rank: int = 0) -> list[bytes]:
    """The frames that a message is sent as."""
    rest = [contents[start : start + _FRAME_BYTES] for start in range(_FRAME_BYTES, len(contents), _FRAME_BYTES)]
    return [_HEADER.pack(kind, rank) + contents[:_FRAME_BYTES], *rest]


def message_of(frames: Iterable[bytes]) -> Message:
    """The message of some frames.

    Raises:
        LinkLostError: they are none.
    """
    data = b"".join(frames)
    try:
        kind, rank = _HEADER.unpack_from(data)
        return Message(MessageKind(kind), rank, data[_HEADER.size :])
    except (struct.error, ValueError):
        raise LinkLostError("what it says is no message of this connection") from None


def _keys_of_zero(secret: bytes) -> tuple[bytes, bytes]:
    """Node 0's public and secret key, in Z85; without the secret neither can be known."""
    own = z85.encode(hmac.digest(secret, b"ascend-vllm node 0", "sha256"))
    return zmq.curve_public(own), own


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]], *, is_zero: bool, secret: bytes, timeout_s: float, ipv6: bool
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A socket of node 0 (ROUTER) or of another node (DEALER), and one that receives the events of its connections.

    Args:
        timeout_s: seconds without TCP acknowledgements after which the other machine counts as gone.
    """
    interval_s = max(1, round(timeout_s / 4))
    zero_public, zero_secret = _keys_of_zero(secret)
    own_public, own_secret = (zero_public, zero_secret) if is_zero else zmq.curve_keypair()
    options: dict[int, int | bytes] = {
        zmq.CURVE_PUBLICKEY: own_public,
        zmq.CURVE_SECRETKEY: own_secret,
        **({zmq.CURVE_SERVER: 1, zmq.ROUTER_MANDATORY: 1} if is_zero else {zmq.CURVE_SERVERKEY: zero_public}),
        zmq.RECONNECT_IVL: _RECONNECT_MS,
        zmq.IPV6: int(ipv6),
        zmq.MAXMSGSIZE: _MAX_FRAME_BYTES,
        zmq.HANDSHAKE_IVL: round(HANDSHAKE_TIMEOUT_S * 1000),
        zmq.LINGER: _LINGER_MS,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: interval_s,
        zmq.TCP_KEEPALIVE_INTVL: interval_s,
        # TCP_USER_TIMEOUT, of what was sent and of keepalives alike
        zmq.TCP_MAXRT: max(1, round(timeout_s * 1000)),
    }
    # no limits: few steps and calls are under way, so senders never wait; nor may zmq wait for the monitor's reader
    context.sndhwm = context.rcvhwm = 0
    made = context.socket(zmq.ROUTER if is_zero else zmq.DEALER)
    for option, value in options.items():
        made.setsockopt(option, value)
    return made, made.get_monitor_socket(_EVENTS)


def endpoint_of(address: tuple[str, int]) -> str:
    """A numeric address and a port as zmq writes them."""
    host, port = address
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connection_of(descriptor: int) -> socket.socket | None:
    """A duplicate of one of zmq's TCP sockets; None: it is closed by now."""
    copy = -1
    try:
        copy = os.dup(descriptor)
        return socket.socket(fileno=copy)
    except OSError:
        if copy >= 0:
            # the descriptor has been reused for something that is no socket
            os.close(copy)
        return None


def lost(timeout_s: float) -> LinkLostError:
    """The error of a connection that has ended."""
    return LinkLostError(
        f"the connection is closed, or nothing was heard of it for {timeout_s:g} seconds (ASCEND_VLLM_NODE_TIMEOUT_S)"
    )


def events_of(monitor: zmq.Socket[bytes]) -> Iterator[tuple[int, int]]:
    """Kinds and values of the monitor's queued events, without waiting."""
    while monitor.poll(0):
        event = recv_monitor_message(monitor)
        yield event["event"], event["value"]


class LinkToZero:
    """Another node's end of its connection with node 0; for one thread.

    Args:
        address: of node 0, numeric, and its port.
        secret: of the nodes.
        timeout_s: see `make_socket`.

    Attributes:
        address: of node 0.
        own_address: of this machine, at which node 0 reaches it.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, timeout_s: float) -> None:
        self.address, self.own_address = address[0], ""
        self._timeout_s = timeout_s
        self._is_lost = False
        self._messages: list[Message] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket, self.monitor = make_socket(
            self._context, is_zero=False, secret=secret, timeout_s=timeout_s, ipv6=":" in address[0]
        )
        self.socket.connect(endpoint_of(address))

    def open(self, timeout_s: float) -> None:
        """Waits until both ends have authenticated each other.

        Raises:
            ConfigError: what listens there is no node 0, or has another secret.
            PermissionError: it has closed the connection instead, as node 0 does if this node has another secret.
            OSError: nobody answers.
        """
        deadline = time.monotonic() + timeout_s
        while self.monitor.poll(max(0, round((deadline - time.monotonic()) * 1000))):
            event = recv_monitor_message(self.monitor)
            match event["event"]:
                case zmq.EVENT_CONNECTED:
                    connection = connection_of(event["value"])
                    if connection is not None:
                        with connection:
                            self.own_address = str(connection.getsockname()[0])
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    raise PermissionError(
                        errno.EACCES, "it has closed the connection before it said who it is", self.address
                    )
                case zmq.EVENT_DISCONNECTED:
                    raise ConfigError(
                        f"{self.address}, where node 0 should listen, is no node of ours: what it says is no message "
                        "of ascend-vllm, or does not prove that it knows the secret. Nothing was told it."
                    )
                case zmq.EVENT_CLOSED:
                    raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def send(self, kind: MessageKind, contents: bytes = b"", rank: int = 0) -> None:
        """Sends a message, without waiting.

        Raises:
            LinkLostError: node 0 is gone.
        """
        try:
            self.socket.send_multipart(frames_of(kind, contents, rank), zmq.NOBLOCK)
        except zmq.Again:
            raise lost(self._timeout_s) from None

    def take(self) -> list[Message]:
        """The messages that have come, without waiting.

        Raises:
            LinkLostError: there are none, and node 0 is gone.
        """
        # in this order, so that messages that came before the end are taken
        self._is_lost |= any(kind == zmq.EVENT_DISCONNECTED for kind, _ in events_of(self.monitor))
        messages, self._messages = self._messages, []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(message_of(self.socket.recv_multipart(zmq.NOBLOCK)))
        if self._is_lost and not messages:
            raise lost(self._timeout_s)
        return messages

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message; waits for it.

        Raises:
            LinkLostError: node 0 is gone, or says nothing within the time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        while not (messages := self.take()):
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise LinkLostError(f"it says nothing for {timeout_s:g} seconds")
            poller.poll(None if left_s is None else math.ceil(left_s * 1000))
        self._messages = messages[1:]
        return messages[0]

    def close(self) -> None:
        """Ends the connection, when what was sent has left."""
        self.socket.disable_monitor()
        self._context.destroy()
