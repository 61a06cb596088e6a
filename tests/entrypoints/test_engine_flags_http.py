"""Flags of the engine that clients of a server see; one server has them all."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator

import httpx
import pytest

from tests.entrypoints.conftest import ENGINE_FLAGS
from tests.raw_requests import post_raw, read_events
from tests.server import OPENAI_SERVER, Server, is_idle, metric, running, wait_until

EXTENSION = """
import pathlib
from transformers import AutoTokenizer

class VllmExtension:
    def __init__(self):
        self.prefix = (pathlib.Path(__file__).parent / "prefix.txt").read_text()
    def get_tokenizer(self, tokenizer_path):
        return AutoTokenizer.from_pretrained(tokenizer_path)
    def text_to_tokens(self, tokenizer, text):
        return tokenizer.encode(self.prefix + text)
"""
LOGGING = {
    "version": 1,
    "formatters": {"own": {"format": "OWN %(levelname)s %(message)s"}},
    "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own"}},
    "loggers": {"ascend_vllm": {"handlers": ["own"], "level": "INFO"}},
}


@pytest.fixture(scope="module")
def server(tiny_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("extension")
    (directory / "vllm_extension.py").write_text(EXTENSION)
    (directory / "prefix.txt").write_text("one two ")
    (directory / "logging.json").write_text(json.dumps(LOGGING))
    flags = ["--served-model-name", "tiny", "--max-num-seqs", "1", "--stream-interval", "4"]
    flags += ["--max-num-queued-tokens", "40", "--tokenizer-extension-path", str(directory / "vllm_extension.py")]
    flags += [
        "--enable-log-requests",
        "--max-log-len",
        "2",
        "--kv-cache-memory-bytes",
        "64M",
        "--logprobs-mode",
        "raw_logits",
    ]
    flags += ["--max-model-len", "32768"]
    env = {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_LOGGING_CONFIG_PATH": str(directory / "logging.json")}
    with running(OPENAI_SERVER, ["--model", tiny_dir, *ENGINE_FLAGS, *flags], env) as found:
        yield found


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_the_extension_tokenises_prompts(http: httpx.Client, tiny_dir: str) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(tiny_dir).encode("one two Hello")
    answer = http.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True}).json()
    assert answer["tokens"] == expected
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    by_text = http.post("/v1/completions", json=body).json()
    by_ids = http.post("/v1/completions", json=body | {"prompt": expected}).json()
    assert by_text["usage"]["prompt_tokens"] == len(expected)
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"] != ""


def test_streams_gather_tokens(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in answer.split("\n\n") if line.startswith("data: {")]
    # 1, 4, 4 and 1 tokens, or fewer pieces if the machine is busy
    assert len(events) <= 4
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert "".join(event["choices"][0]["text"] for event in events) == whole


def test_too_many_prompt_tokens_that_wait_are_a_503(http: httpx.Client, server: Server) -> None:
    body: dict[str, object] = {"model": "tiny", "max_tokens": 30000, "ignore_eos": True, "stream": True}
    first = post_raw(server, "/v1/completions", body | {"prompt": "Hello"})
    read_events(first, 1)
    second = post_raw(server, "/v1/completions", body | {"prompt": [5] * 50})
    assert wait_until(lambda: metric(http, "num_requests_waiting") == 1)
    refused = http.post("/v1/completions", json=body | {"prompt": "Hello"})
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == (
        "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
    )
    counted = r'admission_rejections_total\{[^}]*reason="max_num_queued_tokens"[^}]*\} 1\.0'
    assert re.search(counted, http.get("/metrics").text)
    for sock in (first, second):
        sock.close()
    assert wait_until(lambda: is_idle(http))
    assert http.post("/v1/completions", json=body | {"prompt": "Hello", "max_tokens": 1}).status_code == 200


def test_logits_instead_of_logprobs(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 3, "temperature": 0, "logprobs": 5, "echo": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    # logits are not bounded by 0, and the most likely token has the largest one
    assert max(value for value in choice["logprobs"]["token_logprobs"] if value is not None) > 0
    assert all(max(top.values()) > 0 for top in choice["logprobs"]["top_logprobs"][-3:])
    without = {"model": "tiny", "prompt": "Hello", "max_tokens": 3}
    refused = http.post("/v1/completions", json=without | {"best_of": 2})
    assert refused.status_code == 400
    assert "--logprobs-mode raw_logits" in refused.json()["error"]["message"]


def test_the_log_is_written_as_its_file_says(http: httpx.Client, server: Server) -> None:
    lines = server.log.splitlines()
    assert any(line.startswith("OWN INFO non-default args: {'host': '127.0.0.1', 'port': ") for line in lines)
    # of a prompt two characters or tokens
    http.post("/v1/completions", json={"model": "tiny", "prompt": "Hello", "max_tokens": 1})
    assert re.search(r"prompt: 'He', params: SamplingParams\(.*\), prompt_token_ids: \[\d+, \d+\]\.", server.log)
    # in the engine core's process too
    assert any(line.startswith("OWN INFO KV cache: ") for line in lines)


def test_extensions_that_fail(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    from ascend_vllm.engine.tokenizer_extension import load_extension
    from ascend_vllm.errors import ConfigError

    with pytest.raises(ConfigError, match="there is no Python file"):
        load_extension(str(tmp_path), tiny_dir)
    (tmp_path / "vllm_extension.py").write_text("class Other: pass")
    with pytest.raises(ConfigError, match=r"fails: AttributeError: .*VllmExtension"):
        load_extension(str(tmp_path), tiny_dir)
