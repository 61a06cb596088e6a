"""Nodes that connect to node 0, or fail to: over real sockets, without workers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import ascend_vllm
from ascend_vllm.args import parallel
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.engine import EngineConfig
from ascend_vllm.config.node import NodeStart, model_digest
from ascend_vllm.entrypoints.node import make_start
from ascend_vllm.errors import ConfigError
from ascend_vllm.executor.base import create_executor
from ascend_vllm.executor.local_workers import LocalWorkers
from ascend_vllm.executor.nodes import agent
from ascend_vllm.executor.nodes.acceptor import NodeAcceptor
from ascend_vllm.executor.nodes.agent import NodeAgent
from ascend_vllm.executor.nodes.link import Hello, LinkToZero, Message, MessageKind, connection_of
from ascend_vllm.executor.wire import RecordKind
from ascend_vllm.platforms.facts import NpuProbe
from tests.plain_arch import make_arch
from tests.server import free_port, wait_until
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

# a guard: everything here takes milliseconds
TIMEOUT_S = 60.0
SECRET = "a secret of the nodes of a test"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every node here."""
    monkeypatch.setenv("ASCEND_VLLM_NODE_SECRET", SECRET)


@pytest.fixture
def model() -> str:
    return tiny_model("llama-biases")


class Acceptor(NodeAcceptor):
    """Of three nodes, waiting for the others in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.port = config.parallel.master_port
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.links = self._thread.submit(self.wait)

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


@pytest.fixture
def acceptor(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Acceptor]:
    monkeypatch.setenv("ASCEND_VLLM_NODE_WAIT_S", "10")
    acceptor = Acceptor(make_config(model, pipeline_parallel_size=3, nnodes=3, master_port=free_port()))
    yield acceptor
    acceptor.close()


def _connect(acceptor: Acceptor) -> LinkToZero:
    """A connection with the right secret."""
    link = LinkToZero(("127.0.0.1", acceptor.port), SECRET.encode(), TIMEOUT_S)
    link.open(TIMEOUT_S)
    return link


def _hello(directory: str, node_rank: int, **fields: Any) -> bytes:
    values: dict[str, Any] = {
        "version": ascend_vllm.__version__,
        "node_rank": node_rank,
        "nnodes": 3,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 3,
        "device": "cpu",
        "model": model_digest(directory),
    }
    return msgspec.msgpack.encode(Hello(**(values | fields)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": "0.0.0"}, rf"has ascend-vllm 0.0.0, and node 0 has {ascend_vllm.__version__}: install the same"),
        ({"nnodes": 2}, "has --nnodes 2, and node 0 has --nnodes 3"),
        ({"tensor_parallel_size": 6}, "has --tensor-parallel-size 6, and node 0 has --tensor-parallel-size 1"),
        ({"node_rank": 3}, "--node-rank of 127.0.0.1 must be between 1 and 2; got 3"),
        ({"node_rank": 0}, "--node-rank of 127.0.0.1 must be between 1 and 2; got 0"),
        ({"device": "npu"}, "has --device npu, and node 0 has cpu"),
        ({"model": "another"}, "another model than node 0: its config.json is not the same"),
        ({"problem": "/absent has no config.json"}, "cannot take part: /absent has no config.json"),
    ],
)
def test_a_node_that_does_not_fit_ends_the_start_on_both_sides(
    fields: dict[str, Any], message: str, acceptor: Acceptor, model: str
) -> None:
    link = _connect(acceptor)
    link.send(MessageKind.HELLO, _hello(model, **({"node_rank": 2} | fields)))
    answer = link.receive(TIMEOUT_S)
    assert answer.kind == MessageKind.REFUSAL
    with pytest.raises(ConfigError, match=message) as caught:
        acceptor.links.result(TIMEOUT_S)
    assert str(caught.value) == answer.text
    link.close()


def test_another_version_need_not_know_todays_fields(acceptor: Acceptor) -> None:
    link = _connect(acceptor)
    link.send(MessageKind.HELLO, msgspec.msgpack.encode({"version": "9", "node_rank": 1, "colour": "red"}))
    assert "has ascend-vllm 9" in link.receive(TIMEOUT_S).text
    link.close()


def test_who_is_no_node_is_ignored(
    acceptor: Acceptor, model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    browser, *strangers = [socket.create_connection(("127.0.0.1", acceptor.port)) for _ in range(3)]
    browser.sendall(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n")
    strangers[0].sendall(b"\x80\x04whatever, as a record with a pickle")
    strangers[1].sendall(b"no msgpack")
    # closed, and nothing was answered but zmq's greeting
    for stranger in (browser, *strangers):
        with contextlib.suppress(ConnectionResetError):
            while data := stranger.recv(100):
                assert len(data) <= 64
        stranger.close()
    assert wait_until(lambda: sum("is no node" in text for text in caplog.messages) >= 3)
    nodes = [_connect(acceptor) for _ in range(2)]
    for node_rank, link in enumerate(nodes, start=1):
        link.send(MessageKind.HELLO, _hello(model, node_rank))
    assert [link.node_rank for link in acceptor.links.result(TIMEOUT_S)] == [1, 2]
    for link in nodes:
        link.close()


def test_a_rank_is_for_one_node_that_lives(acceptor: Acceptor, model: str) -> None:
    first, second, third, late = (_connect(acceptor) for _ in range(4))
    first.send(MessageKind.HELLO, _hello(model, 1))
    assert wait_until(lambda: 1 in acceptor._nodes)
    second.send(MessageKind.HELLO, _hello(model, 1))
    assert second.receive(TIMEOUT_S).text.startswith("--node-rank 1 is there already. It is the one at 127.0.0.1.")
    # one that was started again takes its place
    first.close()
    place = acceptor._nodes[1]
    assert place.has_ended.wait(TIMEOUT_S)
    third.send(MessageKind.HELLO, _hello(model, 1))
    assert wait_until(lambda: acceptor._nodes[1] is not place)
    last = _connect(acceptor)
    last.send(MessageKind.HELLO, _hello(model, 2))
    acceptor.links.result(TIMEOUT_S)
    late.send(MessageKind.HELLO, _hello(model, 2))
    acceptor.take_within(TIMEOUT_S)
    assert "--node-rank 2 is there already" in late.receive(TIMEOUT_S).text
    # the end of one that was refused is no node's
    num_known = len(acceptor._known)
    said: list[object] = []
    late.close()
    assert wait_until(lambda: said.extend(acceptor.take()) or len(acceptor._known) < num_known)
    assert said == []
    for link in (second, third, last):
        link.close()


def test_nodes_are_not_waited_for_without_end(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_VLLM_NODE_WAIT_S", "1")
    acceptor = Acceptor(make_config(model, pipeline_parallel_size=3, nnodes=3, master_port=free_port()))
    link = _connect(acceptor)
    link.send(MessageKind.HELLO, _hello(model, 1))
    place = rf"--master-addr 127.0.0.1 --master-port {acceptor.port}"
    with pytest.raises(ConfigError, match=f"node 2 of --nnodes 3 did not come to {place} within 1 seconds"):
        acceptor.links.result(TIMEOUT_S)
    acceptor.close()
    # who waits with node 0 is told
    assert link.receive(TIMEOUT_S).text.startswith("node 0 does not start")
    link.close()


def test_a_descriptor_that_means_something_else_by_now() -> None:
    """Its copy stayed open: whoever read from the pipe waited for its end."""
    reader, writer = os.pipe()
    assert connection_of(writer) is None
    os.close(writer)
    assert connection_of(writer) is None
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_where_node_zero_cannot_listen(model: str) -> None:
    config = make_config(model, tensor_parallel_size=2, nnodes=2, master_addr="192.0.2.1")
    with pytest.raises(ConfigError, match=r"--master-addr 192.0.2.1 --master-port 29501: node 0 cannot listen"):
        NodeAcceptor(config)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = make_config(model, tensor_parallel_size=2, nnodes=2, master_port=port)
        with pytest.raises(ConfigError, match=f"--master-port {port} is already in use"):
            NodeAcceptor(config)


# ---- the other side ----------------------------------------------------------------------------------------


def _args(model: str, **fields: Any) -> EngineArgs:
    layers = {"num_hidden_layers": fields.get("pipeline_parallel_size", 3)}
    values: dict[str, Any] = {"pipeline_parallel_size": 3, "nnodes": 3, "node_rank": 1, "device": "cpu"}
    return EngineArgs(model=model, hf_overrides=layers, **(values | fields))


def test_node_zero_that_is_not_there(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_VLLM_NODE_WAIT_S", "0.1")
    port = free_port()
    with pytest.raises(ConfigError, match=f"--master-port {port}: node 0 does not answer there within 0.1 seconds"):
        agent.run_node(make_start(_args(model, master_port=port)), lambda _: None)


def test_node_zero_hears_why_a_node_cannot_take_part(
    acceptor: Acceptor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    start = make_start(_args("/absent/model", master_port=acceptor.port))
    assert agent.run_node(start, lambda _: None) == 2
    with pytest.raises(ConfigError, match=r"node 1 \(127.0.0.1\) cannot take part: .*/absent/model"):
        acceptor.links.result(TIMEOUT_S)
    assert any("/absent/model" in record.message and record.name.endswith("nodes.agent") for record in caplog.records)


def test_a_refused_node_says_why(acceptor: Acceptor, model: str) -> None:
    start = make_start(_args(model, master_port=acceptor.port, pipeline_parallel_size=6))
    assert start.config is not None
    with pytest.raises(ConfigError, match=r"Node 0 \(127.0.0.1\) refuses this node: .*--pipeline-parallel-size 6"):
        agent.run_node(start, lambda _: None)


class _NodeZero:
    """Node 0's end of a connection, as it would be with workers."""

    def __init__(self, acceptor: Acceptor, model: str) -> None:
        self.link = _connect(acceptor)
        self.link.send(MessageKind.HELLO, _hello(model, 1))
        other = _connect(acceptor)
        other.send(MessageKind.HELLO, _hello(model, 2))
        self.node, _ = acceptor.links.result(TIMEOUT_S)
        other.close()
        self._acceptor = acceptor

    def receive(self) -> tuple[MessageKind, str]:
        """The next message of the node."""
        found: list[Message] = []

        def has_come() -> bool:
            said = self._acceptor.take()
            found.extend(message for node, message in said if node is self.node and isinstance(message, Message))
            return bool(found)

        assert wait_until(has_come)
        return found[0].kind, found[0].text


