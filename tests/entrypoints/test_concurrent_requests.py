"""Many requests at once get what each gets alone: batching changes no answer (float32, greedy and seeded)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import openai

from tests.server import Server, is_idle, wait_until

COUNT = 64


def make_requests() -> list[dict[str, Any]]:
    chooser = random.Random(5)
    return [
        {
            "model": "tiny",
            "prompt": [chooser.randrange(3, 384) for _ in range(chooser.choice((1, 5, 33, 150)))],
            "max_tokens": chooser.randrange(4, 24),
            "temperature": 0 if i % 4 else 0.7,
            "seed": i,
            "stream": i % 2 == 0,
        }
        for i in range(COUNT)
    ]


async def ask(client: openai.AsyncOpenAI, fields: dict[str, Any]) -> str:
    answer = await client.completions.create(**fields)
    if not fields["stream"]:
        return answer.choices[0].text
    return "".join([chunk.choices[0].text async for chunk in answer])


async def test_64_at_once_equal_their_single_answers(openai_server: Server) -> None:
    requests = make_requests()
    async with openai.AsyncOpenAI(base_url=f"{openai_server.url}/v1", api_key="x", timeout=120) as client:
        together = await asyncio.gather(*(ask(client, fields) for fields in requests))
        alone = [await ask(client, fields | {"stream": not fields["stream"]}) for fields in requests]
    assert together == alone
    assert len(set(alone)) > COUNT // 2
    with httpx.Client(base_url=openai_server.url, timeout=60) as http:
        assert wait_until(lambda: is_idle(http))
