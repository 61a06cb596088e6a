"""Where node 0 waits for the other nodes of --nnodes, and turns away who does not belong.

Who connects is a stranger until it has proved that it knows the secret of the nodes (`handshake`). Strangers
have a few seconds and a few bytes, one thread hears all of them, and there are never more than a handful: the more of
them come from one address, the sooner those are sent away. They can neither end the start nor fill the log.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import select
import socket
import sys
import threading
import time

import msgspec

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig, ParallelConfig
from ascend_vllm.config.node import model_digest
from ascend_vllm.config.node_secret import VARIABLE, make_secret, read_secret
from ascend_vllm.errors import ConfigError
from ascend_vllm.executor.nodes.handshake import SessionKeys, Stranger, StrangerError
from ascend_vllm.executor.nodes.link import Hello, LinkLostError, Message, MessageKind, NodeLink
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.host import LOOPBACK

logger = init_logger(__name__)

# for all that a stranger has to say
STRANGER_TIMEOUT_S = 5.0
# who have connected and proved nothing
MAX_STRANGERS = 16
# who comes when all nodes are there waits so long for the next one to be heard: the engine works in this process
_LATE_PAUSE_S = 0.05
# for the first message of a node
_GREETING_TIMEOUT_S = 10.0
# lines about strangers: so many at once, and then one in so many seconds
_NUM_LINES = 5
_LINE_INTERVAL_S = 10.0
# of accept: the connection was closed meanwhile, or there is no room for it now
_PASSING_ERRORS = frozenset(
    getattr(errno, name) for name in ("EAGAIN", "ECONNABORTED", "EPROTO", "EMFILE", "ENFILE", "ENOBUFS", "ENOMEM")
)


class _StrangerLog:
    """Tells of strangers, whatever their number is, in few lines. Nothing of what they said is in these."""

    def __init__(self) -> None:
        self._left = float(_NUM_LINES)
        self._last = time.monotonic()
        self._num_untold = 0

    def tell(self, address: str, why: str) -> None:
        now = time.monotonic()
        self._left = min(float(_NUM_LINES), self._left + (now - self._last) / _LINE_INTERVAL_S)
        self._last = now
        if self._left < 1:
            self._num_untold += 1
            return
        untold = f" (and {self._num_untold} others before)" if self._num_untold else ""
        self._left, self._num_untold = self._left - 1, 0
        logger.warning("%s connected to --master-port and is no node: %s%s", address, why, untold)


class NodeAcceptor:
    """Listens at --master-addr and --master-port, for as long as it lives; who comes late is told so.

    Args:
        config: of the engine.

    Attributes:
        host: the address that it listens at.

    Raises:
        ConfigError: the address is not this machine's, or taken.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._parallel = config.parallel
        self._device = config.device.device
        self._model = model_digest(config.model.model)
        self._timeout_s = envs.node_timeout_s()
        self._changed = threading.Condition()
        self._links: dict[int, NodeLink] = {}
        self._is_full = False
        # why no engine can be made of those who came
        self._problem: str | None = None
        given = read_secret(config.parallel.node_secret_file)
        self._socket = _listen(config.parallel)
        self._socket.setblocking(False)
        self.host = str(self._socket.getsockname()[0])
        self._secret = given or _tell_new_secret()
        self._poll = select.poll()
        listening = self._socket.fileno()
        self._poll.register(listening, select.POLLIN)
        # oldest first, by their descriptors
        self._strangers: dict[int, Stranger] = {}
        self._log = _StrangerLog()
        threading.Thread(target=self._receive, args=(listening,), name="wait-for-nodes", daemon=True).start()

    def wait(self) -> list[NodeLink]:
        """Returns when all nodes are there, in the order of their ranks.

        Raises:
            ConfigError: one of them cannot take part, or does not come within ASCEND_VLLM_NODE_WAIT_S.
        """
        limit_s = envs.node_wait_s()
        deadline = time.monotonic() + limit_s
        self._log_waiting(limit_s)
        with self._changed:
            while self._problem is None and (missing := self._missing()):
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise ConfigError(
                        f"{_nodes(missing)} of --nnodes {self._parallel.nnodes} did not come to --master-addr "
                        f"{self._parallel.master_addr} --master-port {self._parallel.master_port} within "
                        f"{limit_s:g} seconds (ASCEND_VLLM_NODE_WAIT_S). Start each with the same command as this "
                        "one, the same secret and its own --node-rank, and see what its log says."
                    )
            if self._problem is not None:
                raise ConfigError(self._problem)
            self._is_full = True
            return [self._links[rank] for rank in sorted(self._links)]

    def _log_waiting(self, limit_s: float) -> None:
        parallel = self._parallel
        hint = f" (only this machine reaches {LOOPBACK})" if self.host == LOOPBACK else ""
        logger.info(
            "Waiting for %s of --nnodes %d at %s:%d%s, %g seconds at most",
            _nodes(list(range(1, parallel.nnodes))),
            parallel.nnodes,
            self.host,
            parallel.master_port,
            hint,
            limit_s,
        )

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._parallel.nnodes) if rank not in self._links]

    def close(self) -> None:
        """Listens no more, and ends the connections that nobody has taken over."""
        with contextlib.suppress(OSError):
            # wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._changed:
            links = [] if self._is_full else list(self._links.values())
            self._is_full = True
        for link in links:
            link.finish(MessageKind.REFUSAL, f"node 0 does not start: {self._problem or 'see its log'}")
            link.close()

    # ---- threads -------------------------------------------------------------------------------------------

    def _receive(self, listening: int) -> None:
        """Hears all strangers, and has those that are nodes greeted."""
        try:
            while True:
                ready = {descriptor for descriptor, _ in self._poll.poll(self._ms_to_deadline())}
                for descriptor in ready & self._strangers.keys():
                    self._hear(descriptor)
                for stranger in [*self._strangers.values()]:
                    if stranger.deadline <= time.monotonic():
                        self._send_away(stranger, "it does not prove that it is one in time")
                if listening in ready:
                    self._accept()
        except OSError:
            # the socket is closed
            for stranger in self._strangers.values():
                stranger.socket.close()

    def _ms_to_deadline(self) -> float | None:
        oldest = next(iter(self._strangers.values()), None)
        # rounded up: a poll that ends too early is one for nothing
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic()) * 1000 + 1

    def _accept(self) -> None:
        """Takes one stranger in, for whom another one may have to go.

        Raises:
            OSError: the socket is closed.
        """
        if self._is_full:
            time.sleep(_LATE_PAUSE_S)
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno not in _PASSING_ERRORS:
                raise
            time.sleep(_LATE_PAUSE_S)
            return
        if len(self._strangers) == MAX_STRANGERS:
            counts = collections.Counter(stranger.address for stranger in self._strangers.values())
            crowd = max(counts.values())
            oldest = next(stranger for stranger in self._strangers.values() if counts[stranger.address] == crowd)
            self._send_away(oldest, "it has not proved that it is one, and others have come")
        try:
            stranger = Stranger(connection, self._secret, STRANGER_TIMEOUT_S)
        except OSError:
            # gone already
            connection.close()
            return
        self._strangers[connection.fileno()] = stranger
        self._poll.register(connection, select.POLLIN)

    def _hear(self, descriptor: int) -> None:
        stranger = self._strangers[descriptor]
        try:
            keys = stranger.hear()
        except StrangerError as error:
            self._send_away(stranger, str(error))
            return
        if keys is not None:
            self._forget(stranger)
            # it knows the secret: it may take its time
            threading.Thread(target=self._greet, args=(stranger, keys), name="greet-node", daemon=True).start()

    def _send_away(self, stranger: Stranger, why: str) -> None:
        self._forget(stranger)
        stranger.socket.close()
        self._log.tell(stranger.address, why)

    def _forget(self, stranger: Stranger) -> None:
        self._poll.unregister(stranger.socket)
        del self._strangers[stranger.socket.fileno()]

    def _greet(self, stranger: Stranger, keys: SessionKeys) -> None:
        try:
            link = NodeLink(stranger.socket, keys, self._timeout_s)
        except OSError:
            stranger.socket.close()
            return
        try:
            hello = _read_hello(link.receive(_GREETING_TIMEOUT_S))
        except (LinkLostError, msgspec.MsgspecError) as error:
            logger.warning("%s knows the secret, and does not say which node it is: %s", link.address, error)
            link.close()
            return
        with self._changed:
            refusal = self._place(hello, link)
            self._changed.notify_all()
        if refusal is None:
            logger.info("Node %d has come, from %s", hello.node_rank, link.address)
            return
        logger.error("%s is refused: %s", link.address, refusal)
        link.finish(MessageKind.REFUSAL, refusal)
        # until it has read that
        with contextlib.suppress(LinkLostError):
            link.receive(_GREETING_TIMEOUT_S)
        link.close()

    def _place(self, hello: Hello, link: NodeLink) -> str | None:
        """Takes a node in, or says why not; under `_changed`."""
        problem = self._why_not(hello, link.address)
        if problem is not None:
            if not self._is_full and self._problem is None:
                self._problem = problem
            return problem
        rank = hello.node_rank
        present = self._links.get(rank)
        if self._is_full or (present is not None and not present.is_lost()):
            there = f" It is the one at {present.address}." if present is not None else ""
            return f"--node-rank {rank} is there already.{there} Give every node a --node-rank of its own."
        if present is not None:
            present.close()
        self._links[rank] = link
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


