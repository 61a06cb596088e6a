"""Routes beside generation: health, version, models, metrics, tokens, documentation, CORS."""

from __future__ import annotations

import re

import httpx
import msgspec
import openai
import pytest

import ascend_vllm
from ascend_vllm.args.hf_files import weight_bytes
from tests.scripted_engine import ScriptedEngine, client_of
from tests.server import Server


def test_health_ping_and_version(http: httpx.Client) -> None:
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = http.request(method, path)
        assert (response.status_code, response.content) == (200, b"")
    assert http.get("/version").json() == {"version": ascend_vllm.__version__}


def test_models(http: httpx.Client, tiny_dir: str) -> None:
    answer = http.get("/v1/models").json()
    assert answer["object"] == "list"
    assert [card["id"] for card in answer["data"]] == ["tiny", "alias"]
    card = answer["data"][0]
    keys = ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"]
    assert list(card) == keys
    assert (card["root"], card["max_model_len"], card["parent"]) == (tiny_dir, 512, None)
    assert card["permission"][0]["allow_sampling"] is True


def test_one_model(http: httpx.Client, client: openai.OpenAI, tiny_dir: str) -> None:
    found = client.models.retrieve("alias")
    assert (found.id, found.object, found.owned_by) == ("alias", "model", "vllm")
    listed = http.get("/v1/models/").json()["data"]
    assert http.get("/v1/models/alias").json().keys() == listed[1].keys()
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/absent")
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["message"] == "The model `org/absent` does not exist. Valid aliases: tiny, alias."
    assert (body["type"], body["param"], body["code"]) == ("NotFoundError", "model", 404)


async def test_the_root_is_what_was_typed() -> None:
    engine = ScriptedEngine(["x"])
    model = msgspec.structs.replace(engine.config.model, model="/cache/snapshots/0123", source="org/name")
    engine.config = msgspec.structs.replace(engine.config, model=model)
    async with client_of(engine) as client:
        assert {card["root"] for card in (await client.get("/v1/models")).json()["data"]} == {"org/name"}


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("GET", "/nope", "Not Found: there is no route /nope."),
        ("POST", "/chat/completions", "Did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("POST", "/v1/completion", "Not Found: there is no route /v1/completion. Did you mean /v1/completions?"),
        ("GET", "/v1/response/resp_1", "Did you mean /v1/responses/{response_id}?"),
        ("GET", "/v1/" + "a" * 5000, "a…."),
    ],
)
def test_unknown_routes(http: httpx.Client, method: str, path: str, message: str) -> None:
    response = http.request(method, path, json={})
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["message"].endswith(message)
    assert (error["type"], error["param"], error["code"]) == ("NotFoundError", None, 404)
    assert response.json()["message"] == error["message"]


def test_wrong_methods(http: httpx.Client) -> None:
    response = http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    error = response.json()["error"]
    assert error["message"] == "Method Not Allowed: the route /v1/completions takes POST, not GET."
    assert (error["type"], error["param"], error["code"]) == ("Method Not Allowed", None, 405)
    assert http.head("/health").content == b""


async def test_the_client_shows_the_nearest_route(openai_server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=openai_server.url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match=r"Did you mean /v1/chat/completions\?"):
            await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello!"}])


def test_metrics(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    running = re.search(r'^vllm:num_requests_running\{.*model_name="tiny".*\} (\S+)$', response.text, re.MULTILINE)
    assert running is not None
    assert re.search(r"^vllm:generation_tokens_total\{.*\} [1-9]", response.text, re.MULTILINE)


def test_tokenize_and_detokenize(http: httpx.Client) -> None:
    found = http.post(
        "/tokenize", json={"model": "tiny", "prompt": "Hello <|im_end|>", "return_token_strs": True}
    ).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert found["tokens"][-1] == 2
    back = http.post("/detokenize", json={"model": "tiny", "tokens": found["tokens"]}).json()
    assert back == {"prompt": "Hello <|im_end|>"}
    assert http.post("/tokenize", json={"prompt": "x"}).json()["token_strs"] is None
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [-1]}),
        ("/tokenize", {"model": "nope", "prompt": "x"}),
    ):
        assert http.post(path, json=body).status_code in (400, 404), body


def test_documentation_names_the_fields(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "stop_token_ids" in schemas["CompletionRequest"]["properties"]
    assert "messages" in schemas["ChatCompletionRequest"]["properties"]
    text = http.get("/openapi.json").text
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert references <= set(schemas)


def test_cross_origin_requests_are_allowed(http: httpx.Client) -> None:
    headers = {"origin": "https://example.com", "access-control-request-method": "POST"}
    response = http.options("/v1/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"


def test_the_log_of_a_start(openai_server: Server, tiny_dir: str) -> None:
    """One page: what runs and where to reach it."""
    log = openai_server.log
    marks = [
        f"ascend-vllm API server version {ascend_vllm.__version__}",
        f"non-default args: {{'host': '127.0.0.1', 'port': {openai_server.port}, 'model': '{tiny_dir}', ",
        "ascend-vllm API server is ready:",
        "  model     tiny, alias\n",
        f"  Qwen2ForCausalLM of {tiny_dir}\n",
        f"  dtype     float32, {weight_bytes(tiny_dir) / 2**20:.1f} MiB of weights\n",
        "  device    cpu, ",
        "  limits    512 tokens per request, 64 requests at a time, ",
        "  KV cache  ",
        f"  address   http://127.0.0.1:{openai_server.port}/v1\n",
        "  " + ", ".join(f"{openai_server.url}{path}" for path in ("/ui", "/docs", "/metrics")) + "\n",
        "server launch time cost: ",
        "Started server process",
        "Waiting for application startup.",
        "Application startup complete.",
        f"Uvicorn running on http://127.0.0.1:{openai_server.port}",
    ]
    places = [log.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "Route: " not in log
    assert log[: log.index("Uvicorn running on")].count("\n") <= 25
