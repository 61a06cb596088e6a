"""Many hostile requests: each gets a 4xx response, and none leaves anything in the server."""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fuzz.hostile_requests import ENDPOINTS, GENERATE_ENDPOINTS, POOLING_ENDPOINTS, hostile_request
from tests.fuzz.http_wire import Connection
from tests.server import Server, is_idle, wait_until

NUM_CONNECTIONS = 32

# what a server says of itself inside an answer that began with status 200
SERVER_ERROR = re.compile(rb'"code": ?5\d\d')


async def fuzz(server: Server, count: int, endpoints: dict[str, Any]) -> collections.Counter[int]:
    """Send the requests of the seeds 0 … count − 1; the number of answers by status."""
    seeds = iter(range(count))
    statuses: collections.Counter[int] = collections.Counter()
    wrong: list[str] = []

    async def client() -> None:
        connection = Connection("127.0.0.1", server.port)
        for seed in seeds:
            request = hostile_request(seed, endpoints)
            answer = await asyncio.wait_for(connection.ask(request), 60)
            statuses[answer.status] += 1
            if not 200 <= answer.status < 500 or SERVER_ERROR.search(answer.body):
                wrong.append(f"seed {seed}: {answer.status} {answer.body[:300]!r} for {request.wire[:600]!r}")
        connection.close()

    try:
        await asyncio.gather(*(client() for _ in range(NUM_CONNECTIONS)))
    except OSError as error:
        wrong.append(f"the server is gone after {statuses.total()} requests: {error}")
    assert not wrong, f"{len(wrong)} answers; log:\n{server.log[-3000:]}\n" + "\n".join(wrong[:20])
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "endpoints", "share"),
    [("openai", ENDPOINTS, 0.8), ("pooling", POOLING_ENDPOINTS, 0.1), ("generate", GENERATE_ENDPOINTS, 0.1)],
    ids=["openai", "pooling", "generate"],
)
def test_hostile_requests(
    fuzzed_servers: Callable[[str], Server],
    kind: str,
    endpoints: dict[str, Any],
    share: float,
    num_fuzzed_requests: int,
) -> None:
    count = int(num_fuzzed_requests * share)
    server = fuzzed_servers(kind)
    statuses = asyncio.run(fuzz(server, count, endpoints))
    with httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.get("/health").status_code == 200
        if kind != "generate":
            assert wait_until(lambda: is_idle(http)), http.get("/metrics").text
        # what the first of its paths is for
        path = next(iter(endpoints))
        assert http.post(path, json=endpoints[path][0]).status_code == 200
    print(f"{count} requests: {dict(sorted(statuses.items()))}")
    # the requests must come far enough to mean something
    assert statuses[200] > count / 20 and statuses[400] > count / 10, statuses