def test_a_node_that_is_told_to_stop(acceptor: Acceptor, model: str) -> None:
    zero = _NodeZero(acceptor, model)
    agent = NodeAgent(1, zero.link, LocalWorkers(make_config(model), {}, []))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        code = thread.submit(agent.run)
        agent.stop()
        assert zero.receive() == (MessageKind.LOSS, "node 1 (127.0.0.1) was told to stop by a signal")
        zero.node.send(MessageKind.END, b"as it said")
        assert code.result(TIMEOUT_S) == 0
    zero.link.close()


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("a worker died", 1), (None, 1)])
def test_a_node_ends_as_node_zero_does(reason: str | None, code: int, acceptor: Acceptor, model: str) -> None:
    zero = _NodeZero(acceptor, model)
    agent = NodeAgent(1, zero.link, LocalWorkers(make_config(model), {}, []))
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(agent.run)
        if reason is None:
            acceptor.close()
        else:
            zero.node.send(MessageKind.END, reason.encode())
        assert found.result(TIMEOUT_S) == code
    zero.link.close()


@pytest.mark.parametrize("kind", [kind for kind in RecordKind if kind.name in ("CALL", "RESULT", "PLAIN_RESULT")])
def test_a_node_hands_its_workers_no_pickles(kind: RecordKind, acceptor: Acceptor, model: str) -> None:
    zero = _NodeZero(acceptor, model)
    agent = NodeAgent(1, zero.link, LocalWorkers(make_config(model), {}, []))
    zero.node.send(MessageKind.ORDER, struct.pack("<Bq", kind, 7) + pickle.dumps(None))
    assert agent.run() == 1
    assert agent._orders.empty()
    zero.link.close()


