"""The secret that the machines of --nnodes share: where it comes from, and what it must be."""

from __future__ import annotations

import os
import secrets
import stat

from ascend_vllm import envs
from ascend_vllm.errors import ConfigError

VARIABLE = "ASCEND_VLLM_NODE_SECRET"
FLAG = "--node-secret-file"

# what is said on the wire lets guesses be tried elsewhere, as often as one likes
_MIN_BYTES = 16
_MAX_BYTES = 4096
_HOW_TO_MAKE = "Make one with `openssl rand -hex 32`, and give the same to all nodes."


def read_secret(path: str | None) -> bytes | None:
    """The secret of a file, else of ASCEND_VLLM_NODE_SECRET; None: there is none.

    Args:
        path: what --node-secret-file says.

    Raises:
        ConfigError: it cannot be read, others may read it, or it is too short or too long.
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
    """The secret that a node above 0 must have been given.

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
    """A secret for one start."""
    return secrets.token_hex(32)


def _read(path: str) -> bytes:
    try:
        # a pipe would block, and be empty when it is read again
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{FLAG} {path}: {getattr(error, 'strerror', None) or error}.") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{FLAG} {path}: it is no regular file.")
        mode = stat.S_IMODE(status.st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"{FLAG} {path}: others than its owner have rights to the file (mode {mode:04o}): run "
                f"`chmod 600 {path}`."
            )
        return os.read(descriptor, _MAX_BYTES + 2)
    finally:
        os.close(descriptor)
