"""Pooling endpoints over real sockets: numbers against transformers, shapes and errors as vLLM 0.32 has them."""

from __future__ import annotations

import base64
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from tests.answer_schemas import check_answer
from tests.pooling_models import classifier, hidden_states, scores, unit
from tests.raw_requests import post_raw
from tests.server import OPENAI_SERVER, ROOT, Server, is_idle, metric, running, wait_until
from tests.tiny_models import tiny_model

FLAGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "32M", "--served-model-name", "tiny", "alias"]
TEXTS = ["The quick brown fox", "Hello!", "keys and values"]
EMBEDDINGS = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def embedding_server() -> Iterator[Server]:
    """A generation checkpoint that pools, and lets its embeddings be cut."""
    flags = ["--model", tiny_model("qwen2"), "--convert", "embed", "--enable-prefix-caching", "--api-key", "key"]
    flags += ["--enable-prompt-tokens-details", "--hf-overrides", '{"matryoshka_dimensions": [16, 32]}']
    with running(OPENAI_SERVER, [*FLAGS, *flags]) as server:
        yield server


@pytest.fixture(scope="module")
def cross_encoder() -> Iterator[Server]:
    """A classifier of one label, which trusts the templates of requests."""
    flags = ["--model", classifier("llama", num_labels=1), "--trust-request-chat-template"]
    with running(OPENAI_SERVER, [*FLAGS, *flags]) as server:
        yield server


@pytest.fixture
def embedder(embedding_server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": "Bearer key"}
    with httpx.Client(base_url=embedding_server.url, timeout=60, headers=headers) as client:
        yield client


@pytest.fixture
def scorer(cross_encoder: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cross_encoder.url, timeout=60) as client:
        yield client


def ids(text: str) -> list[int]:
    return list(transformers.AutoTokenizer.from_pretrained(tiny_model("qwen2"))(text).input_ids)


def state(token_ids: list[int]) -> torch.Tensor:
    return hidden_states(tiny_model("qwen2"), token_ids)[-1]


def embedding(token_ids: list[int]) -> torch.Tensor:
    return unit(state(token_ids))


def close(result: Any, expected: torch.Tensor) -> bool:
    return torch.allclose(torch.tensor(result), expected, rtol=0, atol=1e-5)


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


# ---- embeddings ----------------------------------------------------------------------------------------------


def test_the_official_client_gets_floats_and_base64(embedding_server: Server) -> None:
    with openai.OpenAI(base_url=f"{embedding_server.url}/v1", api_key="key", max_retries=0) as client:
        # without encoding_format the client asks for base64 and decodes it
        for options in ({}, {"encoding_format": "float"}):
            answer = client.embeddings.create(model="alias", input=TEXTS, **options)  # type: ignore[arg-type]
            assert (answer.object, answer.model) == ("list", "tiny")
            assert [item.index for item in answer.data] == [0, 1, 2]
            for text, item in zip(TEXTS, answer.data, strict=True):
                assert item.object == "embedding"
                assert close(item.embedding, embedding(ids(text)))
            count = sum(len(ids(text)) for text in TEXTS)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
        cut = client.embeddings.create(model="tiny", input="Hello!", dimensions=16)
        assert close(cut.data[0].embedding, unit(state(ids("Hello!"))[:16]))
        with pytest.raises(openai.BadRequestError, match=r"only supports Matryoshka dimensions \[16, 32\], got 17"):
            client.embeddings.create(model="tiny", input="a", dimensions=17)
        with pytest.raises(openai.NotFoundError, match="`nope` does not exist"):
            client.embeddings.create(model="nope", input="a")


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"input": "Hello!"}, ["Hello!"]),
        ({"input": [5, 6, 7]}, [[5, 6, 7]]),
        ({"input": [[5, 6, 7], [8]]}, [[5, 6, 7], [8]]),
        ({"input": [5, 6, 7, 8], "truncate_prompt_tokens": 2}, [[5, 6]]),
        ({"input": [5, 6, 7, 8], "truncate_prompt_tokens": 2, "truncation_side": "left"}, [[7, 8]]),
        ({"input": [5] * 600, "truncate_prompt_tokens": -1}, [[5] * 512]),
        ({"input": [5] * 512}, [[5] * 512]),
        ({"messages": MESSAGES}, ["<|im_start|>user\nhi<|im_end|>\n"]),
        (
            {"messages": MESSAGES, "add_generation_prompt": True},
            ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"],
        ),
    ],
)
def test_forms_of_prompts(embedder: httpx.Client, body: dict[str, Any], prompts: list[str | list[int]]) -> None:
    # not where the parameters are: every worker of pytest would make the model
    expected = [ids(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    answer = ok(embedder.post(EMBEDDINGS, json=body))
    assert answer.keys() == {"id", "object", "created", "model", "data", "usage"}
    assert answer["id"].startswith("embd-")
    assert len(answer["id"]) == len("embd-") + 16
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, expected))
    assert answer["usage"]["completion_tokens"] == 0
    assert [item.keys() for item in answer["data"]] == [{"index", "object", "embedding"}] * len(expected)
    for item, prompt in zip(answer["data"], expected, strict=True):
        assert close(item["embedding"], embedding(prompt))


