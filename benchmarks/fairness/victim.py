"""The victim: a client that sends small requests and measures the latency of each answer.

It sends at fixed times, whether or not earlier answers have arrived, and measures from the time when it should have
sent: if a server stops for a second, all requests of that second are late. It starts at the first line of
its standard input and stops at the second, then waits for open requests and prints JSON.

    python benchmarks/fairness/victim.py 8000 < lines
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from ascend_vllm.tools.bench.http_client import HttpClient, HttpError
from fairness.wire import HOST, MODEL

# a slower answer counts as this latency, and as failed
LONGEST_S = 60.0
# most open requests; these are late already
_MOST_OPEN = 200

_COMPLETION = {"model": MODEL, "prompt": "one two three", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
_PLAIN = {"prompt": "one two three", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
_EMBEDDING = {"model": MODEL, "input": "one two three"}
# setup → path and body of the small request
WORK = {
    "generate": ("/v1/completions", _COMPLETION),
    "pooling": ("/v1/embeddings", _EMBEDDING),
    "plain": ("/generate", _PLAIN),
}
# seconds from one request to the next
_COMPLETION_S, _HEALTH_S = 0.1, 0.05


class Victim:
    """One client of a server.

    Args:
        port: where the server listens.

    Attributes:
        due: when requests were due, by name; seconds of the monotonic clock, which all processes share.
        latencies: seconds from then to the answer's end, by name.
        failures: number of answers other than 200, and of failed connections, by status (0: no answer).
    """

    def __init__(self, port: int) -> None:
        self._client = HttpClient(f"http://{HOST}:{port}")
        self._open: set[asyncio.Task[None]] = set()
        self.due: dict[str, list[float]] = {}
        self.latencies: dict[str, list[float]] = {}
        self.failures: dict[int, int] = {}

    async def send(self, name: str, path: str, body: bytes, interval_s: float) -> None:
        """Sends the same request repeatedly until it is cancelled; a GET without a body."""
        self.latencies[name], self.due[name] = [], []
        due = time.perf_counter()
        while True:
            if len(self._open) < _MOST_OPEN:
                task = asyncio.create_task(self._time(name, path, body, due))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            due += interval_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    async def finish(self) -> None:
        """Waits for all answers."""
        while self._open:
            await asyncio.wait(self._open)
        self._client.close()

    async def _time(self, name: str, path: str, body: bytes, due: float) -> None:
        status = 0
        try:
            answer = self._client.post(path, body) if body else self._client.get(path)
            await asyncio.wait_for(answer, LONGEST_S)
            status = 200
        except HttpError as error:
            status = error.status
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        self.due[name].append(due)
        self.latencies[name].append(time.perf_counter() - due)
        if status != 200:
            self.failures[status] = self.failures.get(status, 0) + 1


async def run(port: int, kind: str) -> dict[str, object]:
    """Sends requests between the two lines; returns the figures."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    victim = Victim(port)
    path, fields = WORK[kind]
    tasks = [
        asyncio.create_task(victim.send("completion", path, json.dumps(fields).encode(), _COMPLETION_S)),
        asyncio.create_task(victim.send("health", "/health", b"", _HEALTH_S)),
    ]
    await loop.run_in_executor(None, sys.stdin.readline)
    for task in tasks:
        task.cancel()
    await victim.finish()
    return {"due": victim.due, "latencies": victim.latencies, "failures": victim.failures}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(int(sys.argv[1]), sys.argv[2]))))
