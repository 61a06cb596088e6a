"""Node 0's end of the connections with the other nodes of --nnodes: authentication, and the nodes' messages.

A peer is unauthenticated until it has proved to zmq that it knows the nodes' secret (see `link`) and has sent its
Hello. It has a few seconds for that and little memory, and there are at most MAX_UNAUTHENTICATED such peers: beyond
that the oldest of the address with most of them is disconnected. They can neither end the start nor fill the log.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time

import msgspec
import zmq

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig, ParallelConfig
from ascend_vllm.config.node import model_digest
from ascend_vllm.config.node_secret import VARIABLE, make_secret, read_secret
from ascend_vllm.errors import ConfigError
from ascend_vllm.executor.nodes import link as protocol
from ascend_vllm.executor.nodes.link import Hello, LinkLostError, Message, MessageKind
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.host import LOOPBACK

logger = init_logger(__name__)

# unauthenticated peers at a time
MAX_UNAUTHENTICATED = 16
# rate limit of log lines about them: a burst of so many, then one per interval
_NUM_LINES = 5
_LINE_INTERVAL_S = 10.0

# reasons, in the log, for closing an unauthenticated peer's connection
_LATE = "it does not prove that it is one in time"
_CLOSED = "it has closed the connection"
_WRONG = "it does not know the secret of this start, or what it says is no message of ascend-vllm"


class _PeerLog:
    """Logs unauthenticated peers at a limited rate, and nothing that they sent."""

    def __init__(self) -> None:
        self._left = float(_NUM_LINES)
        self._last = time.monotonic()
        self._num_unlogged = 0

    def add(self, address: str, why: str) -> None:
        now = time.monotonic()
        self._left = min(float(_NUM_LINES), self._left + (now - self._last) / _LINE_INTERVAL_S)
        self._last = now
        if self._left < 1:
            self._num_unlogged += 1
            return
        others = f" (and {self._num_unlogged} others before)" if self._num_unlogged else ""
        self._left, self._num_unlogged = self._left - 1, 0
        logger.warning("%s connected to --master-port and is no node: %s%s", address, why, others)


class _Peer:
    """An unauthenticated peer; `connection` is a copy of zmq's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.address = str(connection.getpeername()[0])
        self.since = time.monotonic()


class NodeLink:
    """Node 0's end of the connection with another node.

    Attributes:
        identity: that zmq gave it.
        node_rank: of the node.
        address: of its machine.
        has_ended: set when the connection is closed.
    """

    def __init__(self, acceptor: NodeAcceptor, identity: bytes, node_rank: int, address: str) -> None:
        self._acceptor = acceptor
        self.identity = identity
        self.node_rank = node_rank
        self.address = address
        self.has_ended = threading.Event()

    def send(self, kind: MessageKind, contents: bytes = b"") -> None:
        """Sends a message, without waiting; from any thread.

        Raises:
            LinkLostError: the node is gone.
        """
        self._acceptor.send(self.identity, kind, contents)


