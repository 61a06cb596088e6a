"""The README's statements about the demo model, over HTTP with the official client."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess

import httpx
import openai
import pytest

from ascend_vllm.args.engine_args import all_flags
from tests.server import Server, is_idle, needs_curl, wait_until

pytestmark = pytest.mark.slow

QUESTIONS = [f"What does {flag.name} do?" for flag in all_flags()]


@needs_curl
def test_the_documented_curl(demo_server: Server) -> None:
    body = (
        '{"model":"demo","messages":[{"role":"user","content":"hello"}],"max_tokens":100,"top_k":-1,"top_p":1,'
        '"temperature":0,"ignore_eos":false,"stream":false}'
    )
    command = ["curl", "-sS", "-X", "POST", f"{demo_server.url}/v1/chat/completions"]
    done = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        check=True,
        timeout=60,
    )
    choice = json.loads(done.stdout)["choices"][0]
    assert choice["finish_reason"] == "stop"
    # a greeting of whole words, however the model of this version words it
    assert re.fullmatch(r"[\w\s.,:;!?'\"/`()-]{5,}", choice["message"]["content"]), choice


def test_it_knows_the_flag_table(demo_server: Server) -> None:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="x") as client:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "What does --block-size do?"}],
            temperature=0,
            max_tokens=100,
        )
    text = answer.choices[0].message.content or ""
    assert "KV cache" in text, text
    assert "tokens" in text


def test_the_start_log_shows_a_curl_to_try(demo_server: Server) -> None:
    assert f"curl {demo_server.url}/v1/chat/completions" in demo_server.log


async def test_64_requests_at_once_equal_their_single_answers(demo_server: Server) -> None:
    chosen = random.Random(0).sample(QUESTIONS, 64)
    async with openai.AsyncOpenAI(
        base_url=f"{demo_server.url}/v1", api_key="x", timeout=120, http_client=openai.DefaultAsyncHttpxClient()
    ) as client:

        async def ask(question: str, stream: bool) -> str:
            fields = {
                "model": "demo",
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": 40,
            }
            if not stream:
                whole = await client.chat.completions.create(**fields)
                return whole.choices[0].message.content
            pieces = await client.chat.completions.create(**fields, stream=True)
            return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

        together = await asyncio.gather(*(ask(question, i % 2 == 0) for i, question in enumerate(chosen)))
        alone = [await ask(question, False) for question in chosen]
    assert together == alone
    assert len(set(alone)) > 48
    with httpx.Client(base_url=demo_server.url, timeout=60) as http:
        assert wait_until(lambda: is_idle(http))
