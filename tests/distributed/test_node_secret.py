"""Who comes to node 0 without knowing the secret of the nodes, or listens in its place: over real sockets."""

from __future__ import annotations

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

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.args.engine_args import EngineArgs
from ascend_vllm.config.node import NodeStart, model_digest
from ascend_vllm.config.node_secret import make_secret, read_secret, require_secret
from ascend_vllm.errors import ConfigError, EngineDeadError
from ascend_vllm.executor.base import create_executor
from ascend_vllm.executor.local_workers import LocalWorkers
from ascend_vllm.executor.nodes import acceptor, agent
from ascend_vllm.executor.nodes.acceptor import MAX_STRANGERS, NodeAcceptor
from ascend_vllm.executor.nodes.agent import NodeAgent
from ascend_vllm.executor.nodes.handshake import PROTOCOL_VERSION, SessionKeys, introduce
from ascend_vllm.executor.nodes.link import Hello, LinkLostError, MessageKind, NodeLink
from ascend_vllm.executor.wire import RecordKind
from tests.server import ROOT, free_port, wait_until
from tests.tiny_models import tiny_model
from tests.worker.worker_driver import make_config

# a guard: everything here takes milliseconds
TIMEOUT_S = 60.0
SECRET = "a secret of the nodes of a test"
# sizes of what is said before a node is known: see `handshake`
GREETING_BYTES, PROOF_BYTES = 49, 32


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_VLLM_NODE_SECRET", SECRET)
    monkeypatch.setenv("ASCEND_VLLM_NODE_WAIT_S", str(TIMEOUT_S))


@pytest.fixture
def model() -> str:
    return tiny_model("llama-biases")


@pytest.fixture
def door(model: str) -> Iterator[NodeAcceptor]:
    """Of two nodes."""
    door = NodeAcceptor(make_config(model, tensor_parallel_size=2, nnodes=2, master_port=free_port()))
    yield door
    door.close()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    return caplog


def _port(door: NodeAcceptor) -> int:
    return int(door._socket.getsockname()[1])


def _connect(door: NodeAcceptor) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", _port(door)))
    sock.settimeout(TIMEOUT_S)
    return sock


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        assert part, data
        data += part
    return data


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


def _node(door: NodeAcceptor, secret: str = SECRET) -> NodeLink:
    sock = _connect(door)
    try:
        return NodeLink(sock, introduce(sock, secret.encode(), TIMEOUT_S), TIMEOUT_S)
    except ConfigError:
        sock.close()
        raise


def _assert_true_node_is_taken(door: NodeAcceptor, model: str) -> None:
    link = _node(door)
    link.send(MessageKind.HELLO, _hello(model))
    (taken,) = door.wait()
    for end in (link, taken):
        end.close()


def _in_old_framing(kind: int, contents: bytes) -> bytes:
    """A message as it was before messages had codes: what an impostor that knows everything public would send."""
    return struct.pack("<BIQ", kind, 1, len(contents)) + contents


class _Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


# ---- strangers at node 0 -----------------------------------------------------------------------------------


def test_an_impostor_with_public_facts_is_refused(door: NodeAcceptor, model: str) -> None:
    """It was taken for node 1, and node 0 unpickled what it answered."""
    with _connect(door) as impostor:
        impostor.sendall(_in_old_framing(0xA5, _hello(model)))
        assert _rest(impostor) == b""
    with pytest.raises(ConfigError, match="it has another secret"):
        _node(door, "what an impostor may try")
    _assert_true_node_is_taken(door, model)


def test_no_kind_of_message_of_a_stranger_is_unpickled(
    door: NodeAcceptor, model: str, tmp_path: pathlib.Path
) -> None:
    trap = tmp_path / "sprung"
    pickled = pickle.dumps(_Trap(trap))
    records = [struct.pack("<Bq", kind, 0) + pickled for kind in RecordKind]
    for kind in (0xA5, *MessageKind):
        for contents in (pickled, *records):
            with _connect(door) as stranger:
                stranger.sendall(_in_old_framing(kind, contents))
                assert _rest(stranger) == b""
    # and behind the first words of a node
    with _connect(door) as stranger:
        stranger.sendall(b"ascend-vllm node" + bytes((PROTOCOL_VERSION,)) + os.urandom(32))
        _read(stranger, GREETING_BYTES)
        stranger.sendall(pickled.ljust(PROOF_BYTES, b"\0"))
        assert _rest(stranger) == bytes(1 + PROOF_BYTES)
    _assert_true_node_is_taken(door, model)
    assert not trap.exists()


