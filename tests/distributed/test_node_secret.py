"""Attackers without the nodes' secret, who connect to node 0 or listen in its place: over real sockets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import pathlib
import pickle
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.node import NodeStart, model_digest
from ascend_vllm.config.node_secret import make_secret, read_secret, require_secret
from ascend_vllm.errors import ConfigError, EngineDeadError
from ascend_vllm.executor.base import create_executor
from ascend_vllm.executor.nodes import agent, link
from ascend_vllm.executor.nodes.acceptor import MAX_UNAUTHENTICATED, NodeAcceptor
from ascend_vllm.executor.nodes.link import Hello, LinkLostError, LinkToZero, Message, MessageKind, frames_of
from ascend_vllm.executor.wire import RecordKind
from tests.server import ROOT, free_port, wait_until
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

# a guard: everything here takes milliseconds
TIMEOUT_S = 60.0
SECRET = "a secret of the nodes of a test"


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_VLLM_NODE_SECRET", SECRET)
    monkeypatch.setenv("ASCEND_VLLM_NODE_WAIT_S", str(TIMEOUT_S))


@pytest.fixture
def model() -> str:
    return tiny_model("llama-biases")


class Acceptor(NodeAcceptor):
    """Of two nodes, waiting for the other one in a thread."""

    def __init__(self, model: str) -> None:
        config = make_config(model, tensor_parallel_size=2, nnodes=2, master_port=free_port())
        super().__init__(config)
        self.port = config.parallel.master_port
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self.links = self._thread.submit(self.wait)

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


@pytest.fixture
def acceptor(model: str) -> Iterator[Acceptor]:
    acceptor = Acceptor(model)
    yield acceptor
    acceptor.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    return caplog


def _connect(acceptor: Acceptor) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", acceptor.port))
    sock.settimeout(TIMEOUT_S)
    return sock


def _rest(sock: socket.socket) -> bytes:
    """All that comes before the other end closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            data += part
    sock.close()
    return data


def _hello(model: str, **fields: Any) -> bytes:
    """Of node 1; every fact in it is public."""
    hello = Hello(ascend_vllm.__version__, 1, 2, 2, 1, "cpu", model_digest(model))
    return msgspec.msgpack.encode(msgspec.structs.replace(hello, **fields))


def _node(port: int, secret: str = SECRET) -> LinkToZero:
    link = LinkToZero(("127.0.0.1", port), secret.encode(), TIMEOUT_S)
    try:
        link.open(TIMEOUT_S)
    except BaseException:
        link.close()
        raise
    return link


def _assert_true_node_is_taken(acceptor: Acceptor, model: str) -> None:
    link = _node(acceptor.port)
    link.send(MessageKind.HELLO, _hello(model))
    (taken,) = acceptor.links.result(TIMEOUT_S)
    assert taken.node_rank == 1
    link.close()


def _start(port: int) -> NodeStart:
    return NodeStart(1, 2, "127.0.0.1", port, 2, 1, None, None)


class _Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


# ---- unauthenticated peers of node 0 --------------------------------------------------------------------------


def test_an_impostor_with_public_facts_is_refused(acceptor: Acceptor, model: str) -> None:
    """It was once accepted as node 1, and node 0 unpickled its messages."""
    # without any key, as zmq's sockets are
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    impostor = context.socket(zmq.DEALER)
    impostor.connect(f"tcp://127.0.0.1:{acceptor.port}")
    # which ends if it has been refused already
    with contextlib.suppress(zmq.Again):
        impostor.send_multipart(frames_of(MessageKind.HELLO, _hello(model)), zmq.NOBLOCK)
    with pytest.raises(ConfigError, match=r"Node 0 \(127.0.0.1\) refuses this node: it has another secret"):
        agent.connect(_start(acceptor.port), b"what an impostor may try", TIMEOUT_S)
    assert not impostor.poll(0)
    context.destroy(0)
    assert not acceptor._nodes
    _assert_true_node_is_taken(acceptor, model)


