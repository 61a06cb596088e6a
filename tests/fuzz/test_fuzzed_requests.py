"""Many hostile requests: each gets a 4xx response, and none leaves anything in the server."""

from __future__ import annotations

import asyncio
import collections
import re
from typing import Any

import httpx
import pytest

from tests.fuzz.hostile_requests import ENDPOINTS, GENERATE_ENDPOINTS, POOLING_ENDPOINTS, hostile_request
from tests.fuzz.http_wire import Connection
from tests.server import GENERATE_SERVER, OPENAI_SERVER, Server, is_idle, running, wait_until
from tests.tiny_models import tiny_model

FLAGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "64", "--max-model-len", "64"]
OPENAI_FLAGS = ["--served-model-name", "tiny", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
POOLING_FLAGS = ["--served-model-name", "tiny", "--runner", "pooling"]
QUIET = ["--disable-log-requests", "--disable-uvicorn-access-log"]
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
    ("module", "flags", "endpoints", "share"),
    [
        pytest.param(OPENAI_SERVER, OPENAI_FLAGS, ENDPOINTS, 0.8, id="openai"),
        pytest.param(OPENAI_SERVER, POOLING_FLAGS, POOLING_ENDPOINTS, 0.1, id="pooling"),
        pytest.param(GENERATE_SERVER, [], GENERATE_ENDPOINTS, 0.1, id="generate"),
    ],
)
def test_hostile_requests(
    module: str, flags: list[str], endpoints: dict[str, Any], share: float, num_fuzzed_requests: int
) -> None:
    count = int(num_fuzzed_requests * share)
    quiet = QUIET if module == OPENAI_SERVER else ["--disable-log-requests"]
    with running(module, ["--model", tiny_model("qwen2"), *FLAGS, *flags, *quiet]) as server:
        statuses = asyncio.run(fuzz(server, count, endpoints))
        with httpx.Client(base_url=server.url, timeout=30) as http:
            assert http.get("/health").status_code == 200
            if module == OPENAI_SERVER:
                assert wait_until(lambda: is_idle(http)), http.get("/metrics").text
            # what the first of its paths is for
            path = next(iter(endpoints))
            assert http.post(path, json=endpoints[path][0]).status_code == 200
    print(f"{count} requests: {dict(sorted(statuses.items()))}")
    # the requests must come far enough to mean something
    assert statuses[200] > count / 20 and statuses[400] > count / 10, statuses