def _overheard(door: NodeAcceptor, model: str) -> list[bytes]:
    """What a true node says to node 0, by one who sits between them."""
    with socket.create_server(("127.0.0.1", 0)) as middle:
        near = socket.create_connection(middle.getsockname())
        inner = middle.accept()[0]
    outer = _connect(door)
    said: list[bytes] = []

    def relay() -> None:
        while True:
            for source in select.select([inner, outer], [], [])[0]:
                if not (data := source.recv(65536)):
                    return
                if source is inner:
                    said.append(data)
                (outer if source is inner else inner).sendall(data)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    link = NodeLink(near, introduce(near, SECRET.encode(), TIMEOUT_S), TIMEOUT_S)
    link.send(MessageKind.HELLO, _hello(model, problem="it is here to be overheard"))
    assert link.receive(TIMEOUT_S).kind == MessageKind.REFUSAL
    link.close()
    thread.join(TIMEOUT_S)
    inner.close()
    outer.close()
    return said


def test_what_was_overheard_is_of_no_use(door: NodeAcceptor, model: str) -> None:
    """The bytes of a true node's conversation, said again; the secret is not among them."""
    said = b"".join(_overheard(door, model))
    assert SECRET.encode() not in said
    assert len(said) > GREETING_BYTES + PROOF_BYTES
    other = NodeAcceptor(make_config(model, tensor_parallel_size=2, nnodes=2, master_port=free_port()))
    try:
        for again in (said, said[: GREETING_BYTES + PROOF_BYTES]):
            with _connect(other) as stranger:
                stranger.sendall(again)
                _read(stranger, GREETING_BYTES)
                assert _rest(stranger) in (b"", bytes(1 + PROOF_BYTES))
        _assert_true_node_is_taken(other, model)
    finally:
        other.close()


def test_node_zero_does_not_answer_its_own_questions(door: NodeAcceptor, model: str) -> None:
    """One who says what node 0 says, on one connection or over two of them, learns no proof."""
    with _connect(door) as mirror, _connect(door) as second:
        mirror.sendall(b"ascend-vllm node" + bytes((PROTOCOL_VERSION,)) + os.urandom(32))
        question = _read(mirror, GREETING_BYTES)
        second.sendall(question)
        # the other connection's question is as good as a proof to whoever knows none
        mirror.sendall(_read(second, GREETING_BYTES)[-PROOF_BYTES:])
        second.sendall(question[-PROOF_BYTES:])
        assert _rest(mirror) == bytes(1 + PROOF_BYTES)
        assert _rest(second) == bytes(1 + PROOF_BYTES)
    _assert_true_node_is_taken(door, model)


def test_strangers_of_another_version_do_not_end_the_start(
    door: NodeAcceptor, model: str, log: pytest.LogCaptureFixture
) -> None:
    """The Hello of anybody with another version ended node 0."""
    with _connect(door) as old:
        old.sendall(_in_old_framing(0xA5, _hello(model, version="0.0.0")))
        assert _rest(old) == b""
    with _connect(door) as new:
        new.sendall(b"ascend-vllm node" + bytes((PROTOCOL_VERSION + 1,)) + os.urandom(32))
        # it gets to know that the versions differ
        assert _read(new, GREETING_BYTES)[16] == PROTOCOL_VERSION
        assert _rest(new) == b""
    text = f"it speaks version {PROTOCOL_VERSION + 1} of the nodes' protocol, and here is version {PROTOCOL_VERSION}"
    assert wait_until(lambda: any(text in message for message in log.messages))
    _assert_true_node_is_taken(door, model)


def test_silent_strangers_keep_no_node_out(door: NodeAcceptor, model: str, log: pytest.LogCaptureFixture) -> None:
    """Each had a thread for ten seconds, and a line in the log."""
    before = threading.active_count()
    with contextlib.ExitStack() as sockets:
        strangers = [sockets.enter_context(_connect(door)) for _ in range(200)]
        for stranger in strangers[::2]:
            with contextlib.suppress(OSError):
                stranger.sendall(b"ascend")
        assert wait_until(lambda: len(door._strangers) == MAX_STRANGERS)
        assert threading.active_count() <= before
        _assert_true_node_is_taken(door, model)
        # those that had to go are closed
        assert all(_rest(stranger) == b"" for stranger in strangers[: 200 - MAX_STRANGERS - 1])
    assert len({record.message for record in log.records if "is no node" in record.message}) < 20


