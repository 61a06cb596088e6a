"""Measures how far one client's requests delay those of others: latencies during attacks and on a quiet server.

    python scripts/make_random_model.py /tmp/tiny-152k --preset tiny-152k
    python benchmarks/bench_fairness.py --model /tmp/tiny-152k --json result.json
    python benchmarks/bench_fairness.py --model /tmp/tiny-152k --rows bad-words n-1024 --seconds 5

In each row, one client sends an attack of benchmarks/fairness/attacks.py for some seconds. Another one, the victim,
requests small completions (embeddings of a pooling model) and /health at fixed times; its latencies
are compared with those before and after the attack. The 99th percentile may be at most three times the quiet one
and 250 ms. One-time work of a server, such as loading the libraries that compile grammars, is done before.
All three are separate processes, and the attacker has the lowest priority, so that on a machine with few cores the
work of sending does not disturb the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from comparison import machine, report, servers
from fairness.attacks import ATTACKS, GENERATE, PLAIN, POOLING, WARM_UP, Attack
from fairness.wire import HOST, Answers

ALLOWED_RATIO, ALLOWED_S = 3.0, 0.25
_HERE = pathlib.Path(__file__).resolve().parent / "fairness"
_START_S = 300.0
# most seconds until a server is idle after an attack
_REST_S = 60.0
# most seconds until a helper process returns its result
_FINISH_S = 120.0
_WATCH_S = 0.2
_WORK = ("completion", "health")
_TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
_PYTHON_M = (sys.executable, "-m")
# setup → the server program, and the victim's kind of request
_SETUPS = {
    GENERATE: (servers.ours(_TOOLS), "generate"),
    POOLING: (servers.ours(("--runner", "pooling")), "pooling"),
    PLAIN: (
        servers.Program("ascend-vllm /generate", (*_PYTHON_M, "ascend_vllm.entrypoints.api_server", "--model")),
        "plain",
    ),
}


def _ask_once(server: servers.Server, requests: Sequence[bytes]) -> None:
    """Sends requests that make the server load libraries on first use.

    Raises:
        ServerError: an answer's status is not 200.
    """
    with socket.create_connection((HOST, server.port), timeout=_FINISH_S) as sock:
        answers = Answers(sock)
        for request in requests:
            sock.sendall(request)
            status = answers.skip()
            if status != 200:
                raise servers.ServerError(f"The server answered {status} to {request[:500]!r}.")


class Helper:
    """A process that starts and stops on a signal by pipe, and then returns its result."""

    def __init__(self, program: str, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / program), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise servers.ServerError(f"{program} {' '.join(words)} did not begin.")

    def signal(self) -> None:
        """Sends the next signal: the first one starts the work, the second one stops it."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Its result, after it has stopped."""
        found, _ = self._process.communicate(timeout=_FINISH_S)
        return json.loads(found)

    def close(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.communicate()


class MemoryWatch:
    """Watches the memory of a server's processes, and kills them before the machine's memory is exhausted.

    Args:
        server: to watch.
        most: bytes above which its processes are killed.

    Attributes:
        peak: largest number of bytes so far.
        has_ended_server: whether the processes were killed.
    """

    def __init__(self, server: servers.Server, most: int) -> None:
        self._server = server
        self._most = most
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self.peak = 0
        self.has_ended_server = False

    def _follow(self) -> None:
        while not self._stop.wait(_WATCH_S):
            self.peak = max(self.peak, self._server.peak_bytes())
            if self.peak > self._most and not self.has_ended_server:
                self.has_ended_server = True
                self._server.kill()

    def __enter__(self) -> MemoryWatch:
        self._server.begin_peak()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@dataclasses.dataclass(frozen=True)
class Sample:
    """The victim's measurements in one period; see `victim.Victim`."""

    due: dict[str, list[float]]
    latencies: dict[str, list[float]]
    failures: dict[str, int]

    def percentile(self, work: str, share: float) -> float:
        """The latency in seconds below which a share of the answers was."""
        found = self.latencies[work]
        return float(np.quantile(found, share, method="inverted_cdf")) if found else math.nan

    def figures(self, work: str) -> dict[str, float]:
        """Median, 99th percentile and maximum, in milliseconds."""
        shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
        return {name: self.percentile(work, share) * 1e3 for name, share in shares.items()}


def joined(samples: Sequence[Sample]) -> Sample:
    """Merges several samples."""
    latencies = {work: [value for sample in samples for value in sample.latencies[work]] for work in _WORK}
    return Sample({}, latencies, {})


@dataclasses.dataclass
class RowResult:
    """The result of one row: latencies before and after (`quiet`) and during the attack.

    Attributes:
        memory_mb: peak of the server's processes above their memory before.
        attacker: the attacker's own result.
        remarks: further problems.
    """

    attack: Attack
    quiet: Sample
    attacked: Sample
    memory_mb: float
    attacker: dict[str, Any]
    remarks: list[str]

    def allowed_ms(self, work: str) -> float:
        """Limit of the 99th percentile, in milliseconds."""
        return 1e3 * (ALLOWED_RATIO * self.quiet.percentile(work, 0.99) + ALLOWED_S)

    @property
    def is_fair(self) -> bool:
        """Whether latencies are within the limit, and all requests were answered."""
        fast = all(self.attacked.figures(work)["p99_ms"] <= self.allowed_ms(work) for work in _WORK)
        return fast and not self.remarks and not self.attacked.failures

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        work = {
            name: {
                "quiet": self.quiet.figures(name),
                "attacked": self.attacked.figures(name),
                "allowed_p99_ms": self.allowed_ms(name),
                "num_attacked": len(self.attacked.latencies[name]),
            }
            for name in _WORK
        }
        return {
            "name": self.attack.name,
            "is_fair": self.is_fair,
            **work,
            "failures": self.attacked.failures,
            "memory_mb": self.memory_mb,
            "attacker": self.attacker,
            "remarks": self.remarks,
        }

    def line(self) -> str:
        """The result as a line of the table."""
        cells = [f"{self.attack.name:18}"]
        for work in _WORK:
            quiet, attacked = self.quiet.figures(work), self.attacked.figures(work)
            values = (quiet["p50_ms"], quiet["p99_ms"], attacked["p50_ms"], attacked["p99_ms"], attacked["max_ms"])
            cells.append(" ".join(f"{value:7.0f}" for value in (*values, self.allowed_ms(work))))
        failures = {f"victim {status}": count for status, count in self.attacked.failures.items()}
        said = [f"{count}×{status}" for status, count in self.attacker["statuses"].items()]
        cells += [f"{self.memory_mb:7.0f}", f"{'fair' if self.is_fair else 'UNFAIR':6}", " ".join(said)]
        return " | ".join([*cells, *self.remarks, *([str(failures)] if failures else [])])


def heads() -> str:
    """The table's header."""
    names = ("q p50", "q p99", "p50", "p99", "max", "allowed")
    work = " ".join(f"{name:>7}" for name in names)
    titles = f"{'':18} | {'completions, ms':47} | {'/health, ms':47} |"
    return f"{titles}\n{'row':18} | {work} | {work} | {'MB more':>7} | {'':6} | answers to the attacker"


class Fairness:
    """Measures the rows one after the other.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._machine = machine.describe()
        self._commands: dict[str, str] = {}
        self.results: list[RowResult] = []

    def run(self, rows: Sequence[Attack]) -> None:
        """Measures rows, grouped by setup; a server killed by an attack is restarted for the next row."""
        print(heads(), flush=True)
        for setup in _SETUPS:
            waiting = [row for row in rows if row.setup == setup]
            while waiting:
                with self._server(setup) as server:
                    before = self._quiet(server, setup)
                    while waiting and not server.has_ended:
                        before = self._measure(server, waiting.pop(0), before)
                        if before is None:
                            break

    @contextlib.contextmanager
    def _server(self, setup: str) -> Iterator[servers.Server]:
        program, _ = _SETUPS[setup]
        flags = shlex.split(self._args.server_args)
        self._commands[setup] = program.shown(str(self._args.model), flags)
        with servers.Server(program, str(self._args.model), flags) as server:
            server.wait_ready(_START_S)
            # warm-up: one-time work is done before the measurement
            _ask_once(server, WARM_UP[setup])
            self._sample(server, setup, 1.0)
            yield server

    def _quiet(self, server: servers.Server, setup: str) -> Sample:
        return self._sample(server, setup, self._args.quiet_seconds)

    def _sample(self, server: servers.Server, setup: str, seconds: float) -> Sample:
        victim = Helper("victim.py", str(server.port), _SETUPS[setup][1])
        with contextlib.closing(victim):
            victim.signal()
            time.sleep(seconds)
            victim.signal()
            return Sample(**victim.result())

    def _measure(self, server: servers.Server, attack: Attack, before: Sample) -> Sample | None:
        """Measures a row; returns the quiet sample after it, or None if the server cannot be used again."""
        attacker = Helper("attacker.py", str(server.port), attack.name)
        victim = Helper("victim.py", str(server.port), _SETUPS[attack.setup][1])
        resident = server.resident_bytes()
        watch = MemoryWatch(server, int(self._args.max_memory_gib * 2**30))
        with contextlib.closing(attacker), contextlib.closing(victim), watch:
            victim.signal()
            attacker.signal()
            time.sleep(self._args.seconds)
            victim.signal()
            attacker.signal()
            found, attacked = attacker.result(), Sample(**victim.result())
        remarks = []
        after: Sample | None = None
        if watch.has_ended_server:
            remarks.append(f"ended at {self._args.max_memory_gib:g} GiB")
        elif server.has_ended:
            remarks.append("the server ended")
        elif not attack.leaves_work:
            after = self._come_to_rest(server, attack, before)
            remarks += [] if after else [f"not at rest after {_REST_S:.0f} s"]
        quiet = joined([before, *([after] if after else [])])
        self.results.append(RowResult(attack, quiet, attacked, (watch.peak - resident) / 1e6, found, remarks))
        print(self.results[-1].line(), flush=True)
        report.save(self._args.json, self.content())
        return after

    def _come_to_rest(self, server: servers.Server, attack: Attack, before: Sample) -> Sample | None:
        """Waits until latencies are as before; returns the sample, or None after a timeout."""
        end = time.perf_counter() + _REST_S
        while time.perf_counter() < end and not server.has_ended:
            if not (server.wait_finished(_REST_S) and server.wait_idle(_REST_S)):
                break
            after = self._quiet(server, attack.setup)
            if RowResult(attack, before, after, 0.0, {}, []).is_fair:
                return after
        return None

    def content(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            **report.heading("fairness", "bench_fairness.py", self._args, self._machine),
            "servers": self._commands,
            "seconds": self._args.seconds,
            "allowed": {"ratio": ALLOWED_RATIO, "ms": ALLOWED_S * 1e3},
            "rows": [result.as_dict() for result in self.results],
        }


def _parse_args() -> argparse.Namespace:
    parser = report.parser_of(__doc__, "after every row")
    add = parser.add_argument
    add("--model", required=True, help="directory of a small model with many tokens")
    add("--rows", nargs="+", choices=[attack.name for attack in ATTACKS], help="default: all")
    add("--seconds", type=float, default=12, help="of each attack (default: %(default)s)")
    add("--quiet-seconds", type=float, default=6, help="between two attacks (default: %(default)s)")
    add("--max-memory-gib", type=float, default=6, help="a server that takes more is ended (default: %(default)s)")
    add(
        "--server-args",
        default="--max-model-len 4096",
        help="flags of the server, in one word (default: %(default)s)",
    )
    return parser.parse_args()


def main() -> None:
    """Measures, prints the table, writes the file; exits with 1 if a row is unfair."""
    args = _parse_args()
    rows = [attack for attack in ATTACKS if args.rows is None or attack.name in args.rows]
    print(machine.one_line(machine.describe()))
    fairness = Fairness(args)
    try:
        fairness.run(rows)
    except servers.ServerError as error:
        raise SystemExit(str(error)) from error
    unfair = [result.attack.name for result in fairness.results if not result.is_fair]
    print(
        f"{len(rows) - len(unfair)} of {len(rows)} rows are fair."
        + (f" Unfair: {', '.join(unfair)}" if unfair else "")
    )
    if unfair:
        raise SystemExit(1)


if __name__ == "__main__":
    report.run(main)
