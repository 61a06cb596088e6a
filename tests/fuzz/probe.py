"""Measures the latencies of another client while a server is under attack, in a separate process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tests.server import ROOT, Server

_PROGRAM = ROOT / "benchmarks" / "fairness" / "victim.py"
# the name under which it asks for the model
MODEL_NAME = "benchmark"


class Probe:
    """The results of a probe that has been stopped.

    Attributes:
        latencies: seconds by what was asked for, "health" or "completion".
        due: when it was due, on the clock of `time.perf_counter`.
        failures: answers other than 200 by status.
    """

    def __init__(self) -> None:
        self.latencies: dict[str, list[float]] = {}
        self.due: dict[str, list[float]] = {}
        self.failures: dict[str, int] = {}

    def longest(self, work: str) -> float:
        """The longest latency of a kind."""
        return max(self.latencies[work])

    def pauses(self, work: str, limit_s: float) -> list[tuple[float, float]]:
        """Times, from when to when, of answers that took longer than this."""
        pairs = zip(self.due[work], self.latencies[work], strict=True)
        return sorted((due, due + latency) for due, latency in pairs if latency > limit_s)


@contextlib.contextmanager
def probing(server: Server, kind: str) -> Iterator[Probe]:
    """Asks a server all the while.

    Args:
        server: whose model is named MODEL_NAME.
        kind: "generate", "pooling" or "plain", the /generate server.
    """
    probe = Probe()
    command: Sequence[str] = [sys.executable, str(_PROGRAM), str(server.port), kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        yield probe
        found: dict[str, Any] = json.loads(process.communicate("\n", timeout=120)[0])
        probe.latencies, probe.due, probe.failures = found["latencies"], found["due"], found["failures"]
    finally:
        process.kill()
        process.communicate()