class NodeAcceptor:
    """Listens at --master-addr and --master-port until it is closed; a node that comes late is refused.

    One thread at a time reads messages (`wait`, `take`), when one of `descriptors` is readable; any may send.

    Attributes:
        host: the address that it listens at.
        descriptors: readable when there may be a message.

    Raises:
        ConfigError: the address is not this machine's, or taken.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._parallel = config.parallel
        self._device = config.device.device
        self._model = model_digest(config.model.model)
        self._timeout_s = envs.node_timeout_s()
        secret = read_secret(config.parallel.node_secret_file)
        family, address = _resolve(config.parallel)
        self.host = address[0]
        # of zmq's socket, which two threads use
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._listen(secret, address, family == socket.AF_INET6)
        except BaseException:
            self._destroy()
            raise
        # by the identity that zmq gives them
        self._links: dict[bytes, NodeLink] = {}
        # of node ranks, when all are there
        self._nodes: dict[int, NodeLink] = {}
        self._is_full = False
        # why the nodes that came cannot form an engine
        self._problem: str | None = None
        # by zmq's descriptors, oldest first; of others the node, or None if it was refused or disconnected
        self._peers: dict[int, _Peer] = {}
        self._known: dict[int, NodeLink | None] = {}
        self._log = _PeerLog()

    # ---- the start -----------------------------------------------------------------------------------------

    def _listen(self, given: bytes | None, address: tuple[str, int], ipv6: bool) -> None:
        """Opens the port, and prints the secret if none was given."""
        secret = given or make_secret().encode()
        self._socket, self._monitor = protocol.make_socket(
            self._context, is_zero=True, secret=secret, timeout_s=self._timeout_s, ipv6=ipv6
        )
        sockets = self._socket, self._monitor
        self.descriptors = frozenset((self._wake, *(int(made.getsockopt(zmq.FD)) for made in sockets)))
        try:
            self._socket.bind(protocol.endpoint_of(address))
        except zmq.ZMQError as error:
            raise _cannot_listen(self._parallel, error) from error
        if given is None:
            _print_secret(secret.decode())

    def wait(self) -> list[NodeLink]:
        """Returns when all nodes are there, in the order of their ranks.

        Raises:
            ConfigError: one of them cannot take part, or does not come within ASCEND_VLLM_NODE_WAIT_S.
        """
        limit_s = envs.node_wait_s()
        deadline = time.monotonic() + limit_s
        parallel = self._parallel
        logger.info(
            "Waiting for %s of --nnodes %d at %s:%d%s, %g seconds at most",
            _nodes(list(range(1, parallel.nnodes))),
            parallel.nnodes,
            self.host,
            parallel.master_port,
            f" (only this machine reaches {LOOPBACK})" if self.host == LOOPBACK else "",
            limit_s,
        )
        self.take()
        ranks = range(1, parallel.nnodes)
        while self._problem is None and (missing := [rank for rank in ranks if not self._is_there(rank)]):
            if (left_s := deadline - time.monotonic()) <= 0:
                raise ConfigError(
                    f"{_nodes(missing)} of --nnodes {parallel.nnodes} did not come to --master-addr "
                    f"{parallel.master_addr} --master-port {parallel.master_port} within "
                    f"{limit_s:g} seconds (ASCEND_VLLM_NODE_WAIT_S). Start each with the same command as this "
                    "one, the same secret and its own --node-rank, and see what its log says."
                )
            self.take_within(left_s)
        if self._problem is not None:
            raise ConfigError(self._problem)
        self._is_full = True
        return [self._nodes[rank] for rank in sorted(self._nodes)]

    def _is_there(self, rank: int) -> bool:
        return rank in self._nodes and not self._nodes[rank].has_ended.is_set()

    def close(self) -> None:
        """Listens no more, and ends the connections when what was sent has left; nodes that wait get the reason."""
        for link in () if self._is_full else self._nodes.values():
            with contextlib.suppress(LinkLostError):
                text = f"node 0 does not start: {self._problem or 'see its log'}"
                link.send(MessageKind.REFUSAL, text.encode())
        self._destroy()
        for peer in self._peers.values():
            peer.connection.close()

    def _destroy(self) -> None:
        if not self._context.closed:
            if hasattr(self, "_monitor"):
                self._socket.disable_monitor()
            self._context.destroy()
            os.close(self._wake)

    # ---- messages ------------------------------------------------------------------------------------------

    def send(self, identity: bytes, kind: MessageKind, contents: bytes) -> None:
        with self._lock:
            try:
                self._socket.send_multipart([identity, *protocol.frames_of(kind, contents)], zmq.NOBLOCK)
            except zmq.ZMQError:
                raise protocol.lost(self._timeout_s) from None
            # sending resets zmq's edge-triggered descriptor, which another thread polls, though a message is there
            if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                os.eventfd_write(self._wake, 1)

    def take(self) -> list[tuple[NodeLink, Message | LinkLostError]]:
        """The nodes' messages, and a LinkLostError for each lost node, without waiting; accepts new nodes."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        # before messages are read, so that a lost node's last messages come before its loss
        gone = self._follow_connections()
        taken: list[tuple[NodeLink, Message | LinkLostError]] = []
        while (frames := self._receive()) is not None:
            identity, *contents = (frame.bytes for frame in frames)
            link = self._links.get(identity)
            if link is None:
                gone += self._follow_connections()
                self._admit(identity, contents, frames[-1])
            else:
                try:
                    taken.append((link, protocol.message_of(contents)))
                except LinkLostError as error:
                    taken.append((link, error))
        for link in gone:
            self._links.pop(link.identity, None)
            link.has_ended.set()
            taken.append((link, protocol.lost(self._timeout_s)))
        return taken

    def take_within(self, timeout_s: float) -> None:
        """Waits for messages and losses, and handles them; the messages are dropped."""
        poll = select.poll()
        for descriptor in self.descriptors:
            poll.register(descriptor, select.POLLIN)
        # rounded up, so that the wait is not repeated for less than a millisecond
        poll.poll(max(0.0, timeout_s) * 1000 + 1)
        self.take()

    def _receive(self) -> list[zmq.Frame] | None:
        with self._lock, contextlib.suppress(zmq.Again):
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        return None

    # ---- unauthenticated peers -----------------------------------------------------------------------------

    def _follow_connections(self) -> list[NodeLink]:
        """Handles the monitor's events; returns the nodes whose connections ended."""
        gone, is_closed = [], False
        for event, value in protocol.events_of(self._monitor):
            if event == zmq.EVENT_ACCEPTED and value not in self._known:
                self._add_peer(value)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                is_closed = True
            elif event == zmq.EVENT_DISCONNECTED:
                if value not in self._known:
                    self._lose_peer(self._peers.pop(value, None), is_closed)
                elif (link := self._known.pop(value)) is not None:
                    gone.append(link)
                is_closed = False
        # after all events: the peers that are left still have zmq's descriptor
        self._evict_peers()
        return gone

    def _add_peer(self, descriptor: int) -> None:
        connection = protocol.connection_of(descriptor)
        if connection is None:
            return
        try:
            # the descriptor may have been reused by now
            if connection.getsockname()[1] == self._parallel.master_port:
                self._peers[descriptor] = _Peer(connection)
                return
        except (OSError, IndexError):
            # closed meanwhile
            pass
        connection.close()

    def _lose_peer(self, peer: _Peer | None, is_closed: bool) -> None:
        why = _CLOSED if is_closed else _WRONG
        if peer is not None:
            peer.connection.close()
            why = _LATE if time.monotonic() - peer.since > protocol.HANDSHAKE_TIMEOUT_S else why
        # without an address if it disconnected before it was registered
        self._log.add("Somebody" if peer is None else peer.address, why)

    def _evict_peers(self) -> None:
        """Disconnects peers beyond the limit: the oldest of the address with most of them first."""
        while len(self._peers) > MAX_UNAUTHENTICATED:
            counts = collections.Counter(peer.address for peer in self._peers.values())
            crowd = max(counts.values())
            oldest = next(key for key, peer in self._peers.items() if counts[peer.address] == crowd)
            self._send_away(oldest, "it has not proved that it is one, and others have come")

    def _send_away(self, descriptor: int, why: str) -> None:
        peer = self._peers.pop(descriptor)
        # so that the DISCONNECTED event to come is not logged as an unauthenticated peer's
        self._known[descriptor] = None
        # zmq closes its own copy, too
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_RDWR)
        peer.connection.close()
        self._log.add(peer.address, why)

    def _admit(self, identity: bytes, frames: list[bytes], last: zmq.Frame) -> None:
        """Handles the first message of an authenticated connection."""
        descriptor, address = int(last.get(zmq.SRCFD)), str(last.get("Peer-Address"))
        try:
            message = protocol.message_of(frames)
            if message.kind != MessageKind.HELLO:
                raise LinkLostError("it does not say who it is")
            hello = msgspec.msgpack.decode(message.contents, type=Hello)
        except (LinkLostError, msgspec.MsgspecError) as error:
            logger.warning("%s knows the secret, and does not say which node it is: %s", address, error)
            if descriptor in self._peers:
                self._send_away(descriptor, "it does not say which node it is")
            return
        peer = self._peers.pop(descriptor, None)
        link = NodeLink(self, identity, hello.node_rank, address)
        if peer is None:
            # disconnected before its message was read
            link.has_ended.set()
        refusal = self._place(hello, link)
        if peer is not None:
            peer.connection.close()
            self._known[descriptor] = link if refusal is None else None
        if refusal is None:
            self._links[identity] = link
            logger.info("Node %d has come, from %s", hello.node_rank, address)
            return
        logger.error("%s is refused: %s", address, refusal)
        with contextlib.suppress(LinkLostError):
            link.send(MessageKind.REFUSAL, refusal.encode())

    def _place(self, hello: Hello, link: NodeLink) -> str | None:
        """Takes a node in, or says why not."""
        problem = self._why_not(hello, link.address)
        if problem is not None:
            if not self._is_full and self._problem is None:
                self._problem = problem
            return problem
        rank = hello.node_rank
        if self._is_full or self._is_there(rank):
            there = f" It is the one at {self._nodes[rank].address}." if rank in self._nodes else ""
            return f"--node-rank {rank} is there already.{there} Give every node a --node-rank of its own."
        self._nodes[rank] = link
        return None

    def _why_not(self, hello: Hello, address: str) -> str | None:
        node, own = f"node {hello.node_rank} ({address})", self._parallel
        if hello.version != ascend_vllm.__version__:
            return (
                f"{node} has ascend-vllm {hello.version}, and node 0 has {ascend_vllm.__version__}: install the same "
                f"on all machines of --nnodes {own.nnodes}."
            )
        if hello.problem:
            return f"{node} cannot take part: {hello.problem}"
        for name in ("nnodes", "tensor_parallel_size", "pipeline_parallel_size"):
            theirs, ours = getattr(hello, name), getattr(own, name)
            if theirs != ours:
                flag = "--" + name.replace("_", "-")
                return f"{node} has {flag} {theirs}, and node 0 has {flag} {ours}: they must be the same."
        if not 0 < hello.node_rank < own.nnodes:
            return f"--node-rank of {address} must be between 1 and {own.nnodes - 1}; got {hello.node_rank}."
        if hello.device != self._device:
            return f"{node} has --device {hello.device}, and node 0 has {self._device}: they must be the same."
        if hello.model != self._model:
            return f"{node} was started with another model than node 0: its config.json is not the same."
        return None


