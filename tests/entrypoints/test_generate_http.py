"""POST /generate on a real server."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server import Server

BASE = {"prompt": "Hello! How are you", "max_tokens": 8, "temperature": 0}
BEAMS = BASE | {"use_beam_search": True, "best_of": 2}


@pytest.fixture
def plain(generate_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=generate_server.url, timeout=60) as client:
        yield client


def frames(plain: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    with plain.stream("POST", "/generate", json=BASE | fields | {"stream": True}) as response:
        assert response.status_code == 200
        assert "content-type" not in response.headers
        body = b"".join(response.iter_raw())
    assert body.endswith(b"\0")
    assert body.isascii()
    return [json.loads(frame) for frame in body.split(b"\0")[:-1]]


def test_whole_and_streamed(plain: httpx.Client) -> None:
    response = plain.post("/generate", json=BASE)
    assert response.headers["content-type"] == "application/json"
    whole = response.json()
    assert list(whole) == ["text"]
    (text,) = whole["text"]
    assert text.startswith(BASE["prompt"])
    assert len(text) > len(BASE["prompt"])
    found = frames(plain)
    assert found[-1] == whole
    for earlier, later in itertools.pairwise(found):
        assert later["text"][0].startswith(earlier["text"][0])


def test_several_sequences(plain: httpx.Client) -> None:
    fields = {"n": 3, "temperature": 1.0, "seed": 4}
    texts = plain.post("/generate", json=BASE | fields).json()["text"]
    assert len(set(texts)) == 3
    assert frames(plain, **fields)[-1]["text"] == texts


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_structured_outputs(plain: httpx.Client, name: str) -> None:
    fields = {name: {"choice": ["left", "right"]}}
    (text,) = plain.post("/generate", json=BASE | fields).json()["text"]
    assert text.removeprefix(BASE["prompt"]) in ("left", "right")
    assert frames(plain, **fields)[-1]["text"] == [text]


def test_the_documented_beam_search(plain: httpx.Client) -> None:
    body = (
        b'{"prompt":"hello","max_tokens":100,"top_p":1,"temperature":0,"ignore_eos":false,"top_k":-1,'
        b'"use_beam_search":true,"best_of":2,"length_penalty":2}'
    )
    response = plain.post("/generate", content=body)
    assert response.status_code == 200
    (text,) = response.json()["text"]
    assert text.startswith("hello")
    assert text != "hello"


@pytest.mark.parametrize("early_stopping", [True, False, "never", None])
def test_beams(plain: httpx.Client, early_stopping: bool | str | None) -> None:
    beams: dict[str, Any] = {"use_beam_search": True, "best_of": 4, "n": 3, "early_stopping": early_stopping}
    # long enough that not all of it comes while the server's event loop looks elsewhere: frames would be merged
    beams |= {"max_tokens": 100, "ignore_eos": True}
    whole = plain.post("/generate", json=BASE | beams).json()
    assert len(set(whole["text"])) == 3
    found = frames(plain, **beams)
    assert found[-1] == whole
    # the best so far after each step
    assert len(found) > 1
    assert all(len(frame["text"]) == 3 for frame in found)
    # without best_of there are n beams
    assert len(plain.post("/generate", json=BASE | {"use_beam_search": True, "n": 2}).json()["text"]) == 2


def test_the_best_of_several_samples(plain: httpx.Client) -> None:
    fields = {"n": 2, "best_of": 4, "temperature": 1.0, "seed": 4}
    texts = plain.post("/generate", json=BASE | fields).json()["text"]
    everything = plain.post("/generate", json=BASE | fields | {"n": 4}).json()["text"]
    assert len(texts) == 2
    assert set(texts) < set(everything)
    found = frames(plain, **fields)
    assert found[-1]["text"] == texts
    assert all(len(frame["text"]) == 2 for frame in found)


def test_the_documented_example_without_a_content_type(plain: httpx.Client) -> None:
    body = b'{"prompt":"hello","max_tokens":10,"temperature":0,"ignore_eos":false,"presence_penalty":2}'
    response = plain.post("/generate", content=body)
    assert response.status_code == 200
    assert response.json()["text"][0].startswith("hello")


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(plain: httpx.Client, stream: bool) -> None:
    rows: list[tuple[Any, str]] = [
        (BASE | {"model": "x"}, "`model`"),
        ({"max_tokens": 3}, "`prompt`"),
        (BASE | {"prompt": ["a", "b"]}, "`prompt`"),
        (BASE | {"prompt": ""}, "empty"),
        (BASE | {"temperature": -1}, "temperature must be non-negative"),
        (BASE | {"temperature": "x"}, "temperature"),
        (BASE | {"prompt": "one two " * 400}, "maximum context length"),
        (BASE | {"use_beam_search": True}, "best_of must be greater than 1 when using beam search. Got 1."),
        (BASE | {"use_beam_search": 1}, "use_beam_search"),
        (BEAMS | {"temperature": 1}, "temperature must be 0 when using beam search."),
        (BEAMS | {"top_p": 0.9}, "top_p must be 1 when using beam search."),
        (BEAMS | {"top_k": 5}, "top_k must be -1 when using beam search."),
        (BEAMS | {"early_stopping": "x"}, "early_stopping must be True, False, or 'never', got x."),
        (BEAMS | {"stop": ["x"]}, "stop cannot be used with beam search."),
        (BEAMS | {"logprobs": 1}, "logprobs cannot be used with beam search."),
        (BEAMS | {"n": 3}, "best_of must be greater than or equal to n, got n=3 and best_of=2."),
        (BEAMS | {"best_of": 65}, "max-num-seqs"),
        (BEAMS | {"best_of": 100_000}, "must be at most"),
        (BASE | {"length_penalty": 2}, "length_penalty is not effective"),
        (BASE | {"early_stopping": True}, "early_stopping is not effective"),
        (BASE | {"n": 2}, "n must be 1 when using greedy sampling, got 2."),
        (BASE | {"priority": 1}, "`priority`"),
        (BASE | {"cache_salt": "x"}, "`cache_salt`"),
        (BASE | {"output_kind": 1}, "`output_kind`"),
        (BASE | {"stream": 3}, "`stream`"),
        (BASE | {"structured_outputs": {"regexp": "a"}}, "`structured_outputs` has unknown fields ['regexp']"),
        (BASE | {"guided_decoding": {}}, "You must use one kind of structured outputs constraint"),
        (BASE | {"guided_decoding": {"regex": "a", "choice": ["a"]}}, "multiple are specified"),
        (BASE | {"structured_outputs": {"regex": "("}}, "regex cannot be compiled"),
        (BASE | {"prompt": "a" * 20_000}, "your prompt contains 20000 characters (more than 6656 characters"),
    ]
    for body, text in rows:
        response = plain.post("/generate", json={"stream": stream} | body)
        assert response.status_code == 400, (body, response.text)
        assert text in response.json()["message"]
    for fields, param in (
        ({"temperature": -1}, "temperature"),
        ({"temperature": "x"}, "temperature"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ):
        error = plain.post("/generate", json=BASE | fields | {"stream": stream}).json()["error"]
        assert error["param"] == param, error
    assert plain.post("/generate", content=b"{x").status_code == 400
    assert plain.post("/generate", content=b"[]").status_code == 400
    neutral = {"use_beam_search": False, "best_of": 1, "length_penalty": 1.0, "early_stopping": False}
    nulls = {"stream": None, "use_beam_search": None, "best_of": None, "length_penalty": None, "early_stopping": None}
    for fields in (neutral, nulls):
        assert plain.post("/generate", json=BASE | fields).status_code == 200


def test_what_else_there_is(plain: httpx.Client) -> None:
    assert (plain.get("/health").status_code, plain.get("/health").content) == (200, b"")
    assert plain.get("/v1/models").status_code == 404
    assert plain.get("/metrics").status_code == 404