def test_encodings(embedder: httpx.Client) -> None:
    expected = embedding([5, 6, 7])
    plain = {"input": [5, 6, 7], "encoding_format": "base64"}
    for options, kind in (
        ({}, "<f4"),
        ({"endianness": "big"}, ">f4"),
        ({"embed_dtype": "float16"}, "<f2"),
        ({"embed_dtype": "float16", "endianness": "big"}, ">f2"),
    ):
        (item,) = ok(embedder.post(EMBEDDINGS, json=plain | options))["data"]
        vector = np.frombuffer(base64.b64decode(item["embedding"]), kind).astype(np.float32)
        assert np.allclose(vector, expected, rtol=0, atol=1e-5 if "f4" in kind else 1e-3)
    (item,) = ok(embedder.post(EMBEDDINGS, json=plain | {"embed_dtype": "bfloat16"}))["data"]
    (exact,) = ok(embedder.post(EMBEDDINGS, json={"input": [5, 6, 7]}))["data"]
    halves = torch.frombuffer(bytearray(base64.b64decode(item["embedding"])), dtype=torch.bfloat16)
    assert torch.equal(halves, torch.tensor(exact["embedding"]).bfloat16())


def test_an_answer_of_bytes(embedder: httpx.Client) -> None:
    body = {"input": [[5, 6, 7], [8]], "encoding_format": "bytes"}
    response = embedder.post(EMBEDDINGS, json=body)
    assert response.headers["content-type"] == "application/octet-stream"
    told = json.loads(response.headers["metadata"])
    assert told["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert [(item["start"], item["end"], item["shape"]) for item in told["data"]] == [
        (0, 256, [64]),
        (256, 512, [64]),
    ]
    for item, prompt in zip(told["data"], ([5, 6, 7], [8]), strict=True):
        vector = np.frombuffer(response.content[item["start"] : item["end"]], np.float32)
        assert close(vector, embedding(prompt))
    only = embedder.post(EMBEDDINGS, json=body | {"encoding_format": "bytes_only"})
    assert only.content == response.content
    assert "metadata" not in only.headers


def test_activation_under_its_names(embedder: httpx.Client) -> None:
    for name in ("use_activation", "normalize"):
        (item,) = ok(embedder.post(EMBEDDINGS, json={"input": [5, 6, 7], name: False}))["data"]
        assert close(item["embedding"], state([5, 6, 7]))
        (item,) = ok(embedder.post("/pooling", json={"input": [5, 6, 7], name: True}))["data"]
        assert close(item["data"], embedding([5, 6, 7]))


