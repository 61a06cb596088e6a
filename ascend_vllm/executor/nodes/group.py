"""Workers on several machines, as node 0 sees them: its own, and those that the other nodes of --nnodes start."""

from __future__ import annotations

import contextlib
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Machine, Rendezvous, listen
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.executor import wire
from ascend_vllm.executor.local_workers import LocalWorkers
from ascend_vllm.executor.nodes.acceptor import NodeAcceptor
from ascend_vllm.executor.nodes.link import LinkLostError, Message, MessageKind, NodeLink, NodeSetup
from ascend_vllm.executor.worker_group import WorkerGroup

# when a worker dies the others fail, too, and may be heard first, those of this machine before those of another
_LAST_WORDS_S = 2.0


class _Node:
    """Another node, and its connection."""

    def __init__(self, node_rank: int, link: NodeLink, ranks: range) -> None:
        self.node_rank = node_rank
        self.link = link
        self.ranks = ranks
        # it has closed the connection
        self.has_ended = threading.Event()

    def describe_loss(self, how: str) -> str:
        return f"node {self.node_rank} ({self.link.address}) is gone: {how}"


class NodeGroup(WorkerGroup):
    """Starts the workers of an engine on the nodes of --nnodes, rank after rank and node after node.

    Steps and calls go to each node as they go to the workers of this one; it writes them into a ring of its own.

    Args:
        config: of the engine.

    Raises:
        ConfigError: another node does not come, or cannot take part.
    """

    def _start(self, config: EngineConfig) -> LocalWorkers:
        self._nodes: dict[int, _Node] = {}
        self._acceptor = NodeAcceptor(config)
        try:
            links = self._acceptor.wait()
            return self._start_workers(config, links)
        except BaseException:
            for node in self._nodes.values():
                node.link.close()
            self._acceptor.close()
            raise

    def _start_workers(self, config: EngineConfig, links: list[NodeLink]) -> LocalWorkers:
        count, host = config.parallel.local_world_size, self._acceptor.host
        with listen(host) as socket:
            port = socket.getsockname()[1]
            for node_rank, link in enumerate(links, start=1):
                ranks = range(node_rank * count, (node_rank + 1) * count)
                setup = NodeSetup(config, ranks.start, host, port, sys.path)
                node = _Node(node_rank, link, ranks)
                self._nodes[link.fileno()] = node
                with contextlib.suppress(OSError):  # a node that is gone is noticed by its silence
                    link.send(MessageKind.SETUP, msgspec.msgpack.encode(setup))
                self._poll.register(link, select.POLLIN)
            meetings = {
                rank: Rendezvous(port, None if rank else socket.fileno(), host, host, Machine(rank, count))
                for rank in range(count)
            }
            return LocalWorkers(config, meetings, sys.path)

    def _send(self, record: bytes) -> None:
        for node in self._nodes.values():
            try:
                node.link.send(MessageKind.ORDER, record)
            except OSError as error:
                raise EngineDeadError(str(self._error or node.describe_loss(str(error)))) from error
        super()._send(record)

    def _encode_call(
        self, call_id: int, method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> bytes:
        return wire.encode_plain_call(call_id, method, args, kwargs)

    def _send_stop(self) -> None:
        if self.disorder is not None:
            self._finish_nodes(self.disorder)
            super()._send(wire.encode_stop())
            return
        super()._send_stop()
        for node in self._nodes.values():
            with contextlib.suppress(OSError):
                node.link.send(MessageKind.END)

    def _finish_nodes(self, reason: str) -> None:
        for node in self._nodes.values():
            node.link.finish(MessageKind.END, reason)

    def _wait_for_ends(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        super()._wait_for_ends(timeout_s)
        for node in self._nodes.values():
            node.has_ended.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        super()._kill()
        self._finish_nodes(str(self._error))

    def close(self) -> None:
        super().close()
        self._acceptor.close()
        deadline = time.monotonic() + _LAST_WORDS_S
        for node in self._nodes.values():
            if not node.has_ended.is_set():
                node.link.drain(deadline - time.monotonic())
            node.link.close()
        self._nodes.clear()

    # ---- the listening thread ------------------------------------------------------------------------------

    def _hear(self, ready: set[int]) -> bool:
        has_heard = super()._hear(ready)
        speaking = ready & self._nodes.keys()
        for descriptor in speaking:
            self._hear_node(self._nodes[descriptor])
        return has_heard or bool(speaking)

    def _hear_node(self, node: _Node) -> None:
        try:
            for message in node.link.take():
                self._take_message(node, message)
        except LinkLostError as error:
            self._poll.unregister(node.link)
            node.has_ended.set()
            self._lose(node.describe_loss(str(error)))

    def _take_message(self, node: _Node, message: Message) -> None:
        if self._error is not None:
            # nobody waits for anything any more
            return
        if message.kind == MessageKind.ANSWER and message.rank in node.ranks and _is_answer(message.contents):
            self._take(message.rank, message.contents)
        elif message.kind == MessageKind.LOSS:
            self._lose(message.text)
        else:
            raise LinkLostError("what it says cannot be understood")

    def _lose(self, how: str) -> None:
        if not self._is_stopping and self._error is None:
            self._die(EngineDeadError(how))

    def _find_death(self) -> EngineDeadError | None:
        poll = select.poll()
        for descriptor in (*self._local.deaths, *self._nodes):
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + _LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                is_local = descriptor in self._local.deaths
                end = self._local.describe_end(descriptor) if is_local else _last_words(self._nodes[descriptor])
                if end is not None:
                    return EngineDeadError(end)
        return None


def _is_answer(record: bytes) -> bool:
    return record[:1] in wire.ANSWERS_BETWEEN_MACHINES


def _last_words(node: _Node) -> str | None:
    """How a node or a worker of it ended, if that is among what can be read."""
    try:
        return next((message.text for message in node.link.take() if message.kind == MessageKind.LOSS), None)
    except LinkLostError as error:
        return node.describe_loss(str(error))
