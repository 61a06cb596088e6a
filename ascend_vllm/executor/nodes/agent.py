"""A node of --nnodes that has no engine: ``python -m ascend_vllm.executor.nodes.agent``.

It starts its share of the workers, and passes messages between node 0 and them. Its standard input holds a NodeStart
in msgpack. It ends when node 0 or any of its workers ends; when it ends, so do its workers.

A second thread writes to the workers, so that their answers are still read while it waits for room in the ring.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgspec
import zmq

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.config.node import NodeStart, model_digest
from ascend_vllm.config.node_secret import require_secret
from ascend_vllm.distributed.rendezvous import Machine, Rendezvous
from ascend_vllm.distributed.shm_ring import RingAbandonedError
from ascend_vllm.errors import ConfigError
from ascend_vllm.executor.device_thread import SHUTDOWN_GRACE_S
from ascend_vllm.executor.local_workers import LocalWorkers
from ascend_vllm.executor.nodes.link import Hello, LinkLostError, LinkToZero, Message, MessageKind, NodeSetup
from ascend_vllm.executor.wire import ORDERS_BETWEEN_MACHINES, RecordKind
from ascend_vllm.logger import init_logger, name_process

logger = init_logger("ascend_vllm.executor.nodes.agent")

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2

_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.5
# connections that are closed before they are open, one after the other
_MAX_REFUSALS = 3
# for node 0 to end the connection after this node has reported why it ends
_REPORT_END_S = 5.0


def connect(start: NodeStart, secret: bytes, wait_s: float) -> LinkToZero:
    """A mutually authenticated connection with node 0, which may be started later than this node.

    Raises:
        ConfigError: node 0 does not answer in time, or has another secret, or something else listens there.
    """
    where = f"--master-addr {start.master_addr} --master-port {start.master_port}"
    logger.info("Looking for node 0 at %s, %g seconds at most", where, wait_s)
    deadline = time.monotonic() + wait_s
    num_refusals = 0
    while True:
        try:
            return _connect_once(start, secret)
        except OSError as error:
            # node 0 closed it: its secret differs, or it had too many unauthenticated connections for the moment
            num_refusals = num_refusals + 1 if isinstance(error, PermissionError) else 0
            if num_refusals == _MAX_REFUSALS:
                raise ConfigError(
                    f"Node 0 ({error.filename}) refuses this node: it has another secret. Give all nodes the same "
                    "one, by --node-secret-file or ASCEND_VLLM_NODE_SECRET."
                ) from error
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{where}: node 0 does not answer there within {wait_s:g} seconds (ASCEND_VLLM_NODE_WAIT_S): "
                    f"{error.strerror or error}. Start it with --node-rank 0, and the same --master-addr and "
                    "--master-port."
                ) from error
        time.sleep(_RETRY_S)


def _connect_once(start: NodeStart, secret: bytes) -> LinkToZero:
    found = socket.getaddrinfo(start.master_addr, start.master_port, type=socket.SOCK_STREAM)
    host, port = found[0][4][:2]
    link = LinkToZero((str(host), int(port)), secret, envs.node_timeout_s())
    try:
        link.open(_CONNECT_TIMEOUT_S)
    except BaseException:
        link.close()
        raise
    return link


def _hello(start: NodeStart) -> bytes:
    hello = Hello(
        ascend_vllm.__version__,
        start.node_rank,
        start.nnodes,
        start.tensor_parallel_size,
        start.pipeline_parallel_size,
        start.config.device.device if start.config is not None else "",
        model_digest(start.config.model.model) if start.config is not None else "",
        start.problem,
    )
    return msgspec.msgpack.encode(hello)


def join(start: NodeStart, link: LinkToZero) -> NodeSetup:
    """Joins the engine of node 0; returns the setup, which comes when all nodes are there.

    Raises:
        ConfigError: node 0 refuses this node.
        LinkLostError: node 0 is gone.
    """
    link.send(MessageKind.HELLO, _hello(start))
    logger.info("Node 0 is there, at %s; waiting for all nodes to come", link.address)
    message = link.receive()
    if message.kind == MessageKind.REFUSAL:
        raise ConfigError(f"Node 0 ({link.address}) refuses this node: {message.text}")
    if message.kind != MessageKind.SETUP:
        raise LinkLostError("what it says cannot be understood")
    return msgspec.msgpack.decode(message.contents, type=NodeSetup)


class _NodeZeroEndedError(Exception):
    """Node 0 ends, or is gone; the text says why, and is empty after an ordinary shutdown."""


class NodeAgent:
    """Runs the workers of a node.

    Args:
        node_rank: of the node.
        link: with node 0, which has sent the setup.
        workers: of the node, started.
    """

    def __init__(self, node_rank: int, link: LinkToZero, workers: LocalWorkers) -> None:
        self._name = f"node {node_rank} ({link.own_address})"
        self._link = link
        self._workers = workers
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # the record that ends the workers has come
        self._has_stop = False
        self._has_ended = False
        self._stop_requested = False

    def stop(self) -> None:
        """Makes `run` return; safe in a signal handler."""
        self._stop_requested = True
        os.eventfd_write(self._wake, 1)

    def run(self) -> int:
        """Returns the process's exit code when node 0, a worker or this node has ended."""
        threading.Thread(target=self._write_orders, name="write-orders", daemon=True).start()
        try:
            reason = self._pass_on()
            code = EXIT_OK if self._stop_requested else EXIT_FAILURE
            level = logging.INFO if self._stop_requested else logging.ERROR
            logger.log(level, "This node ends, and node 0 with it: %s", reason)
            self._report_end(reason)
        except _NodeZeroEndedError as end:
            code = self._end_with_node_zero(str(end))
        self._has_ended = True
        self._workers.kill()
        self._workers.wait(SHUTDOWN_GRACE_S)
        return code

    def _end_with_node_zero(self, reason: str) -> int:
        if reason:
            logger.error("Node 0 (%s) has ended: %s", self._link.address, reason)
            return EXIT_FAILURE
        self._workers.wait(SHUTDOWN_GRACE_S)
        logger.info("Node 0 has ended, and this node with it")
        return EXIT_OK

    def _report_end(self, reason: str) -> None:
        """Reports why this node ends, and waits for node 0 to end, too."""
        deadline = time.monotonic() + _REPORT_END_S
        with contextlib.suppress(LinkLostError):
            self._link.send(MessageKind.LOSS, reason.encode())
            while self._link.receive(deadline - time.monotonic()).kind != MessageKind.END:
                pass

    def _pass_on(self) -> str:
        """Passes messages on; returns why this node ends.

        Raises:
            _NodeZeroEndedError: node 0 has ended.
        """
        poller = zmq.Poller()
        descriptors = (self._wake, *self._workers.answer_descriptors, *self._workers.pidfds)
        for source in (*descriptors, self._link.socket, self._link.monitor):
            poller.register(source, zmq.POLLIN)
        while True:
            try:
                for message in self._link.take():
                    self._take_order(message)
                ready = {source for source, _ in poller.poll()}
                # answers sent before the end come first: they may give the reason
                answering = ready & self._workers.answer_descriptors.keys()
                for rank, record in self._workers.take(answering):
                    self._link.send(MessageKind.ANSWER, record, rank)
            except LinkLostError as error:
                raise _NodeZeroEndedError(error) from None
            if self._stop_requested:
                return f"{self._name} was told to stop by a signal"
            for descriptor in ready & self._workers.pidfds.keys() if not answering else ():
                if not self._has_stop:
                    return f"{self._workers.describe_end(descriptor)} on {self._name}"
                poller.unregister(descriptor)

    def _take_order(self, message: Message) -> None:
        if message.kind == MessageKind.END:
            raise _NodeZeroEndedError(message.text)
        if not (message.kind == MessageKind.ORDER and message.contents[:1] in ORDERS_BETWEEN_MACHINES):
            raise _NodeZeroEndedError("what it says cannot be understood")
        self._has_stop = self._has_stop or message.contents[0] == RecordKind.STOP
        self._orders.put(message.contents)

    def _write_orders(self) -> None:
        """The body of the writing thread."""
        with contextlib.suppress(RingAbandonedError):
            while True:
                self._workers.orders.write(self._orders.get(), lambda: self._has_ended)