# ---- flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nnodes": 0, "node_rank": 0}, "--nnodes must be at least 1, got 0"),
        ({"nnodes": 2}, r"`--nnodes 2` must evenly divide the total world size \(3\)"),
        ({"node_rank": 3}, "`--node-rank` must be between 0 and 2; got `--node-rank 3`"),
        ({"nnodes": 1}, "`--node-rank` must be between 0 and 0; got `--node-rank 1`"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2 is not supported with --nnodes 3"),
        (
            {"distributed_executor_backend": "ray"},
            "nnodes > 1 can only be set when distributed executor backend is mp",
        ),
        ({"distributed_executor_backend": "uni"}, "--distributed-executor-backend uni runs one worker"),
        ({"master_port": 0}, "--master-port must be between 1 and 65535, got 0"),
    ],
)
def test_flags_that_contradict_each_other(
    fields: dict[str, Any], message: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(_args(model), **fields).create_engine_config()


def test_each_machine_needs_its_share_of_npus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "probe_npus", lambda: NpuProbe(3, "Ascend910B3"))
    args = EngineArgs(model="", tensor_parallel_size=8, nnodes=2, node_rank=1)
    text = r"--nnodes 2 with --tensor-parallel-size 8: 4 NPUs are needed and this container has 3\."
    with pytest.raises(ConfigError, match=text):
        parallel.parallel_config(args, make_arch(), "npu")
    args = dataclasses.replace(args, tensor_parallel_size=3, pipeline_parallel_size=2)
    assert parallel.parallel_config(args, make_arch(num_kv_heads=3), "npu").local_world_size == 3


def test_engines_are_on_node_zero(model: str) -> None:
    config: EngineConfig = _args(model).create_engine_config()
    assert (config.parallel.nnodes, config.parallel.local_world_size) == (3, 1)
    with pytest.raises(ConfigError, match="--node-rank 1: the engine is on node 0"):
        create_executor(config)


def test_the_start_of_a_node_survives_its_way(model: str) -> None:
    start = make_start(_args(model))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=NodeStart) == start
