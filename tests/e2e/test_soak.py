"""Soak test: all features at once for a while, without leaks.

pytest tests/e2e/test_soak.py --soak-seconds 1200 -s
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import ssl
import statistics
import time
from collections.abc import Iterator, Sequence

import httpx
import psutil
import pytest

from tests.certificates import make_certificates
from tests.e2e.soak_traffic import MODEL, Client, GenerateClient, OpenAIClient, PoolingClient, PriorityClient
from tests.server import (
    GENERATE_SERVER,
    OPENAI_SERVER,
    Server,
    ended_in_order,
    is_alive,
    is_idle,
    needs_openssl,
    wait_until,
)
from tests.tiny_models import tiny_model

FLAGS = ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "12"]
# little enough that running requests must make room for one another
SMALL_CACHE = ["--kv-cache-memory-bytes", "1M"]
CACHE = ["--kv-cache-memory-bytes", "16M"]
QUIET = ["--disable-uvicorn-access-log", "--disable-log-requests"]
NAME = ["--served-model-name", MODEL]
# above this many seconds there is a server for each parser of tool calls
LONG_S = 300
SAMPLE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """A server and its clients.

    Attributes:
        name: for messages.
        module: program of the server.
        flags: in addition to the common ones.
        client: class of the clients.
        clients: number of clients.
        has_tls: whether it serves HTTPS.
        is_extra: whether it is for long runs only.
    """

    name: str
    module: str
    flags: Sequence[str]
    client: type[Client]
    clients: int
    has_tls: bool = False
    is_extra: bool = False


def _tools(parser: str) -> list[str]:
    return ["--enable-auto-tool-choice", "--tool-call-parser", parser]


ARRANGEMENTS = (
    Arrangement(
        "priorities",
        OPENAI_SERVER,
        [*_tools("hermes"), "--scheduling-policy", "priority", *SMALL_CACHE, *NAME, *QUIET],
        PriorityClient,
        5,
    ),
    Arrangement(
        "tls",
        OPENAI_SERVER,
        [*_tools("qwen3_coder"), "--enable-prefix-caching", "--enable-chunked-prefill", *CACHE, *NAME, *QUIET],
        OpenAIClient,
        3,
        has_tls=True,
    ),
    Arrangement("pooling", OPENAI_SERVER, ["--runner", "pooling", *CACHE, *NAME, *QUIET], PoolingClient, 1),
    Arrangement("generate", GENERATE_SERVER, CACHE, GenerateClient, 1),
    *(
        Arrangement(parser, OPENAI_SERVER, [*_tools(parser), *flags, *NAME, *QUIET], OpenAIClient, 2, is_extra=True)
        for parser, flags in {
            "llama3_json": [*CACHE, "--num-scheduler-steps", "4"],
            "mistral": [*SMALL_CACHE, "--preemption-mode", "swap"],
            "internlm": [*CACHE, "--disable-async-output-proc"],
        }.items()
    ),
)


@dataclasses.dataclass
class State:
    """Resources of a server's processes.

    Attributes:
        memory_mb: resident, of the API server and the engine core; the processes for templates and grammars have
            limits of their own, and start on demand.
        files: open files and sockets of these two.
        threads: of these two.
        processes: number of all processes.
    """

    memory_mb: float
    files: int
    threads: int
    processes: int

    @classmethod
    def of(cls, server: Server) -> State:
        """The current state."""
        memory, files, threads = 0.0, 0, 0
        for process in (psutil.Process(server.process.pid), server.engine_core()):
            memory += process.memory_info().rss / 1e6
            files += process.num_fds()
            threads += process.num_threads()
        return cls(memory, files, threads, 1 + len(server.children()))


class Subject:
    """A running server and its measurements.

    Attributes:
        arrangement, server, context: as given; the context is for TLS.
        counts: requests by kind.
        wrong: errors found by clients.
        states: one every SAMPLE_S seconds.
    """

    def __init__(self, arrangement: Arrangement, server: Server, context: ssl.SSLContext | None) -> None:
        self.arrangement = arrangement
        self.server = server
        self.context = context
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.states: list[State] = []

    def clients(self) -> list[Client]:
        """Its clients, not started yet."""
        name, kind = self.arrangement.name, self.arrangement.client
        return [
            kind(self.server, f"{name} {index}", self.context, self.counts, self.wrong)
            for index in range(self.arrangement.clients)
        ]

    @property
    def has_seen_everything(self) -> bool:
        """Whether every kind of request was made."""
        return set(self.arrangement.client.KINDS) <= set(self.counts)

    def come_to_rest(self) -> None:
        """Waits until the server is idle.

        Raises:
            AssertionError: it does not become idle.
        """
        if self.arrangement.module == GENERATE_SERVER:
            return
        with httpx.Client(base_url=self.server.url, verify=self.context or True, timeout=30) as http:
            assert wait_until(lambda: is_idle(http), 120), http.get("/metrics").text

    def findings(self, before: State, after: State) -> list[str]:
        """All errors, with the server's name."""
        found = list(self.wrong)
        # some threads, and the processes for templates and grammars, start on demand
        for name, spare in (("files", 16), ("threads", 12), ("processes", 5)):
            grown = getattr(after, name) - getattr(before, name)
            found += [f"{grown} more {name} than in the beginning"] if grown > spare else []
        # an error of a client ends the test early
        found += self._memory_findings() if len(self.states) > 9 else []
        zombies = [child for child in psutil.Process(self.server.process.pid).children(True) if not is_alive(child)]
        found += [f"zombies {zombies}"] if zombies else []
        lines = [line for line in self.server.log.splitlines() if "ERROR" in line or "Traceback" in line]
        found += [f"in the log: {line}" for line in lines[:5]]
        return [f"{self.arrangement.name}: {finding}" for finding in found]

    def _memory_findings(self) -> list[str]:
        third = len(self.states) // 3
        middle, end = self.states[third : 2 * third], self.states[2 * third :]
        held = [statistics.median(state.memory_mb for state in part) for part in (middle, end)]
        print(f"{self.arrangement.name:12} {held[0]:6.0f} → {held[1]:6.0f} MB, {self.counts.total()} requests")
        # in a short run the middle third still has first-time allocations
        if held[1] > 1.05 * held[0] + 10:
            return [f"memory grew from {held[0]:.0f} MB in the middle third to {held[1]:.0f} MB in the last"]
        return []


