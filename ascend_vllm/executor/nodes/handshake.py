"""How two machines of --nnodes prove to each other that they know the same secret, before anything else is said.

    node     name, version of the protocol, 32 random bytes
    node 0   name, version of the protocol, 32 random bytes
    node     HMAC of both with the secret, as a node
    node 0   whether that is right; if so, HMAC of both with the secret, as node 0

Random bytes of both sides make every proof good for one connection, and the roles in it make each side's useless for
the other. The secret itself is never sent. What is sent afterwards is told by keys that are made of the same
(`SessionKeys`). All parts have fixed lengths: a stranger gets no more of this process than a few bytes.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable

import msgspec

from ascend_vllm.errors import ConfigError

_NAME = b"ascend-vllm node"
# raise it when anything changes that is said before a node's package version is known
PROTOCOL_VERSION = 1
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_GREETING_BYTES = len(_NAME) + 1 + _NONCE_BYTES
_REFUSED, _ACCEPTED = b"\x00", b"\x01"
_NO_PROOF = bytes(_PROOF_BYTES)


class SessionKeys(msgspec.Struct, frozen=True):
    """With which the messages of one connection are authenticated, each direction with its own.

    Attributes:
        sending: of what this side sends.
        receiving: of what it receives.
    """

    sending: bytes
    receiving: bytes


class StrangerError(Exception):
    """Who is at the other end is no node of ours; the text says why, as the end of a sentence."""


class Introduction:
    """What both sides have said, and what follows of it with a secret."""

    def __init__(self, secret: bytes, greeting_of_node: bytes, greeting_of_zero: bytes) -> None:
        self._secret = secret
        self._said = greeting_of_node + greeting_of_zero

    def _derive(self, purpose: bytes) -> bytes:
        # the zero byte ends the purpose: none is the beginning of another one
        return hmac.digest(self._secret, purpose + b"\x00" + self._said, "sha256")

    def proof_of_node(self) -> bytes:
        """That a node knows the secret."""
        return self._derive(b"proof of node")

    def proof_of_zero(self) -> bytes:
        """That node 0 knows the secret."""
        return self._derive(b"proof of node 0")

    def keys_of_node(self) -> SessionKeys:
        """Those that a node uses."""
        return SessionKeys(self._derive(b"messages to node 0"), self._derive(b"messages of node 0"))

    def keys_of_zero(self) -> SessionKeys:
        """Those that node 0 uses."""
        keys = self.keys_of_node()
        return SessionKeys(keys.receiving, keys.sending)


def make_greeting() -> bytes:
    """First words of a side, never the same."""
    return _NAME + bytes((PROTOCOL_VERSION,)) + secrets.token_bytes(_NONCE_BYTES)


def _check_greeting(data: bytes) -> None:
    """Checks the beginning of a greeting, which may not be there as a whole.

    Raises:
        StrangerError: it is none, or of another version.
    """
    if not _NAME.startswith(data[: len(_NAME)]):
        raise StrangerError("what it says is no message of ascend-vllm")
    if data[len(_NAME) : len(_NAME) + 1] not in (b"", bytes((PROTOCOL_VERSION,))):
        raise StrangerError(
            f"it speaks version {data[len(_NAME)]} of the nodes' protocol, and here is version {PROTOCOL_VERSION}: "
            "install the same ascend-vllm on all machines"
        )


class Stranger:
    """Somebody who has connected to node 0 and has proved nothing: what he says, and what he gets to hear.

    Nothing here waits, and nothing of what he says goes anywhere else.

    Args:
        sock: connected; it belongs to this object until its keys are there.
        secret: of the nodes.
        timeout_s: for all that he has to say.

    Attributes:
        address: where he is.
        deadline: when his time is up, by the monotonic clock.
    """

    def __init__(self, sock: socket.socket, secret: bytes, timeout_s: float) -> None:
        self.socket = sock
        self.address = str(sock.getpeername()[0])
        self.deadline = time.monotonic() + timeout_s
        self._secret = secret
        self._data = b""
        self._greeting: bytes | None = None
        self._introduction: Introduction | None = None
        sock.setblocking(False)

    def hear(self) -> SessionKeys | None:
        """Takes what can be read; the keys of the connection when he has proved that he is a node.

        Raises:
            StrangerError: he is none.
        """
        wanted = _GREETING_BYTES if self._introduction is None else _PROOF_BYTES
        try:
            data = self.socket.recv(wanted - len(self._data))
        except BlockingIOError:
            return None
        except OSError as error:
            raise StrangerError(f"the connection is lost: {error.strerror or error}") from None
        if not data:
            raise StrangerError("it has closed the connection")
        self._data += data
        if self._introduction is None:
            self._greet()
        elif len(self._data) == _PROOF_BYTES:
            return self._check_proof(self._introduction)
        return None

    def _greet(self) -> None:
        if self._greeting is None and len(self._data) > len(_NAME) and self._data.startswith(_NAME):
            # of another version, too, which learns of the difference so
            self._greeting = make_greeting()
            self._say(self._greeting)
        _check_greeting(self._data)
        if len(self._data) == _GREETING_BYTES and self._greeting is not None:
            self._introduction = Introduction(self._secret, self._data, self._greeting)
            self._data = b""

    def _check_proof(self, introduction: Introduction) -> SessionKeys:
        if not hmac.compare_digest(self._data, introduction.proof_of_node()):
            self._say(_REFUSED + _NO_PROOF)
            raise StrangerError("it does not know the secret of this start")
        self._say(_ACCEPTED + introduction.proof_of_zero())
        return introduction.keys_of_zero()

    def _say(self, words: bytes) -> None:
        try:
            # there is room: it is a fraction of what fits in an empty buffer
            self.socket.send(words)
        except OSError as error:
            raise StrangerError(f"the connection is lost: {error.strerror or error}") from None


def introduce(sock: socket.socket, secret: bytes, timeout_s: float) -> SessionKeys:
    """Proves to node 0 that this node knows the secret, and has it prove the same.

    Args:
        sock: connected with node 0, or whoever listens in its place.
        secret: of the nodes.
        timeout_s: for all of it.

    Raises:
        ConfigError: one of the two does not know the secret, or is of another version.
        OSError: the other end is gone or says nothing, as one does that has too many strangers to hear.
    """
    deadline = time.monotonic() + timeout_s
    greeting = make_greeting()
    sock.settimeout(timeout_s)
    sock.sendall(greeting)
    where = sock.getpeername()[0]
    try:
        answer = _read(sock, _GREETING_BYTES, deadline, _check_greeting)
    except StrangerError as error:
        raise ConfigError(f"{where}, where node 0 should listen, is no node of ours: {error}.") from None
    introduction = Introduction(secret, greeting, answer)
    sock.sendall(introduction.proof_of_node())
    verdict = _read(sock, 1 + _PROOF_BYTES, deadline)
    if verdict[:1] != _ACCEPTED:
        raise ConfigError(
            f"Node 0 ({where}) refuses this node: it has another secret. Give all nodes the same one, by "
            "--node-secret-file or ASCEND_VLLM_NODE_SECRET."
        )
    if not hmac.compare_digest(verdict[1:], introduction.proof_of_zero()):
        raise ConfigError(
            f"{where}, where node 0 should listen, does not prove that it knows the secret: it is somebody else. "
            "Nothing was told it."
        )
    return introduction.keys_of_node()


def _read(
    sock: socket.socket, count: int, deadline: float, check: Callable[[bytes], None] = lambda _data: None
) -> bytes:
    """So many bytes; what is there of them is checked as it comes.

    Raises:
        OSError: the other end is gone or says nothing.
    """
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("it has closed the connection before it said who it is")
        data += part
        check(data)
    return data