def test_ids_cached_tokens_and_unknown_fields(embedder: httpx.Client) -> None:
    prompt = list(range(5, 85))
    body = {"input": [prompt], "request_id": "abc", "user": "me", "additional_data": {"a": 1}, "cache_salt": "s"}
    details = [ok(embedder.post(EMBEDDINGS, json=body))["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details == [{"cached_tokens": 0}, {"cached_tokens": 64}]
    assert ok(embedder.post(EMBEDDINGS, json=body))["id"] == "embd-abc"
    answer = embedder.post(EMBEDDINGS, json={"input": "a"}, headers={"x-request-id": "xyz"})
    assert answer.json()["id"] == "embd-xyz"


@pytest.mark.parametrize("path", ["/pooling", "/classify"])
def test_a_request_brings_its_own_chat_template(scorer: httpx.Client, path: str) -> None:
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}{{ word }}"}
    answer = scorer.post(path, json=body | {"chat_template_kwargs": {"word": " fox"}})
    assert answer.status_code == 200, answer.text
    plain = scorer.post(path, json={"input": "hi fox", "add_special_tokens": False})
    assert answer.json()["data"] == plain.json()["data"]
    error = scorer.post(path, json=body | {"chat_template": "{{ 'a' * 10 ** 10 }}"})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "chat_template"


LIMIT = "This model's maximum context length is 512 tokens. However, your prompt contains 513 input tokens"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (EMBEDDINGS, {}, "'loc': 'body.input', 'msg': 'Field required'"),
        (EMBEDDINGS, {"input": []}, "You must pass at least one prompt"),
        (EMBEDDINGS, {"input": ""}, "The decoder prompt cannot be empty"),
        (EMBEDDINGS, {"input": ["a", ""]}, "The decoder prompt cannot be empty"),
        (EMBEDDINGS, {"input": [[]]}, "The decoder prompt cannot be empty"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "The decoder prompt cannot be empty"),
        (EMBEDDINGS, {"input": "a", "messages": MESSAGES}, "Exactly one of `input` and `messages`"),
        (EMBEDDINGS, {"messages": []}, "Cannot apply chat template to an empty conversation"),
        (EMBEDDINGS, {"messages": MESSAGES, "chat_template": "x"}, "--trust-request-chat-template is not set"),
        (EMBEDDINGS, {"input": ["a", [1]]}, "validation errors"),
        (EMBEDDINGS, {"input": [999]}, "Token id 999 is out of vocabulary"),
        (EMBEDDINGS, {"input": [-1]}, "Token id -1 is out of vocabulary"),
        (EMBEDDINGS, {"input": [5] * 513}, LIMIT),
        (EMBEDDINGS, {"input": "a b " * 100_000}, "prompt contains 400000 characters"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 600}, "Please request a smaller truncation size."),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": -2}, "greater than or equal to -1"),
        (EMBEDDINGS, {"input": "a", "truncation_side": "up"}, "Input should be 'left' or 'right'"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "zzz"}, "'float', 'base64', 'bytes' or 'bytes_only'"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "only supports dimensions in range [1, 64], got 0."),
        (EMBEDDINGS, {"input": "a", "padding": True}, "`padding` is not supported"),
        (EMBEDDINGS, {"input": "a", "priority": 3}, "Priority scheduling is not enabled"),
        (
            "/pooling",
            {"input": "a", "task": "classify"},
            "Unsupported task: 'classify' Supported tasks: ['token_embed",
        ),
        ("/pooling", {"input": "a", "task": "token_embed"}, "via --pooler-config.task token_embed."),
        ("/pooling", {"input": "a", "task": "score"}, "`score` task was removed; use `classify` instead."),
        ("/pooling", {"input": "a", "task": "zzz"}, "validation error"),
        ("/pooling", {"input": "a", "dimensions": 16}, "dimensions is currently not supported"),
        ("/score", {"text_1": "a"}, "'loc': 'body.text_2', 'msg': 'Field required'"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "Input lengths must be either 1:1, 1:N or N:N"),
        ("/score", {"text_1": [], "text_2": "a"}, "At least one text element must be given"),
        ("/score", {"text_1": "a", "text_2": []}, "At least one text_pair element must be given"),
        ("/score", {"text_1": [1, 2], "text_2": "a"}, "Input should be a valid string"),
        ("/score", {"text_1": "", "text_2": "a"}, "The decoder prompt cannot be empty"),
        ("/rerank", {"query": "a", "documents": []}, "At least one text_pair element must be given"),
        ("/rerank", {"query": "a"}, "Field required"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "greater than or equal to 0"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": -1}, "must be a non-negative integer"),
        ("/score", {"text_1": "a", "text_2": "b", "max_tokens_per_query": 512}, "must be less than max_model_len"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "x"}, "`instruction` is not supported"),
    ],
)
def test_wrong_requests(embedder: httpx.Client, path: str, body: dict[str, Any], words: str) -> None:
    response = embedder.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert error["type"] in ("BadRequestError", "Bad Request")
    assert error["code"] == 400