@contextlib.contextmanager
def running_subjects(arrangements: Sequence[Arrangement], certificates: pathlib.Path) -> Iterator[list[Subject]]:
    """Running servers, which must shut down with exit code 0 and leave no process."""
    trust = ssl.create_default_context(cafile=certificates / "ca.pem")
    tls = ["--ssl-keyfile", str(certificates / "server.key"), "--ssl-certfile", str(certificates / "server.pem")]
    with contextlib.ExitStack() as stack:
        subjects = []
        # started concurrently
        for one in arrangements:
            flags = ["--model", tiny_model("qwen2"), *FLAGS, *one.flags, *(tls if one.has_tls else [])]
            server = Server(one.module, flags, scheme="https" if one.has_tls else "http")
            stack.callback(server.close)
            subjects.append(Subject(one, server, trust if one.has_tls else None))
        for subject in subjects:
            stack.enter_context(ended_in_order(subject.server, 180.0, subject.context or True))
        yield subjects


async def soak(subjects: Sequence[Subject], seconds: float) -> None:
    """Runs all clients for some seconds, then cancels them with their open requests.

    Takes longer if a kind of request was not sent by then, and ends early at the first wrong answer.
    """
    tasks = [asyncio.create_task(client.run()) for one in subjects for client in one.clients()]
    end = time.monotonic() + seconds
    while not any(one.wrong for one in subjects):
        if time.monotonic() > end and all(one.has_seen_everything for one in subjects):
            break
        await asyncio.sleep(SAMPLE_S)
        for one in subjects:
            one.states.append(State.of(one.server))
        for task in tasks:
            if task.done():
                # clients end only by an exception
                task.result()
    # repeatedly: a task misses a cancellation that comes when its wait ends
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=1)
    # the event loop closes their connections
    await asyncio.sleep(0.2)


# httpx leaves a socket behind when its task is cancelled while it connects; the servers are other processes
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.slow
@needs_openssl
def test_soak(tmp_path: pathlib.Path, soak_seconds: float) -> None:
    make_certificates(tmp_path)
    chosen = [arrangement for arrangement in ARRANGEMENTS if seconds_allow(arrangement, soak_seconds)]
    with running_subjects(chosen, tmp_path) as subjects:
        # everything once: threads, caches and processes that are made when they are first needed
        asyncio.run(soak(subjects, min(10.0, soak_seconds / 4)))
        for one in subjects:
            one.come_to_rest()
            one.states.clear()
        before = [State.of(one.server) for one in subjects]
        asyncio.run(soak(subjects, soak_seconds))
        for one in subjects:
            one.come_to_rest()
        # the last connections are closed
        time.sleep(1)
        findings = [
            finding
            for one, state in zip(subjects, before, strict=True)
            for finding in one.findings(state, State.of(one.server))
        ]
        assert not findings, "\n".join(findings)


def seconds_allow(arrangement: Arrangement, seconds: float) -> bool:
    """Whether a run of this length has an arrangement."""
    return not arrangement.is_extra or seconds >= LONG_S
