"""Workers on several machines, as node 0 sees them: its own, and those that the other nodes of --nnodes start."""

from __future__ import annotations

import contextlib
import select
import sys
import time

import msgspec

from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.distributed.rendezvous import Machine, Rendezvous, listen
from ascend_vllm.errors import EngineDeadError
from ascend_vllm.executor import wire
from ascend_vllm.executor.local_workers import LocalWorkers
from ascend_vllm.executor.nodes.acceptor import NodeAcceptor, NodeLink
from ascend_vllm.executor.nodes.link import LinkLostError, Message, MessageKind, NodeSetup
from ascend_vllm.executor.worker_group import WorkerGroup

# seconds to look for a dead worker after another one's failure, which may have arrived first, above all if that one
# is on this machine; and for the nodes to close their connections
_FIND_DEATH_S = 2.0


class NodeGroup(WorkerGroup):
    """Starts the workers of an engine on the nodes of --nnodes, whose ranks are consecutive on each node.

    Each node is sent the records that this one's workers get, and writes them into a ring of its own.

    Raises:
        ConfigError: another node does not connect in time, or cannot take part.
    """

    _sends_plain_calls = True

    def _start(self, config: EngineConfig) -> LocalWorkers:
        self._acceptor = NodeAcceptor(config)
        try:
            self._nodes = self._acceptor.wait()
            return self._start_workers(config)
        except BaseException:
            self._acceptor.close()
            raise

    def _start_workers(self, config: EngineConfig) -> LocalWorkers:
        self._num_local = count = config.parallel.local_world_size
        host = self._acceptor.host
        with listen(host) as socket:
            port = socket.getsockname()[1]
            for node in self._nodes:
                setup = NodeSetup(config, node.node_rank * count, host, port, sys.path)
                with contextlib.suppress(LinkLostError):  # the listening thread notices the loss
                    node.send(MessageKind.SETUP, msgspec.msgpack.encode(setup))
            for descriptor in self._acceptor.descriptors:
                self._poll.register(descriptor, select.POLLIN)
            rendezvous = {
                rank: Rendezvous(port, None if rank else socket.fileno(), host, host, Machine(rank, count))
                for rank in range(count)
            }
            return LocalWorkers(config, rendezvous, sys.path)

    def _send(self, record: bytes) -> None:
        for node in self._nodes:
            try:
                node.send(MessageKind.ORDER, record)
            except LinkLostError as error:
                raise EngineDeadError(str(self._error or _describe_loss(node, error))) from error
        super()._send(record)

    def _send_stop(self) -> None:
        if self.failure_reason is None:
            super()._send_stop()
            self._end_nodes("")
        else:
            self._end_nodes(self.failure_reason)
            super()._send(wire.STOP)

    def _end_nodes(self, reason: str) -> None:
        for node in self._nodes:
            with contextlib.suppress(LinkLostError):
                node.send(MessageKind.END, reason.encode())

    def _wait_for_exits(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        super()._wait_for_exits(timeout_s)
        for node in self._nodes:
            node.has_ended.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        super()._kill()
        self._end_nodes(str(self._error))

    def close(self) -> None:
        super().close()
        # nodes close their connections after reading END
        deadline = time.monotonic() + _FIND_DEATH_S
        while not all(node.has_ended.is_set() for node in self._nodes) and time.monotonic() < deadline:
            self._acceptor.take_within(deadline - time.monotonic())
        self._nodes = []
        self._acceptor.close()

    # ---- the listening thread ------------------------------------------------------------------------------

    def _take_ready(self, ready: set[int]) -> bool:
        has_answers = super()._take_ready(ready)
        messages = self._acceptor.take() if ready & self._acceptor.descriptors else []
        for node, message in messages:
            # after an error all futures have failed already
            if self._error is None:
                self._take_message(node, message)
        return has_answers or bool(messages)

    def _take_message(self, node: NodeLink, message: Message | LinkLostError) -> None:
        if (end := _end_of(node, message)) is not None:
            self._lose(end)
        elif isinstance(message, Message) and self._is_answer(node, message):
            self._take(message.rank, message.contents)
        else:
            self._lose(_describe_loss(node, LinkLostError("what it says cannot be understood")))

    def _is_answer(self, node: NodeLink, message: Message) -> bool:
        return (
            message.kind == MessageKind.ANSWER
            and message.rank // self._num_local == node.node_rank
            and message.contents[:1] in wire.ANSWERS_BETWEEN_MACHINES
        )

    def _lose(self, how: str) -> None:
        if not self._is_stopping and self._error is None:
            self._die(EngineDeadError(how))

    def _find_death(self) -> EngineDeadError | None:
        deadline = time.monotonic() + _FIND_DEATH_S
        while (left := deadline - time.monotonic()) > 0:
            # this machine's workers first
            if (end := self._local.find_death(min(left, 0.01))) is not None:
                return EngineDeadError(end)
            for node, message in self._acceptor.take():
                if (end := _end_of(node, message)) is not None:
                    return EngineDeadError(end)
        return None


def _end_of(node: NodeLink, message: Message | LinkLostError) -> str | None:
    """How a node or one of its workers ended, if the message reports that."""
    if isinstance(message, LinkLostError):
        return _describe_loss(node, message)
    return message.text if message.kind == MessageKind.LOSS else None


def _describe_loss(node: NodeLink, error: LinkLostError) -> str:
    return f"node {node.node_rank} ({node.address}) is gone: {error}"