def test_other_endpoints_are_unknown(embedder: httpx.Client, scorer: httpx.Client, http: httpx.Client) -> None:
    for client, paths in (
        (embedder, ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/classify")),
        (scorer, ("/v1/completions", EMBEDDINGS)),
        (http, (EMBEDDINGS, "/pooling", "/classify", "/score", "/rerank", "/v2/rerank")),
    ):
        for path in paths:
            response = client.post(path, json={"input": "a", "prompt": "a"})
            assert response.status_code == 404, path
            assert response.json()["error"]["message"].startswith(f"Not Found: there is no route {path}."), path
    assert ok(embedder.post("/tokenize", json={"prompt": "Hello!"}))["tokens"] == ids("Hello!")
    assert [card["id"] for card in ok(embedder.get("/v1/models"))["data"]] == ["tiny", "alias"]
    documented = ok(embedder.get("/openapi.json"))["paths"].keys()
    assert {EMBEDDINGS, "/pooling", "/score", "/v1/rerank"} <= documented


def test_answers_are_as_described(embedder: httpx.Client, scorer: httpx.Client) -> None:
    pair = {"text_1": "a", "text_2": ["b", "c"]}
    ranking = {"query": "a", "documents": ["b", "c"]}
    for client, path, body, status in (
        *(
            (embedder, EMBEDDINGS, {"input": TEXTS, "encoding_format": form}, 200)
            for form in ("float", "base64", "bytes")
        ),
        (embedder, "/pooling", {"messages": MESSAGES}, 200),
        (embedder, "/score", pair, 200),
        (embedder, "/v2/rerank", ranking, 200),
        (embedder, EMBEDDINGS, {"input": "a", "dimensions": 17}, 400),
        (scorer, "/classify", {"input": TEXTS}, 200),
        (scorer, "/pooling", {"input": "a"}, 200),
        (scorer, "/rerank", {}, 400),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == status, answer.text
        check_answer(client, answer)


def test_invocations_lead_to_what_there_is(embedder: httpx.Client, scorer: httpx.Client) -> None:
    (item,) = ok(embedder.post("/invocations", json={"input": [5, 6, 7]}))["data"]
    assert close(item["embedding"], embedding([5, 6, 7]))
    assert ok(embedder.post("/invocations", json={"messages": MESSAGES}))["id"].startswith("embd-")
    assert ok(embedder.post("/invocations", json={"text_1": "a", "text_2": "a"}))["id"].startswith("score-")
    assert ok(scorer.post("/invocations", json={"input": "a"}))["id"].startswith("classify-")
    response = embedder.post("/invocations", json={"prompt": "a"})
    assert response.status_code == 400
    assert "Cannot find suitable handler for request." in response.json()["error"]["message"]


def test_keys_guard_the_second_version_too(embedding_server: Server) -> None:
    for path in (EMBEDDINGS, "/v2/rerank", "/invocations"):
        assert httpx.post(f"{embedding_server.url}{path}", json={}, timeout=60).status_code == 401


# ---- scores --------------------------------------------------------------------------------------------------


def test_scores_of_embeddings_are_cosines(embedder: httpx.Client) -> None:
    vectors = torch.stack([embedding(ids(text)) for text in TEXTS])
    expected = vectors @ vectors[0]
    for path, names in (
        ("/score", ("text_1", "text_2")),
        ("/v1/score", ("data_1", "data_2")),
        ("/score", ("queries", "documents")),
        ("/score", ("queries", "items")),
    ):
        answer = ok(embedder.post(path, json={names[0]: TEXTS[0], names[1]: TEXTS}))
        assert answer["id"].startswith("score-")
        assert [(item["index"], item["object"]) for item in answer["data"]] == [(n, "score") for n in range(3)]
        assert close([item["score"] for item in answer["data"]], expected)
        assert answer["usage"]["prompt_tokens"] == sum(len(ids(text)) for text in [TEXTS[0], *TEXTS])
    pairs = ok(embedder.post("/score", json={"text_1": TEXTS[:2], "text_2": TEXTS[1:]}))["data"]
    assert close([item["score"] for item in pairs], (vectors[:2] * vectors[1:]).sum(-1))


def test_rerank_puts_the_best_first(embedder: httpx.Client) -> None:
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = ok(embedder.post(path, json={"query": TEXTS[1], "documents": TEXTS}))
        assert answer.keys() == {"id", "model", "usage", "results"}
        assert answer["usage"].keys() == {"prompt_tokens", "total_tokens"}
        results = answer["results"]
        assert results[0]["index"] == 1
        assert results[0]["document"] == {"text": TEXTS[1], "multi_modal": None}
        assert close([results[0]["relevance_score"]], torch.ones(1))
        found = [item["relevance_score"] for item in results]
        assert found == sorted(found, reverse=True)
        assert sorted(item["index"] for item in results) == [0, 1, 2]
    two = ok(embedder.post("/rerank", json={"query": TEXTS[1], "documents": TEXTS, "top_n": 2}))["results"]
    assert two == results[:2]


def test_each_side_of_a_pair_can_be_cut(embedder: httpx.Client) -> None:
    long = " ".join(TEXTS) * 100
    body = {"query": long, "documents": [TEXTS[0], long], "max_tokens_per_query": 7, "max_tokens_per_doc": 3}
    answer = ok(embedder.post("/rerank", json=body))
    assert answer["usage"]["prompt_tokens"] == 7 + 2 * 3
    assert {item["document"]["text"] for item in answer["results"]} == {TEXTS[0], long}
    vectors = [embedding(ids(long)[:count]) for count in (7, 3)]
    found = {item["index"]: item["relevance_score"] for item in answer["results"]}
    assert close([found[1]], vectors[0] @ vectors[1])


def test_a_cross_encoder_scores_pairs_and_has_a_label(scorer: httpx.Client) -> None:
    directory = classifier("llama", num_labels=1)
    prompts = [[*ids(TEXTS[0]), *ids(text)] for text in TEXTS]
    expected = torch.cat([scores(directory, prompt) for prompt in prompts])
    body = {"text_1": TEXTS[0], "text_2": TEXTS}
    answer = ok(scorer.post("/score", json=body))
    assert close([item["score"] for item in answer["data"]], torch.sigmoid(expected))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    raw = ok(scorer.post("/score", json=body | {"use_activation": False}))["data"]
    assert close([item["score"] for item in raw], expected)
    # both texts are cut to the same length
    (cut,) = ok(scorer.post("/score", json=body | {"text_2": TEXTS[2], "truncate_prompt_tokens": 4}))["data"]
    kept = [*ids(TEXTS[0])[:2], *ids(TEXTS[2])[:2]]
    assert close([cut["score"]], torch.sigmoid(scores(directory, kept)))
    best = ok(scorer.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS, "top_n": 1}))["results"]
    assert best[0]["index"] == int(expected.argmax())
    (item,) = ok(scorer.post("/classify", json={"input": [5, 6, 7]}))["data"]
    assert item.pop("probs") == pytest.approx(torch.sigmoid(scores(directory, [5, 6, 7])).tolist(), abs=1e-5)
    assert item == {"index": 0, "label": "cat", "num_classes": 1}
    (item,) = ok(scorer.post("/pooling", json={"input": [5, 6, 7], "task": "classify"}))["data"]
    assert close(item["data"], torch.sigmoid(scores(directory, [5, 6, 7])))