def _print_secret(secret: str) -> None:
    """Prints a secret that was made for this start: it does not belong in the log, which may be kept and sent on."""
    sys.stderr.write(
        "Node 0 of --nnodes, which this machine is, was given no secret and has made one for this start. Start each "
        f"other node with it in the environment, and show it to nobody else:\n\n    export {VARIABLE}={secret}\n\n"
    )
    sys.stderr.flush()


def _nodes(ranks: list[int]) -> str:
    return f"node {ranks[0]}" if len(ranks) == 1 else f"nodes {', '.join(map(str, ranks))}"


def _resolve(parallel: ParallelConfig) -> tuple[int, tuple[str, int]]:
    try:
        family, *_, address = socket.getaddrinfo(
            parallel.master_addr, parallel.master_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _cannot_listen(parallel, error) from error
    return family, (str(address[0]), int(address[1]))


def _cannot_listen(parallel: ParallelConfig, error: OSError | zmq.ZMQError) -> ConfigError:
    where = f"--master-addr {parallel.master_addr} --master-port {parallel.master_port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where} is already in use on this machine: choose another --master-port, on all nodes.")
    return ConfigError(
        f"{where}: node 0 cannot listen there: {error.strerror or error}. --master-addr is an address of the "
        "machine with --node-rank 0, at which the other machines reach it."
    )
