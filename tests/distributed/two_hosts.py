"""Two hosts with a network between them, made of network namespaces of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_NAMESPACES = "/run/netns"


class NoNamespacesError(Exception):
    """This machine or container does not allow network namespaces; the message says why."""


class Host:
    """A network namespace with one interface.

    Attributes:
        address: of the interface.
    """

    def __init__(self, name: str, interface: str, address: str) -> None:
        self._name = name
        self._interface = interface
        self.address = address

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context in which this thread's new sockets and processes are on the host."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(f"{_NAMESPACES}/{self._name}", os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(there)
            os.close(home)

    def cut(self) -> None:
        """Cuts the network silently: packets are lost."""
        _ip("-n", self._name, "link", "set", self._interface, "down")


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise NoNamespacesError(f"setns: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoNamespacesError("needs the ip program") from None
    except subprocess.CalledProcessError as error:
        raise NoNamespacesError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that can reach only each other.

    Raises:
        NoNamespacesError: they cannot be made here.
    """
    # names of interfaces have at most 15 characters
    mark = secrets.token_hex(3)
    hosts = tuple(
        Host(f"host{number}-{mark}", f"wire{number}-{mark}", f"10.77.0.{number + 1}") for number in range(2)
    )
    with contextlib.ExitStack() as undo:
        for host in hosts:
            _ip("netns", "add", host._name)
            undo.callback(_ip, "netns", "delete", host._name)
        first, second = hosts
        # inside from the beginning: nothing of it is seen outside
        _ip("-n", first._name, "link", "add", first._interface, "type", "veth", "peer", second._interface)
        _ip("-n", first._name, "link", "set", second._interface, "netns", second._name)
        for host in hosts:
            _ip("-n", host._name, "address", "add", f"{host.address}/24", "dev", host._interface)
            for interface in ("lo", host._interface):
                _ip("-n", host._name, "link", "set", interface, "up")
        with first.inside():
            pass
        yield first, second