# ---- the engine behind it ------------------------------------------------------------------------------------


def test_metrics_count_prompts_and_no_generated_tokens(scorer: httpx.Client) -> None:
    before = [metric(scorer, name) for name in ("prompt_tokens_total", "time_to_first_token_seconds_count")]
    ok(scorer.post("/classify", json={"input": [[5, 6, 7], [8]]}))
    after = [metric(scorer, name) for name in ("prompt_tokens_total", "time_to_first_token_seconds_count")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [4, 2]
    assert metric(scorer, "generation_tokens_total") == 0
    assert wait_until(lambda: is_idle(scorer))


def test_a_client_that_goes_away_takes_its_prompts_along(cross_encoder: Server, scorer: httpx.Client) -> None:
    body: dict[str, object] = {"input": [[5 + number % 100] * 500 for number in range(1000)]}
    with post_raw(cross_encoder, "/classify", body):
        assert wait_until(lambda: metric(scorer, "num_requests_running") > 0)
    assert wait_until(lambda: is_idle(scorer))
    text = scorer.get("/metrics").text
    counted = re.search(r'^vllm:request_success_total\{.*"abort".*\} (\S+)$', text, re.MULTILINE)
    assert counted is not None
    assert float(counted[1]) > 0
    assert ok(scorer.post("/classify", json={"input": "a"}))["data"][0]["label"] == "cat"


def test_a_file_of_requests(tmp_path: pathlib.Path) -> None:
    requests = [
        {"custom_id": "e", "method": "POST", "url": EMBEDDINGS, "body": {"input": [5, 6, 7]}},
        {"custom_id": "s", "method": "POST", "url": "/v1/score", "body": {"text_1": "a", "text_2": "a"}},
        {"custom_id": "r", "method": "POST", "url": "/v1/rerank", "body": {"query": "a", "documents": ["b", "a"]}},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, requests)))
    command = [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "run-batch", "--model", tiny_model("qwen2")]
    command += ["--task", "embed", "--dtype", "float32", "--kv-cache-memory-bytes", "32M"]
    command += ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    bodies = {line["custom_id"]: line["response"]["body"] for line in lines}
    assert close(bodies["e"]["data"][0]["embedding"], embedding([5, 6, 7]))
    assert close([bodies["s"]["data"][0]["score"]], torch.ones(1))
    assert bodies["r"]["results"][0]["index"] == 1
    assert lines[3]["response"]["status_code"] == 404
    assert lines[3]["error"]["error"]["type"] == "NotFoundError"


def test_invocations_lead_to_what_the_body_is_for(embedder: httpx.Client, scorer: httpx.Client) -> None:
    for client, path, body in (
        (embedder, "/v1/embeddings", {"input": "Hello"}),
        (embedder, "/v1/embeddings", {"messages": [{"role": "user", "content": "Hello"}]}),
        (embedder, "/rerank", {"query": "Hello", "documents": ["a", "b"]}),
        (scorer, "/score", {"text_1": "Hello", "text_2": "Good bye"}),
        (scorer, "/classify", {"input": "Hello"}),
    ):
        direct, through = client.post(path, json=body), client.post("/invocations", json=body)
        assert (direct.status_code, through.status_code) == (200, 200), through.text
        changing = ("id", "created")
        assert {k: v for k, v in through.json().items() if k not in changing} == {
            k: v for k, v in direct.json().items() if k not in changing
        }
    for body in ({}, []):
        assert embedder.post("/invocations", json=body).status_code == 400