def _read_hello(message: Message) -> Hello:
    if message.kind != MessageKind.HELLO:
        raise LinkLostError("it does not say who it is")
    return msgspec.msgpack.decode(message.contents, type=Hello)


def _tell_new_secret() -> bytes:
    """Makes a secret and prints it: into the log, which may be kept and sent on, it does not belong."""
    secret = make_secret()
    sys.stderr.write(
        "Node 0 of --nnodes, which this machine is, was given no secret and has made one for this start. Start each "
        f"other node with it in the environment, and show it to nobody else:\n\n    export {VARIABLE}={secret}\n\n"
    )
    sys.stderr.flush()
    return secret.encode()


def _nodes(ranks: list[int]) -> str:
    return f"node {ranks[0]}" if len(ranks) == 1 else f"nodes {', '.join(map(str, ranks))}"


def _listen(parallel: ParallelConfig) -> socket.socket:
    where = f"--master-addr {parallel.master_addr} --master-port {parallel.master_port}"
    try:
        family, *_, address = socket.getaddrinfo(
            parallel.master_addr, parallel.master_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"{where} is already in use on this machine: choose another --master-port, on all nodes."
        else:
            text = (
                f"{where}: node 0 cannot listen there: {error.strerror or error}. --master-addr is an address of the "
                "machine with --node-rank 0, at which the other machines reach it."
            )
        raise ConfigError(text) from error
