"""/openapi.json describes every field of requests and answers as they are; /docs shows it without other servers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI

from ascend_vllm.args.tables.server import GenerateServerArgs
from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.entrypoints.generate.app import build_app as build_generate_app
from tests.answer_schemas import check_answer
from tests.entrypoints.conftest import KEY
from tests.entrypoints.test_api_keys_http import Engine, make_app
from tests.server import Server

Schema = dict[str, Any]

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "Hello"}]
TWO_MORE_TOKENS = {"max_tokens": 2, "ignore_eos": True}

# bodies that are answered by 200
BODIES: list[tuple[str, Schema]] = [
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "return_token_ids": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "prompt_logprobs": 1, "temperature": 0}),
    (CHAT, {"messages": SAID, **TWO_MORE_TOKENS}),
    (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, **TWO_MORE_TOKENS}),
    (CHAT, {"messages": SAID, "return_token_ids": True, "n": 2, **TWO_MORE_TOKENS}),
    (CHAT, {"messages": SAID, "stream": True, **TWO_MORE_TOKENS}),
    (f"{CHAT}/batch", {"messages": [SAID, SAID], **TWO_MORE_TOKENS}),
    ("/v1/messages", {"model": "tiny", "messages": SAID, "max_tokens": 4}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": SAID}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
    (
        "/v1/responses",
        {
            "input": SAID,
            "max_output_tokens": 4,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "metadata": {"a": "b"},
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "text"}},
            "enable_response_messages": True,
        },
    ),
    ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("/tokenize", {"messages": SAID}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/invocations", {"prompt": "Hello"}),
]
WRONG_BODIES: list[tuple[str, Schema, int]] = [
    ("/v1/completions", {"prompt": "Hello", "temperature": -1}, 400),
    (CHAT, {"messages": "Hello"}, 400),
    (CHAT, {"messages": SAID, "model": "absent"}, 404),
    ("/v1/messages", {"model": "tiny", "messages": SAID}, 400),
    ("/v1/messages", {"model": "absent", "messages": SAID, "max_tokens": 1}, 404),
    ("/v1/responses", {}, 400),
    ("/v1/responses", {"input": "a", "previous_response_id": "resp_absent"}, 404),
    ("/tokenize", {}, 400),
    ("/detokenize", {}, 400),
]
# what a body needs beside the field that is wrong
NEEDED: dict[str, Schema] = {
    "/v1/completions": {"prompt": "Hello"},
    CHAT: {"messages": SAID, "logprobs": True},
    "/v1/messages": {"model": "tiny", "messages": SAID, "max_tokens": 4},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": SAID},
    "/v1/responses": {"input": "Hello", "include": ["message.output_text.logprobs"]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [5]},
    "/generate": {"prompt": "Hello", "max_tokens": 2},
}
# other names of fields in errors
CALLED = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}


def embedding_app() -> FastAPI:
    return make_app(pooler=PoolerConfig(task="embed", convert="embed"))


def classifying_app() -> FastAPI:
    return make_app(pooler=PoolerConfig(task="classify", convert="classify", labels=("a",)))


def mindie_app() -> FastAPI:
    return build_generate_app(Engine(), GenerateServerArgs(generate_format="mindie"))  # type: ignore[arg-type]


async def document_of(app: FastAPI) -> Schema:
    """The document of an application that no server has."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        answer = await http.get("/openapi.json", headers={"Authorization": "Bearer sesame"})
    document: Schema = answer.raise_for_status().json()
    return document


def read_document(server: Server) -> Schema:
    document: Schema = httpx.get(f"{server.url}/openapi.json", timeout=60).raise_for_status().json()
    return document


def body_of(document: Schema, operation: Schema) -> Schema | None:
    """The schema of an operation's body, None if it has none."""
    if "requestBody" not in operation:
        return None
    schema: Schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return resolved(document, schema)


