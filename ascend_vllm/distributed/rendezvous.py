"""Where the workers of a group meet. No torch here: whoever starts workers need not load it."""

from __future__ import annotations

import socket

import msgspec

from ascend_vllm.platforms.host import LOOPBACK


class Machine(msgspec.Struct, frozen=True):
    """A worker's place on its machine.

    Attributes:
        local_rank: number of the worker among those of the engine there.
        num_workers: how many those are.
    """

    local_rank: int
    num_workers: int


class Rendezvous(msgspec.Struct, frozen=True):
    """A store, which the first worker keeps.

    Attributes:
        port: of the store.
        listening_socket: descriptor of a socket that listens there, for the first worker; None for the others.
        host: address of the store's machine.
        address: of this worker's machine, at which the others reach it.
        machine: this worker's place on it; None: all workers are on one machine.
    """

    port: int
    listening_socket: int | None = None
    host: str = LOOPBACK
    address: str = LOOPBACK
    machine: Machine | None = None

    def place(self, rank: int, world_size: int) -> Machine:
        """Where a worker is on its machine."""
        return self.machine or Machine(rank, world_size)


def listen(host: str = LOOPBACK) -> socket.socket:
    """A socket on a free port of an interface, by its address, for the first worker to take over."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)
