"""The clients of an engine core that has several: API-server processes, each with sockets and requests of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from ascend_vllm.types.messages import EngineCoreOutput, EngineCoreOutputs


class Client:
    """One API-server process.

    Args:
        index: its number.
        inbound: PULL, what it sends.
        outbound: PUSH, what it is sent.

    Attributes:
        open_ids: its unfinished requests.
        is_gone: it has ended.
    """

    def __init__(self, index: int, inbound: zmq.Socket[bytes], outbound: zmq.Socket[bytes]) -> None:
        self.index = index
        self.inbound = inbound
        self.outbound = outbound
        self.monitor = inbound.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.open_ids: set[str] = set()
        self.is_gone = False

    def send(self, frame: bytes) -> None:
        if not self.is_gone:
            self.outbound.send(frame)


class Clients:
    """All clients of an engine core, and whose each request is.

    The first client gets the statistics of every step. The others get those of steps that were made while they had
    requests, so that they can tell a core that works from one that hangs.

    Args:
        sockets: inbound and outbound of each, at least two.

    Attributes:
        first: the one that gets all statistics.
        current: the one whose message is being handled.
        has_changed: whether requests have come or ended since the first client got the statistics of an idle core.
    """

    def __init__(self, sockets: Sequence[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]) -> None:
        self._clients = [Client(index, *pair) for index, pair in enumerate(sockets)]
        self._owners: dict[str, Client] = {}
        self.first = self.current = self._clients[0]
        self.has_changed = False

    @property
    def living(self) -> list[Client]:
        return [client for client in self._clients if not client.is_gone]

    @property
    def outbounds(self) -> list[zmq.Socket[bytes]]:
        """The sockets of the living clients."""
        return [client.outbound for client in self.living]

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Those that become readable when there is something to do."""
        return [socket for client in self._clients for socket in (client.inbound, client.monitor)]

    def own(self, request_id: str) -> None:
        """Notes that a request is the current client's."""
        self._owners[request_id] = self.current
        self.current.open_ids.add(request_id)
        self.has_changed = True

    def forget(self, request_ids: Iterable[str]) -> None:
        """Notes that requests have ended; unknown ids are ignored."""
        for request_id in request_ids:
            owner = self._owners.pop(request_id, None)
            if owner is not None:
                owner.open_ids.discard(request_id)
                self.has_changed = True

    def newly_gone(self) -> list[Client]:
        """The clients whose connections have ended since the last call."""
        return [client for client in self.living if _has_disconnected(client)]

    def release(self, client: Client) -> list[str]:
        """Notes that a client has ended; returns the requests that it had."""
        client.is_gone = True
        lost = list(client.open_ids)
        self.forget(lost)
        # what it does not take any more must not hold up the end of this process
        client.outbound.linger = 0
        return lost

    def split(self, outputs: EngineCoreOutputs) -> Iterator[tuple[Client, EngineCoreOutputs]]:
        """Divides a step's outputs among the clients; yields those that are to be sent something."""
        parts: dict[Client, list[EngineCoreOutput]] = {
            client: [] for client in self._clients if client.open_ids or client is self.first
        }
        for output in outputs.outputs:
            owner = self._owners.get(output.request_id)
            # None: aborted, or its client is gone
            if owner is not None:
                parts[owner].append(output)
                if output.finish_reason is not None:
                    self.forget([output.request_id])
        for client, part in parts.items():
            if client is self.first or part or outputs.stats is not None:
                yield client, EngineCoreOutputs(part, outputs.stats)


def _has_disconnected(client: Client) -> bool:
    try:
        event = parse_monitor_message(client.monitor.recv_multipart(zmq.NOBLOCK))["event"]
    except zmq.Again:
        return False
    return bool(event == zmq.EVENT_DISCONNECTED)