def test_nothing_of_an_unauthenticated_peer_is_unpickled(
    acceptor: Acceptor, model: str, tmp_path: pathlib.Path
) -> None:
    trap = tmp_path / "sprung"
    pickled = pickle.dumps(_Trap(trap))
    # also behind zmq's greeting, as it is with CURVE, and in a frame of it
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    for first in (
        b"",
        greeting,
        greeting + b"\x04\xc8\x05HELLO" + bytes(194),
        greeting + b"\0" + bytes((len(pickled),)),
    ):
        with _connect(acceptor) as peer:
            with contextlib.suppress(OSError):
                peer.sendall(first + pickled)
                peer.shutdown(socket.SHUT_WR)
            assert len(_rest(peer)) <= 64
    _assert_true_node_is_taken(acceptor, model)
    assert not trap.exists()


def _overheard(acceptor: Acceptor, model: str) -> bytes:
    """Messages of an authentic node to node 0, recorded by a man in the middle."""
    said: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as middle:

        def relay() -> None:
            inner, outer = middle.accept()[0], _connect(acceptor)
            with inner, outer:
                while True:
                    for source in select.select([inner, outer], [], [])[0]:
                        if not (data := source.recv(65536)):
                            return
                        if source is inner:
                            said.append(data)
                        (outer if source is inner else inner).sendall(data)

        thread = threading.Thread(target=relay)
        thread.start()
        link = _node(middle.getsockname()[1])
        link.send(MessageKind.HELLO, _hello(model, problem="it is here to be overheard"))
        assert link.receive(TIMEOUT_S).kind == MessageKind.REFUSAL
        link.close()
        thread.join(TIMEOUT_S)
    return b"".join(said)


def test_what_was_overheard_is_of_no_use(acceptor: Acceptor, model: str) -> None:
    """Replayed bytes of an authentic node open no connection; they contain neither the secret nor plain messages."""
    said = _overheard(acceptor, model)
    assert SECRET.encode() not in said
    assert b"overheard" not in said and ascend_vllm.__version__.encode() not in said
    assert len(said) > 500
    other = Acceptor(model)
    try:
        with _connect(other) as peer:
            peer.sendall(said)
            answer = _rest(peer)
        # greeting and the answer to the first words, which are fresh each time; nothing behind the second ones
        assert len(answer) < 300
        assert not other._nodes
        _assert_true_node_is_taken(other, model)
    finally:
        other.close()


def test_silent_peers_keep_no_node_out(acceptor: Acceptor, model: str, log: pytest.LogCaptureFixture) -> None:
    """Each once took a thread for ten seconds, and a line in the log."""
    before = threading.active_count()
    with contextlib.ExitStack() as sockets:
        peers = [sockets.enter_context(_connect(acceptor)) for _ in range(200)]
        for peer in peers[::2]:
            with contextlib.suppress(OSError):
                peer.sendall(b"\xff" + bytes(8))
        assert wait_until(lambda: len(acceptor._peers) == MAX_UNAUTHENTICATED)
        assert threading.active_count() <= before
        # those that had to go are closed
        assert all(len(_rest(peer)) <= 64 for peer in peers[: 200 - MAX_UNAUTHENTICATED])
        _assert_true_node_is_taken(acceptor, model)
    assert len({record.message for record in log.records if "is no node" in record.message}) < 20


