"""Beam search by /generate and both OpenAI endpoints has the results of transformers, as by `LLM` in tests/e2e."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
from typing import Any

import httpx
import pytest

from ascend_vllm.engine.tokenization import Tokenizer
from tests.e2e.test_beam_search import PROMPTS, endless, expected, greedy
from tests.server import Server

# that of the servers
MODEL = "qwen2"
TEXTS = ["Hello! How are you today?", "The quick brown fox", "a", "1 2 3 4 5 6 7 8 9 10"]


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: str) -> Any:
    return Tokenizer.from_directory(tiny_dir).hf


def continuation(tokenizer: Any, prompt: list[int], tokens: tuple[int, ...]) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=True)
    return tokenizer.decode([*prompt, *tokens], skip_special_tokens=True).removeprefix(before)


def in_parallel(calls: list[Any]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_generate_endpoint(generate_server: Server, tokenizer: Any) -> None:
    """Concurrent searches, each prompt with other widths, and ordinary requests."""
    with httpx.Client(base_url=generate_server.url, timeout=60) as client:

        def ask(prompt: str, **fields: Any) -> list[str]:
            body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
            response = client.post("/generate", json=body)
            assert response.status_code == 200, response.text
            return response.json()["text"]

        calls, wanted = [], []
        for width, text in itertools.product((2, 3, 6), TEXTS):
            beams = {"use_beam_search": True, "best_of": width, "n": 2}
            calls += [functools.partial(ask, text, **beams), functools.partial(ask, text)]
            prompt = tokenizer.encode(text)
            sequences = expected(MODEL, prompt, endless(width, 2, 8))
            likely = greedy(MODEL, tuple(prompt), 8)
            wanted += [
                [text + continuation(tokenizer, prompt, tokens) for tokens, _ in sequences],
                [text + continuation(tokenizer, prompt, tuple(likely))],
            ]
        assert in_parallel(calls) == wanted


def test_generate_streams_the_best_so_far(generate_server: Server, tokenizer: Any) -> None:
    body = {
        "prompt": TEXTS[0], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "use_beam_search": True,
        "best_of": 3, "n": 2, "stream": True,
    }  # fmt: skip
    content = httpx.post(f"{generate_server.url}/generate", json=body, timeout=60).content
    frames = [json.loads(frame)["text"] for frame in content.split(b"\0")[:-1]]
    prompt = tokenizer.encode(TEXTS[0])
    wanted = []
    for length in range(1, 7):
        sequences = expected(MODEL, prompt, endless(3, 2, length))
        wanted.append([TEXTS[0] + continuation(tokenizer, prompt, tokens) for tokens, _ in sequences])
    assert frames[-1] == wanted[-1]
    # a slow reader may get several steps in one, and an unfinished character is held back while its sequence may grow
    steps = iter([[text.rstrip("\ufffd") for text in texts] for texts in wanted])
    assert all([text.rstrip("\ufffd") for text in frame] in steps for frame in frames)
    # so many steps are never all made before the first one is told
    content = httpx.post(f"{generate_server.url}/generate", json=body | {"max_tokens": 200}, timeout=60).content
    assert content.count(b"\0") > 1


@pytest.mark.parametrize("stream", [False, True])
def test_completions_endpoint(http: httpx.Client, tokenizer: Any, stream: bool) -> None:
    def ask(prompt: list[int], width: int) -> dict[int, tuple[str, str]]:
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": 8, "use_beam_search": True, "n": width,
            "ignore_eos": True, "stream": stream,
        }  # fmt: skip
        response = http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        if not stream:
            answer = response.json()
            assert answer["usage"]["completion_tokens"] == 8 * width
            assert answer["usage"]["prompt_tokens"] == len(prompt)
        return collect(response, stream, lambda choice: choice["text"])

    cases = list(itertools.product(PROMPTS[:4], (1, 2, 4)))
    answers = in_parallel([functools.partial(ask, prompt, width) for prompt, width in cases])
    for (prompt, width), answer in zip(cases, answers, strict=True):
        sequences = expected(MODEL, prompt, endless(width, width, 8))
        texts = [continuation(tokenizer, prompt, tokens) for tokens, _ in sequences]
        assert answer == {index: (text, "length") for index, text in enumerate(texts)}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_endpoint(http: httpx.Client, tokenizer: Any, stream: bool) -> None:
    messages = [{"role": "user", "content": TEXTS[0]}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "use_beam_search": True, "n": 3, "stream": stream}
    response = http.post("/v1/chat/completions", json=body | {"ignore_eos": True})
    assert response.status_code == 200, response.text
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    sequences = expected(MODEL, prompt, endless(3, 3, 8))
    part = "delta" if stream else "message"
    answer = collect(response, stream, lambda choice: choice[part].get("content") or "")
    texts = [continuation(tokenizer, prompt, tokens) for tokens, _ in sequences]
    assert answer == {index: (one, "length") for index, one in enumerate(texts)}


def collect(response: httpx.Response, stream: bool, text_of: Any) -> dict[int, tuple[str, str]]:
    """Index of a choice → its text and finish reason."""
    if stream:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    else:
        choices = response.json()["choices"]
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + text_of(choice)
        if choice["finish_reason"] is not None:
            reasons[choice["index"]] = choice["finish_reason"]
    return {index: (text, reasons[index]) for index, text in texts.items()}
