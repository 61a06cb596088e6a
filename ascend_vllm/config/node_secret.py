"""Reads and checks the secret that the machines of --nnodes share."""

from __future__ import annotations

import os
import secrets
import stat

from ascend_vllm import envs
from ascend_vllm.errors import ConfigError

VARIABLE = "ASCEND_VLLM_NODE_SECRET"
FLAG = "--node-secret-file"

# the handshake allows offline guessing
_MIN_BYTES = 16
_MAX_BYTES = 4096
_HOW_TO_MAKE = "Make one with `openssl rand -hex 32`, and give the same to all nodes."


def read_secret(path: str | None) -> bytes | None:
    """The secret from a file or else from ASCEND_VLLM_NODE_SECRET; None: neither is given.

    Args:
        path: value of --node-secret-file.

    Raises:
        ConfigError: the file cannot be read or is accessible to others, or the secret is too short or too long.
    """
    source, value = VARIABLE, envs.node_secret().encode(errors="surrogateescape")
    if path is not None:
        source, value = f"{FLAG} {path}", _read(path)
    value = value.strip()
    if not value and path is None:
        return None
    if not _MIN_BYTES <= len(value) <= _MAX_BYTES:
        raise ConfigError(
            f"{source}: the secret of the nodes has {_MIN_BYTES} to {_MAX_BYTES} bytes, got {len(value)}. "
            f"{_HOW_TO_MAKE}"
        )
    return value


def require_secret(path: str | None, node_rank: int) -> bytes:
    """`read_secret` for a node above 0, which needs one.

    Raises:
        ConfigError: there is none, or see `read_secret`.
    """
    secret = read_secret(path)
    if secret is None:
        raise ConfigError(
            f"--node-rank {node_rank}: this node needs the secret of node 0, and neither {FLAG} nor {VARIABLE} is "
            f"given. Set {VARIABLE} to the same value on all nodes, or give each {FLAG} with a copy of the same "
            "file. Node 0 without one makes a secret and prints it."
        )
    return secret


def make_secret() -> str:
    """A random secret for one run."""
    return secrets.token_hex(32)


def _read(path: str) -> bytes:
    try:
        # O_NONBLOCK: opening a pipe would block
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path}: {getattr(error, 'strerror', None) or error}.") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{FLAG} {path}: not a regular file.")
        mode = stat.S_IMODE(status.st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{FLAG} {path}: the file is accessible to other users (mode {mode:04o}): run `chmod 600 {path}`."
            )
        return os.read(descriptor, _MAX_BYTES + 2)
    finally:
        os.close(descriptor)