def test_an_unauthenticated_peer_has_limited_time(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte after another does not keep a connection open."""
    monkeypatch.setattr(link, "HANDSHAKE_TIMEOUT_S", 0.5)
    acceptor = Acceptor(model)
    slow = _connect(acceptor)
    start = time.monotonic()
    with pytest.raises(OSError):
        for byte in b"\xff" + bytes(1000):
            slow.sendall(bytes((byte,)))
            # closed connections answer at the next byte
            time.sleep(0.1)
            if time.monotonic() - start > TIMEOUT_S:
                pytest.fail("it is still heard")
    slow.close()
    _assert_true_node_is_taken(acceptor, model)
    acceptor.close()


def test_a_flood_is_cut_at_the_first_bytes(acceptor: Acceptor, model: str) -> None:
    """Greetings of up to a megabyte were once read."""
    flood = os.urandom(1 << 20)
    for first in (b"", b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)):
        peer = _connect(acceptor)
        sent = 0
        with contextlib.suppress(ConnectionError):
            peer.sendall(first)
            # more than the buffers of both ends hold
            for _ in range(64):
                sent += peer.send(flood)
        assert sent < 64 << 20
        peer.close()
    assert wait_until(lambda: not acceptor._peers)
    _assert_true_node_is_taken(acceptor, model)


# ---- messages of a connection ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [9, 40, -1])
def test_a_changed_message_is_not_taken(where: int, acceptor: Acceptor, model: str) -> None:
    """A byte of a message is changed in transit: the connection closes, and the message is not parsed."""
    with socket.create_server(("127.0.0.1", 0)) as middle:
        tamper = threading.Event()

        def relay() -> None:
            inner, outer = middle.accept()[0], _connect(acceptor)
            with inner, outer:
                while True:
                    for source in select.select([inner, outer], [], [])[0]:
                        data = bytearray(source.recv(65536))
                        if not data:
                            return
                        if source is inner and tamper.is_set():
                            data[where] ^= 1
                        (outer if source is inner else inner).sendall(data)

        thread = threading.Thread(target=relay)
        thread.start()
        node = _node(middle.getsockname()[1])
        node.send(MessageKind.HELLO, _hello(model))
        (of_zero,) = acceptor.links.result(TIMEOUT_S)
        tamper.set()
        node.send(MessageKind.ANSWER, b"contents of a message", 1)
        said: list[object] = []

        def has_come() -> bool:
            said.extend(acceptor.take())
            return bool(said)

        assert wait_until(has_come)
        assert of_zero.has_ended.is_set()
        assert not any(isinstance(message, Message) for _, message in said)
        node.close()
        thread.join(TIMEOUT_S)


def test_long_messages_go_in_frames(acceptor: Acceptor, model: str) -> None:
    contents = [os.urandom(size) for size in (0, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 5 << 20)]
    node = _node(acceptor.port)
    node.send(MessageKind.HELLO, _hello(model))
    (of_zero,) = acceptor.links.result(TIMEOUT_S)
    for number, part in enumerate(contents):
        node.send(MessageKind.ANSWER, part, number)
        of_zero.send(MessageKind.ORDER, part)
    said: list[Message] = []

    def have_come() -> bool:
        said.extend(message for _, message in acceptor.take() if isinstance(message, Message))
        return len(said) == len(contents)

    assert wait_until(have_come)
    assert [(message.rank, message.contents) for message in said] == list(enumerate(contents))
    assert [node.receive(TIMEOUT_S).contents for _ in contents] == contents
    node.close()


def test_a_node_that_knows_the_secret_gets_nothing_unpickled(model: str, tmp_path: pathlib.Path) -> None:
    """Node 0 takes no pickle of a node that has the secret, and runs no function that it names."""
    port = free_port()
    config = make_config(model, tensor_parallel_size=2, nnodes=2, master_port=port, distributed_executor_backend="mp")
    trap = tmp_path / "sprung"

    def answer() -> None:
        with contextlib.closing(agent.connect(_start(port), SECRET.encode(), TIMEOUT_S)) as link:
            link.send(MessageKind.HELLO, _hello(model))
            assert link.receive(TIMEOUT_S).kind == MessageKind.SETUP
            link.send(MessageKind.ANSWER, struct.pack("<Bq", RecordKind.RESULT, 0) + pickle.dumps(_Trap(trap)), 1)
            with contextlib.suppress(LinkLostError):
                link.receive(TIMEOUT_S)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(EngineDeadError, match="what it says cannot be understood"):
        create_executor(config)
    thread.join(TIMEOUT_S)
    assert not trap.exists()


# ---- whoever listens in the place of node 0 ----------------------------------------------------------------


@contextlib.contextmanager
def _listener(answer: bytes) -> Iterator[int]:
    """Port of a listener that answers a node's first message and then echoes everything."""

    def serve() -> None:
        connection = server.accept()[0]
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(answer)
            while heard := connection.recv(4096):
                connection.sendall(heard)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(TIMEOUT_S)


def test_a_node_tells_nothing_to_somebody_else(model: str) -> None:
    with (
        _listener(b"HTTP/1.1 400 Bad Request\r\n") as port,
        pytest.raises(ConfigError, match="is no node of ours: what it says is no message of ascend-vllm"),
    ):
        _node(port)


def test_a_node_does_not_believe_its_own_words(model: str) -> None:
    """A listener that echoes all messages of a node is refused."""
    with _listener(b"") as port, pytest.raises((ConfigError, OSError)):
        _node(port)


def test_a_node_that_has_no_turn_tries_again(acceptor: Acceptor, model: str) -> None:
    """Node 0 may have closed its connection for a peer's."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            server.accept()[0].close()
            # the second time it is let through
            inner, outer = server.accept()[0], _connect(acceptor)
            with inner, outer:
                while True:
                    for source in select.select([inner, outer], [], [])[0]:
                        if not (data := source.recv(65536)):
                            return
                        (outer if source is inner else inner).sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        link = agent.connect(_start(server.getsockname()[1]), SECRET.encode(), TIMEOUT_S)
        link.close()
        thread.join(TIMEOUT_S)
    _assert_true_node_is_taken(acceptor, model)


# ---- where the secret comes from ---------------------------------------------------------------------------


def _file(tmp_path: pathlib.Path, contents: str, mode: int = 0o600) -> str:
    path = tmp_path / "secret"
    path.write_text(contents)
    path.chmod(mode)
    return str(path)


def test_the_file_comes_before_the_variable(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_secret(None) == SECRET.encode()
    assert read_secret(_file(tmp_path, "a secret that is in a file\n")) == b"a secret that is in a file"
    assert "ASCEND_VLLM_NODE_SECRET" not in envs.for_workers()
    monkeypatch.setenv("ASCEND_VLLM_NODE_SECRET", "")
    assert read_secret(None) is None
    text = "--node-rank 3: this node needs the secret .* neither --node-secret-file nor ASCEND_VLLM_NODE_SECRET"
    with pytest.raises(ConfigError, match=text):
        require_secret(None, 3)
    assert len(make_secret()) == 64 and make_secret() != make_secret()


@pytest.mark.parametrize(
    ("contents", "mode", "message"),
    [
        ("a secret that is in a file", 0o640, r"accessible to other users .*mode 0640.* run `chmod 600 .*/secret`"),
        ("a secret that is in a file", 0o604, "accessible to other users"),
        ("a secret that is in a file", 0o620, "accessible to other users"),
        ("too short", 0o600, "has 16 to 4096 bytes, got 9. Make one with `openssl rand -hex 32`"),
        ("", 0o600, "got 0"),
        ("x" * 5000, 0o600, "has 16 to 4096 bytes"),
    ],
)
def test_files_that_are_no_secret(contents: str, mode: int, message: str, tmp_path: pathlib.Path) -> None:
    path = _file(tmp_path, contents, mode)
    with pytest.raises(ConfigError, match=f"^--node-secret-file {re.escape(path)}: .*{message}"):
        read_secret(path)


def test_what_is_no_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(str(tmp_path / "absent"))
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="not a regular file"):
            read_secret(str(path))
    monkeypatch.setenv("ASCEND_VLLM_NODE_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="ASCEND_VLLM_NODE_SECRET: the secret of the nodes has 16") as caught:
        read_secret(None)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("node_rank", [0, 1])
def test_flags_are_checked_before_anything_starts(node_rank: int, model: str, tmp_path: pathlib.Path) -> None:
    path = _file(tmp_path, "a secret that is in a file", 0o644)
    args = EngineArgs(
        model=model, device="cpu", tensor_parallel_size=2, nnodes=2, node_rank=node_rank, node_secret_file=path
    )
    with pytest.raises(ConfigError, match="chmod 600"):
        args.create_engine_config()


def test_a_node_without_a_secret_says_what_to_do(model: str) -> None:
    """At once, and with the exit code of wrong flags."""
    env = {name: value for name, value in os.environ.items() if name != "ASCEND_VLLM_NODE_SECRET"}
    flags = ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "1", "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "serve", model, *flags],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "neither --node-secret-file nor ASCEND_VLLM_NODE_SECRET is given" in done.stderr + done.stdout


def test_node_zero_makes_a_secret_and_prints_it(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ASCEND_VLLM_NODE_SECRET")
    acceptor = Acceptor(model)
    try:
        found = re.search(r"export ASCEND_VLLM_NODE_SECRET=([0-9a-f]{64})\n", capsys.readouterr().err)
        assert found is not None
        monkeypatch.setenv("ASCEND_VLLM_NODE_SECRET", found[1])
        # not in the log, which is kept and sent on
        assert not any(found[1] in message for message in log.messages)
        link = _node(acceptor.port, found[1])
        link.send(MessageKind.HELLO, _hello(model))
        acceptor.links.result(TIMEOUT_S)
        link.close()
    finally:
        acceptor.close()
