"""Sends one attack for some time, in a process with the lowest priority.

It makes its requests, prints "ready", starts at the first line of its standard input, stops at the second, and prints
the number of answers by status as JSON; status 0 stands for connections that ended without an answer.

    python benchmarks/fairness/attacker.py 8000 bad-words < lines
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import pathlib
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fairness.attacks import ATTACKS, Attack
from fairness.wire import HOST, Answers

# bytes that a slow reader reads at a time, and the seconds between
_SIP, _SIP_S = 256, 0.2
# seconds after which a client that disconnected connects again
_PAUSE_S = 0.02


class Attacker:
    """Sends one attack from many threads.

    Args:
        attack: to send.
        port: where the server listens.

    Attributes:
        statuses: number of answers by status.
    """

    def __init__(self, attack: Attack, port: int) -> None:
        self._attack = attack
        self._port = port
        self._requests = attack.make()
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._sockets: set[socket.socket] = set()
        self.statuses: collections.Counter[int] = collections.Counter()

    def run(self) -> None:
        """Attacks until `stop` is called or all requests are sent."""
        work: Callable[[], None] = getattr(self, f"_{self._attack.how}")
        threads = [threading.Thread(target=self._repeat, args=(work,)) for _ in range(self._attack.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """Closes all connections."""
        self._stop.set()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                work()
            except OSError:
                if not self._stop.is_set():
                    self.statuses[0] += 1
                    self._stop.wait(_PAUSE_S)
            if self._attack.times and self.statuses.total() >= self._attack.times:
                return

    def _next(self) -> bytes:
        return self._requests[next(self._numbers) % len(self._requests)]

    @contextlib.contextmanager
    def _connection(self):
        with socket.create_connection((HOST, self._port), timeout=120) as sock:
            self._sockets.add(sock)
            try:
                yield sock
            finally:
                self._sockets.discard(sock)

    def _ask(self) -> None:
        with self._connection() as sock:
            answers = Answers(sock)
            while not self._stop.is_set():
                sock.sendall(self._next())
                self.statuses[answers.skip()] += 1

    def _leave(self) -> None:
        with self._connection() as sock:
            sock.sendall(self._next())
            sock.settimeout(_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                sock.recv(1000)
            self.statuses[0] += 1

    def _slow(self) -> None:
        with self._connection() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(self._next())
            while sock.recv(_SIP):
                self._stop.wait(_SIP_S)
            self.statuses[0] += 1

    def _unread(self) -> None:
        with self._connection() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            # until the server takes no more of it
            while not self._stop.is_set():
                sock.sendall(self._next())

    def _idle(self) -> None:
        with self._connection() as sock:
            sock.sendall(self._next())
            sock.recv(1000)
            self.statuses[0] += 1


def main() -> None:
    """See the module."""
    port, name = int(sys.argv[1]), sys.argv[2]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    threading.stack_size(1 << 18)
    os.nice(19)
    attacker = Attacker(next(attack for attack in ATTACKS if attack.name == name), port)
    print("ready", flush=True)
    sys.stdin.readline()
    thread = threading.Thread(target=attacker.run)
    start = time.perf_counter()
    thread.start()
    sys.stdin.readline()
    attacker.stop()
    thread.join(30)
    seconds = time.perf_counter() - start
    print(json.dumps({"statuses": attacker.statuses, "seconds": seconds, "cpu_s": time.process_time()}), flush=True)
    # without waiting for threads whose server has stopped answering
    os._exit(0)


if __name__ == "__main__":
    main()
