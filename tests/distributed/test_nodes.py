"""Nodes that come to node 0, or try to: over real sockets, without workers."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import socket
import threading
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
from ascend_vllm.executor.nodes.handshake import SessionKeys, introduce
from ascend_vllm.executor.nodes.link import Hello, MessageKind, NodeLink
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


@pytest.fixture
def door(model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAcceptor]:
    """Of three nodes."""
    monkeypatch.setenv("ASCEND_VLLM_NODE_WAIT_S", str(TIMEOUT_S))
    config = make_config(model, pipeline_parallel_size=3, nnodes=3, master_port=free_port())
    door = NodeAcceptor(config)
    yield door
    door.close()


def _port(door: NodeAcceptor) -> int:
    return int(door._socket.getsockname()[1])


def _connect(door: NodeAcceptor) -> socket.socket:
    return socket.create_connection(("127.0.0.1", _port(door)))


def _knock(door: NodeAcceptor) -> NodeLink:
    """A connection of one who knows the secret."""
    sock = _connect(door)
    return NodeLink(sock, introduce(sock, SECRET.encode(), TIMEOUT_S), TIMEOUT_S)


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
    fields: dict[str, Any], message: str, door: NodeAcceptor, model: str
) -> None:
    link = _knock(door)
    link.send(MessageKind.HELLO, _hello(model, **({"node_rank": 2} | fields)))
    answer = link.receive(TIMEOUT_S)
    assert answer.kind == MessageKind.REFUSAL
    with pytest.raises(ConfigError, match=message) as caught:
        door.wait()
    assert str(caught.value) == answer.text
    link.close()


def test_another_version_need_not_know_todays_fields(door: NodeAcceptor) -> None:
    link = _knock(door)
    link.send(MessageKind.HELLO, msgspec.msgpack.encode({"version": "9", "node_rank": 1, "colour": "red"}))
    assert "has ascend-vllm 9" in link.receive(TIMEOUT_S).text
    link.close()


def test_who_is_no_node_is_ignored(
    door: NodeAcceptor, model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    browser, *strangers = [_connect(door) for _ in range(3)]
    browser.sendall(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n")
    strangers[0].sendall(b"\x80\x04whatever, as a record with a pickle")
    strangers[1].sendall(b"no msgpack")
    # closed, and not one byte was answered
    for stranger in (browser, *strangers):
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
        stranger.close()
    assert wait_until(lambda: sum("is no node" in text for text in caplog.messages) >= 3)
    nodes = [_knock(door) for _ in range(2)]
    for node_rank, link in enumerate(nodes, start=1):
        link.send(MessageKind.HELLO, _hello(model, node_rank))
    for link in door.wait():
        link.close()
    for link in nodes:
        link.close()


def test_a_rank_is_for_one_node_that_lives(door: NodeAcceptor, model: str) -> None:
    first, second, third, late = (_knock(door) for _ in range(4))
    first.send(MessageKind.HELLO, _hello(model, 1))
    assert wait_until(lambda: 1 in door._links)
    second.send(MessageKind.HELLO, _hello(model, 1))
    assert second.receive(TIMEOUT_S).text.startswith("--node-rank 1 is there already. It is the one at 127.0.0.1.")
    # one that was started again takes its place
    first.close()
    place = door._links[1]
    assert wait_until(place.is_lost)
    third.send(MessageKind.HELLO, _hello(model, 1))
    assert wait_until(lambda: door._links[1] is not place)
    last = _knock(door)
    last.send(MessageKind.HELLO, _hello(model, 2))
    links = door.wait()
    late.send(MessageKind.HELLO, _hello(model, 2))
    assert "--node-rank 2 is there already" in late.receive(TIMEOUT_S).text
    for link in (*links, second, third, late, last):
        link.close()


def test_nodes_are_not_waited_for_without_end(
    door: NodeAcceptor, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_VLLM_NODE_WAIT_S", "0.2")
    link = _knock(door)
    link.send(MessageKind.HELLO, _hello(model, 1))
    assert wait_until(lambda: 1 in door._links)
    place = rf"--master-addr 127.0.0.1 --master-port {_port(door)}"
    with pytest.raises(ConfigError, match=f"node 2 of --nnodes 3 did not come to {place} within 0.2 seconds"):
        door.wait()
    door.close()
    # who waits with node 0 is told
    assert link.receive(TIMEOUT_S).text.startswith("node 0 does not start")
    link.close()


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
    door: NodeAcceptor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    start = make_start(_args("/absent/model", master_port=_port(door)))
    assert agent.run_node(start, lambda _: None) == 2
    with pytest.raises(ConfigError, match=r"node 1 \(127.0.0.1\) cannot take part: .*/absent/model"):
        door.wait()
    assert any("/absent/model" in record.message and record.name.endswith("nodes.agent") for record in caplog.records)


def test_a_refused_node_says_why(door: NodeAcceptor, model: str) -> None:
    start = make_start(_args(model, master_port=_port(door), pipeline_parallel_size=6))
    assert start.config is not None
    with pytest.raises(ConfigError, match=r"Node 0 \(127.0.0.1\) refuses this node: .*--pipeline-parallel-size 6"):
        agent.run_node(start, lambda _: None)


@contextlib.contextmanager
def _agent(model: str, tmp_path: pathlib.Path) -> Iterator[tuple[NodeAgent, NodeLink]]:
    """An agent without workers, and node 0's end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        keys = SessionKeys(b"one", b"other")
        outer = NodeLink(socket.create_connection(server.getsockname()), keys, TIMEOUT_S)
        inner = NodeLink(server.accept()[0], SessionKeys(keys.receiving, keys.sending), TIMEOUT_S)
    yield NodeAgent(1, outer, LocalWorkers(make_config(model), {}, [])), inner
    inner.close()


def test_a_node_that_is_told_to_stop(model: str, tmp_path: pathlib.Path) -> None:
    codes: list[int] = []
    with _agent(model, tmp_path) as (agent, link):
        thread = threading.Thread(target=lambda: codes.append(agent.run()))
        thread.start()
        agent.stop()
        message = link.receive(TIMEOUT_S)
        assert (message.kind, message.text) == (MessageKind.LOSS, "node 1 (127.0.0.1) was told to stop by a signal")
        link.finish(MessageKind.END, message.text)
        thread.join(TIMEOUT_S)
    assert codes == [0]


@pytest.mark.parametrize(("reason", "code"), [("", 0), ("a worker died", 1), (None, 1)])
def test_a_node_ends_as_node_zero_does(reason: str | None, code: int, model: str, tmp_path: pathlib.Path) -> None:
    codes: list[int] = []
    with _agent(model, tmp_path) as (agent, link):
        thread = threading.Thread(target=lambda: codes.append(agent.run()))
        thread.start()
        if reason is None:
            link.close()
        else:
            link.finish(MessageKind.END, reason)
        thread.join(TIMEOUT_S)
    assert codes == [code]


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