def resolved(document: Schema, schema: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def operations_of(document: Schema) -> Iterator[tuple[str, Schema]]:
    """Method and path of each operation."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def undescribed(document: Schema) -> Iterator[str]:
    """All that the document says nothing about."""
    for name, operation in operations_of(document):
        if not operation.get("description"):
            yield name
        for parameter in operation.get("parameters", ()):
            if parameter["in"] == "query" and not parameter["schema"].get("description"):
                yield f"{name}?{parameter['name']}"
        body = body_of(document, operation)
        seen: set[str] = set()
        if body is not None:
            yield from (f"{name} {field}" for field in undescribed_fields(document, body, "body", seen))
        for status, answer in operation["responses"].items():
            for content in answer.get("content", {}).values():
                if not content["schema"]:
                    yield f"{name} → {status}"


def undescribed_fields(document: Schema, schema: Schema, place: str, seen: set[str]) -> Iterator[str]:
    """The fields without a description in a schema and all that it refers to."""
    if "$ref" in schema:
        if schema["$ref"] in seen:
            return
        seen.add(schema["$ref"])
        schema = resolved(document, schema)
    for field, value in schema.get("properties", {}).items():
        if not value.get("description"):
            yield f"{place}.{field}"
        yield from undescribed_fields(document, value, f"{place}.{field}", seen)
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), schema.get("items")]
    for one in inner:
        if isinstance(one, dict):
            yield from undescribed_fields(document, one, place, seen)


async def test_every_field_is_described(
    openai_server: Server, generate_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/absent")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    documents = [read_document(openai_server), read_document(generate_server)]
    documents += [await document_of(app) for app in (make_app(), embedding_app(), classifying_app(), mindie_app())]
    names = [name for document in documents for name, _ in operations_of(document)]
    assert {"POST /v1/embeddings", "POST /classify", "POST /generate", "POST /sleep", f"POST {CHAT}"} <= set(names)
    assert [one for document in documents for one in undescribed(document)] == []
    chat = documents[0]["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert chat["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0}
    assert chat["stop"]["anyOf"][1]["maxItems"] == 1024
    assert chat["mm_processor_kwargs"]["description"].startswith("Not supported: ")


# keyword of a limit → a value beyond it
BEYOND = {
    "minimum": lambda limit: limit - 1,
    "exclusiveMinimum": lambda limit: limit,
    "maximum": lambda limit: limit + 1,
    "minLength": lambda limit: "a" * (limit - 1),
    "maxLength": lambda limit: "a" * (limit + 1),
    "minItems": lambda limit: ["a"] * (limit - 1),
    "maxProperties": lambda limit: {str(number): 0 for number in range(limit + 1)},
}


def values_beyond(schema: Schema) -> Iterator[tuple[str, Any]]:
    """For each limit of a field: its keyword, and a value that it does not allow."""
    for choice in schema.get("anyOf", [schema]):
        for keyword, limit in choice.items():
            if keyword in BEYOND:
                yield keyword, BEYOND[keyword](limit)
            elif keyword == "maxItems":
                item = "a" if choice["items"].get("type") == "string" else 1
                yield keyword, [item] * (limit + 1)


def test_what_is_beyond_a_limit_is_refused(openai_server: Server, generate_server: Server) -> None:
    found: dict[str, int] = {}
    wrong = []
    for server in (openai_server, generate_server):
        document = read_document(server)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for path, needed in NEEDED.items():
                if path not in document["paths"]:
                    continue
                fields = (body_of(document, document["paths"][path]["post"]) or {})["properties"]
                for name, schema in fields.items():
                    for keyword, value in values_beyond(schema):
                        found[path] = found.get(path, 0) + 1
                        answer = http.post(path, json=needed | {name: value})
                        is_named = name in answer.text or CALLED.get(name, name) in answer.text
                        if answer.status_code != 400 or not is_named:
                            wrong.append((path, name, keyword, answer.status_code, answer.text[:200]))
    assert not wrong
    assert min(found[path] for path in ("/v1/completions", CHAT, "/v1/responses", "/generate")) > 20, found


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_as_described(http: httpx.Client, path: str, body: Schema) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    check_answer(http, answer)


def test_examples_are_answered(openai_server: Server, generate_server: Server) -> None:
    for server in (openai_server, generate_server):
        document = read_document(server)
        for path in NEEDED.keys() & document["paths"].keys():
            (example,) = (body_of(document, document["paths"][path]["post"]) or {})["examples"]
            named = example | ({"model": "tiny"} if "model" in example else {})
            answer = httpx.post(f"{server.url}{path}", json=named, timeout=60)
            assert answer.status_code == 200, (path, answer.text)


def test_other_answers_are_as_described(http: httpx.Client, generate_server: Server) -> None:
    for path, body, status in WRONG_BODIES:
        answer = http.post(path, json=body)
        assert answer.status_code == status, (path, body, answer.text)
        check_answer(http, answer)
    for path in ("/v1/models", "/version", "/metrics", "/load"):
        check_answer(http, http.get(path))
    stored = http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2}).json()
    for response_id, status in ((stored["id"], 200), ("resp_absent", 404)):
        answer = http.get(f"/v1/responses/{response_id}")
        assert answer.status_code == status
        check_answer(http, answer, "/v1/responses/{response_id}")
    with httpx.Client(base_url=generate_server.url, timeout=60) as client:
        for value, status in (("Hello", 200), (1, 400)):
            answer = client.post("/generate", json={"prompt": value, "max_tokens": 2})
            assert answer.status_code == status
            check_answer(client, answer)


def test_the_page_needs_no_other_server(
    openai_server: Server, guarded_server: Server, generate_server: Server
) -> None:
    for server in (openai_server, guarded_server, generate_server):
        with httpx.Client(timeout=60) as http:
            page = http.get(f"{server.url}/docs")
            assert page.headers["content-type"].startswith("text/html")
            assert re.search("https?:", page.text) is None and "//" not in re.sub(r"(?m)^//.*", "", page.text)
            loaded = re.findall(r'(?:src|href)="(?!data:)([^"]*)"', page.text)
            assert len(loaded) == 2
            for address in loaded:
                assert http.get(urljoin(f"{server.url}/docs", address)).status_code == 200
            script = http.get(f"{server.url}/docs/swagger-ui-bundle.js")
            assert "SwaggerUIBundle" in script.text and "javascript" in script.headers["content-type"]
            assert http.get(f"{server.url}/redoc").text == page.text


def test_a_key_is_for_the_document_not_for_the_page(guarded_server: Server) -> None:
    with httpx.Client(base_url=guarded_server.url, timeout=60) as http:
        assert http.get("/openapi.json").status_code == 401
        http.headers["Authorization"] = f"Bearer {KEY}"
        document = http.get("/openapi.json").json()
        check_answer(http, http.get("/tokenizer_info"))
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    needed = {name: operation["security"] for name, operation in operations_of(document)}
    assert needed["GET /health"] == []
    assert needed[f"POST {CHAT}"] == [{"key": []}]
    assert needed["POST /v1/messages"] == [{"key": []}, {"x-api-key": []}]
    assert document["paths"][CHAT]["post"]["responses"]["401"]["content"]


async def test_the_document_says_what_a_key_is_for() -> None:
    document = await document_of(make_app(api_key_scope="inference", root_path="/llm"))
    needed = {name: operation["security"] for name, operation in operations_of(document)}
    assert (needed["POST /tokenize"], needed["GET /v1/models"]) == ([], [{"key": []}])
    assert document["servers"] == [{"url": "/llm"}]
