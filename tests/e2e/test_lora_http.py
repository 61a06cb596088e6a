"""LoRA adapters over HTTP: names of --lora-modules, loading and unloading while requests run, many at once."""

from __future__ import annotations

import concurrent.futures
import json
import pathlib
import re
import shutil
from collections.abc import Iterator

import httpx
import pytest
import transformers

from tests.lora_adapters import ALL_LINEAR, VOCABULARY, Adapter, write_adapter
from tests.server import OPENAI_SERVER, Server, client_of_many
from tests.tiny_models import tiny_model

NUM_ADAPTERS = 40
BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 10, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    model, directory = tiny_model("llama", dtype="float32"), tmp_path_factory.mktemp("adapters")
    made = [
        Adapter(
            f"lora{index}",
            rank=(4, 8, 16)[index % 3],
            modules=ALL_LINEAR if index % 4 else (*ALL_LINEAR, *VOCABULARY),
        )
        for index in range(NUM_ADAPTERS)
    ]
    return {adapter.name: write_adapter(directory / adapter.name, model, adapter) for adapter in made}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Adapters that requests may name, and such that they may not: another model's, and a link to "outside"."""
    base, model = tmp_path_factory.mktemp("base"), tiny_model("llama", dtype="float32")
    root, far = base / "adapters", base / "outside" / "far"
    for path, name in (
        (root / "found", model),
        (root / "team" / "nested", model),
        (root / "other", "another/model"),
        (root / "broken", model),
        (far, model),
    ):
        adapter = Adapter(path.name)
        write_adapter(path, model, adapter)
        (path / "adapter_config.json").write_text(json.dumps(adapter.config() | {"base_model_name_or_path": name}))
    (root / "broken" / "adapter_model.safetensors").write_bytes(b"nothing")
    (root / "link").symlink_to(far)
    return root


