"""Long texts and long conversations: others are answered meanwhile, and what no prompt holds is refused."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from ascend_vllm.engine.tokenization import Tokenizer
from tests.server import Server, client_of_many

WORDS = "The quick brown fox jumps over the lazy dog. "
LONG = WORDS * 40_000
USER = {"role": "user", "content": "a"}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(openai_server: Server) -> Any:
    with client_of_many(openai_server) as client:
        yield client


def longest_wait(http: httpx.Client, work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of `work`, its time, and the longest GET /health meanwhile, in seconds."""
    done = threading.Event()
    waits = [0.0]

    def watch() -> None:
        while not done.is_set():
            start = time.perf_counter()
            assert http.get("/health").status_code == 200
            waits.append(time.perf_counter() - start)
            time.sleep(0.005)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        watching = pool.submit(watch)
        start = time.perf_counter()
        try:
            result = work()
        finally:
            taken = time.perf_counter() - start
            done.set()
        watching.result()
    return result, taken, max(waits)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/v1/completions", {"model": "tiny", "prompt": LONG, "truncate_prompt_tokens": 4, "max_tokens": 1}),
    ],
)
def test_others_are_answered_while_a_long_text_is_tokenised(
    http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    """The event loop stood still for as long as it took: 15 s for 4 MB."""
    answer, taken, wait = longest_wait(http, lambda: http.post(path, json=fields))
    assert answer.status_code == 200
    assert wait < max(0.5 * taken, 0.3), (wait, taken)


def test_the_tokens_of_a_long_text(http: httpx.Client, tiny_dir: str) -> None:
    """The answer is encoded in chunks, whose concatenation must be the ordinary encoding."""
    text = WORDS * 1000
    tokenizer = Tokenizer.from_directory(tiny_dir)
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer.encode(text)
    assert len(ids) > 16_384
    expected = {"count": len(ids), "max_model_len": 512, "tokens": ids}
    assert answer == expected | {"token_strs": tokenizer.convert_ids_to_tokens(ids)}
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


def test_clients_that_leave_take_their_texts_with_them(openai_server: Server, http: httpx.Client) -> None:
    """Each of twenty texts would be tokenised before the one of who is still there."""
    body = {"prompt": WORDS * 10_000}
    start = time.perf_counter()
    assert http.post("/tokenize", json=body).status_code == 200
    alone = time.perf_counter() - start
    request = json.dumps(body)
    lines = [
        "POST /tokenize HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(request)}",
    ]
    head = "\r\n".join([*lines, "", ""])
    sockets = []
    for _ in range(20):
        sock = socket.create_connection(("127.0.0.1", openai_server.port))
        sock.sendall(head.encode() + request.encode())
        sockets.append(sock)
    for sock in sockets:
        sock.close()
    start = time.perf_counter()
    assert http.post("/tokenize", json=body).status_code == 200
    assert time.perf_counter() - start < 10 * alone + 1


def many(*messages: dict[str, Any], number: int = 513, **fields: Any) -> dict[str, Any]:
    """A request with these messages so many times."""
    return {"model": "tiny", "messages": list(messages) * number, "max_tokens": 1} | fields


def chat(**fields: Any) -> dict[str, Any]:
    """A request with one message."""
    return many(USER, number=1, **fields)


def tool(**fields: Any) -> dict[str, Any]:
    """A function that may be called."""
    return {"type": "function", "function": {"name": "f"} | fields}


TOO_MANY = "your request has 513 messages and parts of their contents"
PARTS = {"role": "user", "content": [{"type": "text", "text": ""}] * 513}
CALL = {"role": "assistant", "tool_calls": [{"id": "1"} | tool(arguments="[" * 100_000)]}
DEEP: Any = {}
for _ in range(130):
    DEEP = {"a": DEEP}
TOO_DEEP = "nested too deeply"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages": (CHAT, many(USER), TOO_MANY),
    "parts": (CHAT, many(PARTS, number=1), TOO_MANY),
    "tools": (CHAT, chat(tools=[tool()] * 513, tool_choice="none"), "your request has 513 tools"),
    "blocks": ("/v1/messages", many(PARTS, number=1), TOO_MANY),
    "blocks, counted": ("/v1/messages/count_tokens", many(USER), TOO_MANY),
    "items": ("/v1/responses", {"input": [USER] * 513}, TOO_MANY),
    "deep arguments": (CHAT, many(CALL, USER, number=1), TOO_DEEP),
    "deep extra": (CHAT, many(USER | {"x": DEEP}, number=1), f"`messages` is {TOO_DEEP}"),
    "deep parameters": (CHAT, chat(tools=[tool(parameters=DEEP)], tool_choice="none"), f"`tools` is {TOO_DEEP}"),
    "deep variable": (CHAT, chat(chat_template_kwargs={"x": DEEP}), TOO_DEEP),
    "deep documents": (CHAT, chat(documents=[DEEP]), TOO_DEEP),
    "long variable": (CHAT, chat(chat_template_kwargs={"x": "a" * 5_000_000}), "more than 4194304 characters"),
    "long extra": (CHAT, many(USER | {"x": "a" * 4_200_000}, number=1), "more than 4194304 characters and values"),
    "text": ("/tokenize", {"prompt": "a" * 4_194_305}, "the limit is 4194304 bytes of UTF-8"),
    "text, cut": ("/v1/completions", {"prompt": "日" * 1_400_000, "truncate_prompt_tokens": 4}, "4194304 bytes"),
    "ids": ("/detokenize", {"tokens": [1] * 1_048_577}, "the limit is 1048576 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_prompt_holds_is_refused(http: httpx.Client, name: str) -> None:
    """Before it is rendered, or tokenised; nested too deeply, it was an internal server error."""
    path, body, words = REFUSED[name]
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text[:500]
    assert words in answer.json()["error"]["message"]


def test_as_many_messages_as_tokens_are_rendered(http: httpx.Client) -> None:
    """They are too long in the end, but not for their number."""
    assert "input tokens" in http.post(CHAT, json=many(USER, number=512)).json()["error"]["message"]
    assert http.post(CHAT, json=many(USER, number=600, truncate_prompt_tokens=4)).status_code == 200
    assert http.post("/tokenize", json=many(USER, number=600)).json()["count"] > 600


def test_others_are_answered_while_many_messages_are_rendered(http: httpx.Client) -> None:
    """A quarter as many took longer: each was compared with each of the developer's."""
    messages = [{"role": role, "content": f"{number}"} for role in ("developer", "user") for number in range(10_000)]
    answer, taken, _ = longest_wait(http, lambda: http.post("/tokenize", json={"messages": messages}))
    assert answer.status_code == 200
    assert taken < 15
