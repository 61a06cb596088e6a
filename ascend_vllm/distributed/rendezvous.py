"""Address of the store through which workers connect. Imports no torch, since executors need not load it."""

from __future__ import annotations

import socket

import msgspec

from ascend_vllm.platforms.host import LOOPBACK


class Machine(msgspec.Struct, frozen=True):
    """A worker's rank on its machine.

    Attributes:
        local_rank: rank among the engine's workers on this machine.
        num_workers: number of the engine's workers on this machine.
    """

    local_rank: int
    num_workers: int


class Rendezvous(msgspec.Struct, frozen=True):
    """The store, which rank 0 serves, as one worker connects to it.

    Attributes:
        port: of the store.
        listening_socket: descriptor of the store's listening socket for rank 0; None for the others.
        host: address of the store's machine.
        address: of this worker's machine, at which the others reach it.
        machine: this worker's rank on its machine; None: all workers are on one machine.
    """

    port: int
    listening_socket: int | None = None
    host: str = LOOPBACK
    address: str = LOOPBACK
    machine: Machine | None = None

    def place(self, rank: int, world_size: int) -> Machine:
        """The local rank of the worker with this global rank."""
        return self.machine or Machine(rank, world_size)


def listen(host: str = LOOPBACK) -> socket.socket:
    """A listening socket on a free port of the interface with this address; rank 0 takes it over."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family)