def run_node(start: NodeStart, set_agent: Callable[[NodeAgent], None]) -> int:
    """Runs a node from its connection with node 0 to its end.

    Args:
        start: what the node is.
        set_agent: called with the agent when it is about to run.

    Returns:
        The exit code.

    Raises:
        ConfigError: node 0 is not there, or refuses this node, or there is no secret.
        LinkLostError: node 0 is gone.
    """
    if start.config is None:
        _report_problem(start)
        return start.exit_code
    secret = require_secret(start.secret_file, start.node_rank)
    with contextlib.closing(connect(start, secret, envs.node_wait_s())) as link:
        setup = join(start, link)
        # the model's directory may have another path on this machine
        model = msgspec.structs.replace(setup.config.model, model=start.config.model.model)
        config = msgspec.structs.replace(setup.config, model=model)
        count = config.parallel.local_world_size
        rendezvous = {
            setup.first_rank + rank: Rendezvous(setup.port, None, setup.host, link.own_address, Machine(rank, count))
            for rank in range(count)
        }
        logger.info("All nodes are there; ranks of the workers of this one: %s", ", ".join(map(str, rendezvous)))
        agent = NodeAgent(start.node_rank, link, LocalWorkers(config, rendezvous, setup.search_path))
        set_agent(agent)
        return agent.run()


def _report_problem(start: NodeStart) -> None:
    """Logs why this node cannot take part, and reports it to node 0, which would otherwise wait for this node."""
    # without the secret node 0 does not accept the report
    with contextlib.suppress(OSError, LinkLostError, ConfigError):
        secret = require_secret(start.secret_file, start.node_rank)
        with contextlib.closing(_connect_once(start, secret)) as link:
            link.send(MessageKind.HELLO, _hello(start))
            link.receive(_CONNECT_TIMEOUT_S)
    logger.error("%s", start.problem)


def main() -> int:
    """Runs the process; returns its exit code."""
    # the agent, once there is one
    agents: list[NodeAgent] = []

    def stop(_number: int, _frame: FrameType | None) -> None:
        if not agents:
            # ends the wait for node 0
            raise KeyboardInterrupt
        agents[0].stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=NodeStart)
        name_process(f"Node_{start.node_rank}")
        return run_node(start, agents.append)
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except LinkLostError as error:
        logger.error("Node 0 is gone: %s", error)
    except KeyboardInterrupt:
        logger.info("Stopped before the engine was ready")
    return EXIT_FAILURE


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # without joining threads that wait for node 0 or for room in a ring
    os._exit(code)