def test_a_stranger_has_no_time_to_lose(door: NodeAcceptor, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte after another does not keep a connection open."""
    monkeypatch.setattr(acceptor, "STRANGER_TIMEOUT_S", 0.5)
    slow = _connect(door)
    start = time.monotonic()
    with pytest.raises(OSError):
        for byte in b"ascend-vllm node" * 1000:
            slow.sendall(bytes((byte,)))
            # closed connections answer at the next byte
            time.sleep(0.1)
            if time.monotonic() - start > TIMEOUT_S:
                pytest.fail("it is still heard")
    slow.close()
    _assert_true_node_is_taken(door, model)


def test_a_flood_is_cut_at_the_first_bytes(door: NodeAcceptor, model: str) -> None:
    """A greeting of up to a megabyte was read."""
    flood = os.urandom(1 << 20)
    for first in (b"", b"ascend-vllm node" + bytes((PROTOCOL_VERSION,))):
        stranger = _connect(door)
        sent = 0
        with contextlib.suppress(ConnectionError):
            stranger.sendall(first)
            # more than the buffers of both ends hold
            for _ in range(64):
                sent += stranger.send(flood)
        assert sent < 64 << 20
        stranger.close()
    assert wait_until(lambda: not door._strangers)
    _assert_true_node_is_taken(door, model)


# ---- messages of a connection ------------------------------------------------------------------------------


@contextlib.contextmanager
def _pair() -> Iterator[tuple[NodeLink, NodeLink, socket.socket]]:
    """Ends of a connection, and the socket of the first."""
    keys = SessionKeys(b"one", b"other")
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock = socket.create_connection(server.getsockname())
        other = server.accept()[0]
    first, second = NodeLink(sock, keys, TIMEOUT_S), NodeLink(other, SessionKeys(b"other", b"one"), TIMEOUT_S)
    try:
        yield first, second, sock
    finally:
        first.close()
        second.close()


def _as_sent(link: NodeLink, contents: bytes) -> bytes:
    return link._piece(MessageKind.ORDER, True, 0, contents)


@pytest.mark.parametrize("position", [0, 1, 2, 6, 9, 12, -1])
def test_a_changed_message_is_not_taken(position: int) -> None:
    with _pair() as (first, second, sock):
        changed = bytearray(_as_sent(first, b"contents"))
        changed[position] ^= 1
        # whoever waits for a longer one gets it
        sock.sendall(changed + bytes(1 << 21))
        with pytest.raises(LinkLostError, match="no message of this connection"):
            second.receive(TIMEOUT_S)


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0)])
def test_messages_are_taken_once_and_in_their_order(order: tuple[int, ...]) -> None:
    with _pair() as (first, second, sock):
        pieces = [_as_sent(first, bytes((number,))) for number in range(2)]
        sock.sendall(b"".join(pieces[number] for number in order))
        with pytest.raises(LinkLostError, match="no message of this connection"):
            for _ in order:
                second.receive(TIMEOUT_S)


def test_a_message_does_not_come_back() -> None:
    with _pair() as (first, second, sock):
        first.send(MessageKind.ORDER, b"contents")
        assert second.receive(TIMEOUT_S).contents == b"contents"
        echo = NodeLink(sock.dup(), SessionKeys(b"one", b"other"), TIMEOUT_S)
        second._socket.sendall(_as_sent(echo, b"contents"))
        with pytest.raises(LinkLostError, match="no message of this connection"):
            first.receive(TIMEOUT_S)
        echo.close()


def test_long_messages_go_in_pieces() -> None:
    contents = [os.urandom(size) for size in (0, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5 << 20)]
    with _pair() as (first, second, _):
        thread = threading.Thread(
            target=lambda: [first.send(MessageKind.ANSWER, part, number) for number, part in enumerate(contents)]
        )
        thread.start()
        for number, part in enumerate(contents):
            message = second.receive(TIMEOUT_S)
            assert (message.kind, message.rank, message.contents) == (MessageKind.ANSWER, number, part)
        thread.join()


def test_a_node_that_knows_the_secret_gets_nothing_unpickled(model: str, tmp_path: pathlib.Path) -> None:
    """Node 0 takes no pickle of a node that has the secret, and runs no function that it names."""
    port = free_port()
    config = make_config(model, tensor_parallel_size=2, nnodes=2, master_port=port, distributed_executor_backend="mp")
    trap = tmp_path / "sprung"

    def answer() -> None:
        start = NodeStart(1, 2, "127.0.0.1", port, 2, 1, None, None)
        with contextlib.closing(agent.connect(start, SECRET.encode(), TIMEOUT_S)) as link:
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


@pytest.mark.parametrize("kind", [kind for kind in RecordKind if kind.name in ("CALL", "RESULT", "PLAIN_RESULT")])
def test_a_node_hands_its_workers_no_pickles(kind: RecordKind, model: str) -> None:
    with _pair() as (zero, of_node, _):
        agent = NodeAgent(1, of_node, LocalWorkers(make_config(model), {}, []))
        codes: list[int] = []
        thread = threading.Thread(target=lambda: codes.append(agent.run()))
        thread.start()
        zero.send(MessageKind.ORDER, struct.pack("<Bq", kind, 7) + pickle.dumps(None))
        thread.join(TIMEOUT_S)
        assert codes == [1]
        assert agent._orders.empty()


# ---- whoever listens in the place of node 0 ----------------------------------------------------------------


@contextlib.contextmanager
def _listener(*answers: bytes | None) -> Iterator[int]:
    """Port of one who gives these answers to what a node says; None: what it said itself."""

    def serve() -> None:
        connection = server.accept()[0]
        for answer in answers:
            heard = connection.recv(4096)
            connection.sendall(heard if answer is None else answer)
        with contextlib.suppress(ConnectionError):
            connection.recv(1)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        thread.join(TIMEOUT_S)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((b"HTTP/1.1 400 Bad Request\r\n",), "is no node of ours: what it says is no message of ascend-vllm"),
        ((b"ascend-vllm node" + bytes(33),), "it speaks version 0 of the nodes' protocol, and here is version 1"),
        ((b"ascend-vllm node\x01" + bytes(32), b"\x01" + bytes(32)), "does not prove that it knows the secret"),
        # with the very words of the node: its own question and its own proof
        ((None, b"\x01" + bytes(32)), "does not prove that it knows the secret"),
        ((b"ascend-vllm node\x01" + bytes(32), bytes(33)), "refuses this node: it has another secret"),
    ],
)
def test_a_node_tells_nothing_to_somebody_else(answers: tuple[bytes | None, ...], message: str) -> None:
    with (
        _listener(*answers) as port,
        socket.create_connection(("127.0.0.1", port)) as sock,
        pytest.raises(ConfigError, match=message),
    ):
        introduce(sock, SECRET.encode(), TIMEOUT_S)


def test_a_node_does_not_believe_its_own_proof() -> None:
    """Whoever sends back all that a node says."""
    proofs: list[bytes] = []

    def reflect() -> None:
        connection = server.accept()[0]
        connection.sendall(_read(connection, GREETING_BYTES))
        proofs.append(_read(connection, PROOF_BYTES))
        connection.sendall(b"\x01" + proofs[0])
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=reflect)
        thread.start()
        refused = pytest.raises(ConfigError, match="does not prove that it knows the secret")
        with socket.create_connection(server.getsockname()) as sock, refused:
            introduce(sock, SECRET.encode(), TIMEOUT_S)
        thread.join(TIMEOUT_S)
    assert len(proofs) == 1


def test_a_node_that_has_no_turn_tries_again(door: NodeAcceptor, model: str) -> None:
    """Node 0 may have closed its connection for a stranger's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        start = NodeStart(1, 2, "127.0.0.1", server.getsockname()[1], 2, 1, None, None)
        links: list[NodeLink] = []
        thread = threading.Thread(target=lambda: links.append(agent.connect(start, SECRET.encode(), TIMEOUT_S)))
        thread.start()
        server.accept()[0].close()
        # the second time it is let through
        inner, outer = server.accept()[0], _connect(door)
        inner.sendall(_forward(inner, outer, GREETING_BYTES, GREETING_BYTES))
        inner.sendall(_forward(inner, outer, PROOF_BYTES, 1 + PROOF_BYTES))
        thread.join(TIMEOUT_S)
    (link,) = links
    for end in (link, inner, outer):
        end.close()


def _forward(source: socket.socket, target: socket.socket, count: int, answer: int) -> bytes:
    target.sendall(_read(source, count))
    return _read(target, answer)


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
    door = NodeAcceptor(make_config(model, tensor_parallel_size=2, nnodes=2, master_port=free_port()))
    try:
        found = re.search(r"export ASCEND_VLLM_NODE_SECRET=([0-9a-f]{64})\n", capsys.readouterr().err)
        assert found is not None
        monkeypatch.setenv("ASCEND_VLLM_NODE_SECRET", found[1])
        # not in the log, which is kept and sent on
        assert not any(found[1] in message for message in log.messages)
        link = _node(door, found[1])
        link.send(MessageKind.HELLO, _hello(model))
        (taken,) = door.wait()
        for end in (link, taken):
            end.close()
    finally:
        door.close()
