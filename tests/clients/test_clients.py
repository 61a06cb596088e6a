"""Third-party clients get the same answers as plain HTTP requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server import Server

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def http(clients_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=clients_server.url, timeout=60) as client:
        yield client


def chat(http: httpx.Client, *messages: tuple[str, str]) -> dict[str, Any]:
    body = {**GREEDY, "messages": [{"role": role, "content": content} for role, content in messages]}
    return http.post("/v1/chat/completions", json=body).raise_for_status().json()


def completion(http: httpx.Client) -> str:
    answer = http.post("/v1/completions", json={**GREEDY, "prompt": "hello there"}).raise_for_status()
    return answer.json()["choices"][0]["text"]


@pytest.mark.slow
def test_litellm(client_program: Callable[[str], Any], http: httpx.Client) -> None:
    expected = chat(http, ("user", "hello there"))
    message = expected["choices"][0]
    found = client_program("litellm_client.py")
    text = message["message"]["content"]
    assert [found[name] for name in ("chat", "stream", "rebuilt", "async")] == [text] * 4
    assert found["text"] == completion(http)
    assert found["usage"] == [expected["usage"]["prompt_tokens"], expected["usage"]["completion_tokens"]]
    assert found["finish_reason"] == message["finish_reason"]
    assert "The model `nope` does not exist." in found["missing"]


@pytest.mark.slow
def test_langchain(client_program: Callable[[str], Any], http: httpx.Client) -> None:
    expected = chat(http, ("system", "be brief"), ("user", "hello there"))
    message = expected["choices"][0]
    found = client_program("langchain_client.py")
    text = message["message"]["content"]
    assert [found["chat"], found["stream"], found["async"], *found["batch"]] == [text] * 6
    assert found["text"] == completion(http)
    assert found["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    assert found["finish_reason"] == message["finish_reason"]
    assert found["logprobs"] == [2] * expected["usage"]["completion_tokens"]
    assert found["structured"]["word"] in ("yes", "no") and isinstance(found["structured"]["sure"], bool)
    (call,) = found["tool_calls"]
    assert call["name"] == "weather" and call["args"]["city"] in ("Oslo", "Rome")
