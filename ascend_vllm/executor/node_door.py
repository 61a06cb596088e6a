"""Where node 0 waits for the other nodes of --nnodes, and turns away who does not belong."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time

import msgspec

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.config.engine import EngineConfig, ParallelConfig
from ascend_vllm.config.node import model_digest
from ascend_vllm.errors import ConfigError
from ascend_vllm.executor.node_link import Hello, LinkLostError, Message, MessageKind, NodeLink
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.host import LOOPBACK

logger = init_logger(__name__)

# for the first message of who has connected
_GREETING_TIMEOUT_S = 10.0


class NodeDoor:
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
        self._socket = _listen(config.parallel)
        self.host = str(self._socket.getsockname()[0])
        threading.Thread(target=self._accept, name="wait-for-nodes", daemon=True).start()

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
                        "one and its own --node-rank, and see what its log says."
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

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            # who says nothing must not keep others from coming in
            threading.Thread(target=self._greet, args=(connection,), name="greet-node", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            link = NodeLink(connection, self._timeout_s)
        except OSError:
            connection.close()
            return
        try:
            hello = _read_hello(link.receive(_GREETING_TIMEOUT_S))
        except (LinkLostError, msgspec.MsgspecError) as error:
            logger.warning("%s connected to --master-port and is no node: %s", link.address, error)
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
        link.trust()
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