@pytest.fixture(scope="module")
def server(adapters: dict[str, str], directory: pathlib.Path) -> Iterator[Server]:
    modules = ["--lora-modules", *(f"{name}={path}" for name, path in list(adapters.items())[:2])]
    flags = ["--enable-lora", "--max-loras", "8", "--max-cpu-loras", "16", "--max-lora-rank", "16", *modules]
    model = tiny_model("llama", dtype="float32")
    server = Server(
        OPENAI_SERVER,
        ["--model", model, "--served-model-name", "base", "--dtype", "float32", *flags],
        env={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_LORA_RESOLVER_CACHE_DIR": str(directory)},
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with client_of_many(server) as client:
        yield client


def text_of(http: httpx.Client, model: str) -> str:
    response = http.post("/v1/completions", json=BODY | {"model": model})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "base"
    answer: str = response.json()["choices"][0]["text"]
    return answer


def load(http: httpx.Client, name: object, path: object, **more: object) -> httpx.Response:
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | more)


def unload(http: httpx.Client, name: object) -> httpx.Response:
    return http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_adapters_are_listed_and_chosen_by_name(http: httpx.Client, adapters: dict[str, str]) -> None:
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert list(cards) == ["base", "lora0", "lora1"]
    assert (cards["lora0"]["root"], cards["lora0"]["parent"]) == (adapters["lora0"], "base")
    assert http.get("/v1/models/lora1").json()["id"] == "lora1"
    assert len({text_of(http, name) for name in cards}) == 3
    assert http.post("/v1/completions", json=BODY | {"model": "lora2"}).status_code == 404
    chat = {"model": "lora0", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 5, "temperature": 0}
    answers = [http.post("/v1/chat/completions", json=chat | {"model": name}).json() for name in ("base", "lora0")]
    assert answers[0]["choices"][0]["message"]["content"] != answers[1]["choices"][0]["message"]["content"]


def test_loading_and_unloading(http: httpx.Client, adapters: dict[str, str], tmp_path: pathlib.Path) -> None:
    path, damaged = adapters["lora5"], tmp_path / "damaged"
    shutil.copytree(path, damaged)
    (damaged / "adapter_model.safetensors").write_bytes(b"short")
    for response, status, words in (
        (load(http, "five", None), 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (load(http, "base", path), 400, "The lora adapter 'base' conflicts with a served base model."),
        (load(http, "lora0", path), 400, "The lora adapter 'lora0' has already been loaded."),
        (load(http, "five", str(tmp_path)), 404, f"Loading lora five failed: No adapter found for {tmp_path}"),
        (load(http, "five", str(damaged)), 400, "Loading lora five failed: "),
        (unload(http, "five"), 404, "The lora adapter 'five' cannot be found."),
        (unload(http, None), 400, "'lora_name' needs to be provided to unload a LoRA adapter."),
    ):
        assert response.status_code == status, response.text
        assert words in response.json()["message"]
    response = load(http, "five", path)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'five' added successfully.")
    first = text_of(http, "five")
    assert load(http, "five", adapters["lora6"], load_inplace=True).status_code == 200
    second = text_of(http, "five")
    assert first != second
    assert unload(http, "five").text == "Success: LoRA adapter 'five' removed successfully."
    assert http.post("/v1/completions", json=BODY | {"model": "five"}).status_code == 404
    # what the model itself says has not changed
    assert len({text_of(http, "base"), first, second}) == 3


def test_names_that_are_not_known_are_looked_up_in_one_directory(
    http: httpx.Client, server: Server, directory: pathlib.Path
) -> None:
    far = directory.parent / "outside" / "far"
    assert (far / "adapter_config.json").exists()
    before = [card["id"] for card in http.get("/v1/models").json()["data"]]
    for name in ("other", "link", "nothing", "../outside/far", "found/../../outside/far", str(far)):
        response = http.post("/v1/completions", json=BODY | {"model": name})
        assert (response.status_code, response.json()["type"]) == (404, "NotFoundError"), name
        assert response.json()["message"].startswith(f"The model `{name}` does not exist.")
    for name in (".", "", "\0", "x" * 300, "team"):
        response = http.post("/v1/completions", json=BODY | {"model": name})
        assert response.status_code == (404 if name else 200), name
    response = http.post("/v1/completions", json=BODY | {"model": "broken"})
    assert response.status_code == 400
    assert response.json()["message"] == "LoRA adapter 'broken' was found but could not be loaded."
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == before
    texts = {text_of(http, name) for name in ("base", "found", "team/nested")}
    assert len(texts) == 3
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards["found"]["root"] == str(directory / "found")
    assert cards["found"]["parent"] == "base"
    assert unload(http, "found").status_code == 200
    assert "LoRA adapter 'found' loaded from" in server.log


def test_an_adapter_with_a_token_of_its_own(http: httpx.Client, tmp_path: pathlib.Path) -> None:
    """Its tokenizer and chat template are in its directory, as PEFT's users store them."""
    model = tiny_model("llama", dtype="float32")
    path = write_adapter(tmp_path / "polite", model, Adapter("polite", added=1))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<please>"])
    tokenizer.chat_template = "<please>{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(path)
    assert load(http, "polite", path).status_code == 200
    asked = {"model": "polite", "messages": [{"role": "user", "content": "Help!"}]}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    assert tokens == tokenizer("<please>Help!", add_special_tokens=False).input_ids and tokens[0] == 384
    assert http.post("/detokenize", json={"model": "polite", "tokens": [384]}).json()["prompt"] == "<please>"
    answer = http.post("/v1/chat/completions", json=asked | {"max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    # a bias makes sure that the token is chosen; the model itself does not have it
    body = {"prompt": "<please>", "max_tokens": 3, "logit_bias": {"384": 100}, "ignore_eos": True, "temperature": 0}
    answer = http.post("/v1/completions", json=body | {"model": "polite", "logprobs": 1}).json()
    assert answer["choices"][0]["text"] == "<please>" * 3
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<please>"] * 3
    refused = http.post("/v1/completions", json=body | {"model": "base"})
    assert refused.status_code == 400 and "out-of-vocab" in refused.json()["message"]
    refused = http.post("/v1/completions", json={"model": "base", "prompt": [384], "max_tokens": 1})
    assert refused.json()["message"] == "Token id 384 is out of vocabulary"
    assert unload(http, "polite").status_code == 200


def test_metrics_name_the_adapters_of_requests(http: httpx.Client) -> None:
    body = BODY | {"model": "lora0", "max_tokens": 200, "n": 8, "temperature": 1}
    pattern = re.compile(r'vllm:lora_requests_info\{.*max_lora="8".*running_lora_adapters="lora0".*\}')
    with concurrent.futures.ThreadPoolExecutor(1) as clients:
        answers = [clients.submit(http.post, "/v1/completions", json=body) for _ in range(20)]
        found = False
        while not (found or answers[-1].done()):
            found = pattern.search(http.get("/metrics").text) is not None
        for answer in answers:
            answer.cancel()
    assert found


def test_a_request_ends_with_the_adapter_that_has_been_unloaded(http: httpx.Client, adapters: dict[str, str]) -> None:
    assert load(http, "brief", adapters["lora8"]).status_code == 200
    body = BODY | {"model": "brief", "max_tokens": 100}
    alone = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    pieces = []
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
            if len(pieces) == 1 and line:
                assert unload(http, "brief").status_code == 200
                pieces.append("")
    assert "".join(pieces) == alone
    assert http.post("/v1/completions", json=body).status_code == 404


def test_clients_of_many_adapters_get_their_own_adapters_answers(
    http: httpx.Client, adapters: dict[str, str]
) -> None:
    names = {f"own-{name}": path for name, path in adapters.items()}
    for name, path in names.items():
        assert load(http, name, path).status_code == 200
    alone = {name: text_of(http, name) for name in names}
    assert len(set(alone.values())) > NUM_ADAPTERS * 0.9
    alone["base"] = text_of(http, "base")
    everybody = [name for name in alone for _ in range(3)]
    with concurrent.futures.ThreadPoolExecutor(64) as clients:
        answers = [(name, clients.submit(text_of, http, name)) for name in everybody]
        churn = [clients.submit(load, http, f"new{index}", adapters[f"lora{index}"]) for index in range(6)]
        gone = [clients.submit(unload, http, name) for name in ("lora0", "lora1")]
        for name, answer in answers:
            assert answer.result() == alone[name]
        assert all(task.result().status_code == 200 for task in (*churn, *gone))
