"""Routes for development and profiling on a real server, under load."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ascend_vllm.entrypoints.openai.admin_routes import matching_ids
from tests.server import Server

ROUTES = [
    ("POST", "/reset_prefix_cache"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("POST", "/abort_requests"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("GET", "/server_info"),
    ("POST", "/collective_rpc"),
    ("POST", "/start_profile"),
    ("POST", "/stop_profile"),
]
GREEDY = {"prompt": list(range(5, 105)), "max_tokens": 300, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def developer(developer_server: Server) -> Iterator[httpx.Client]:
    """A client; afterwards the server has every block free."""
    with httpx.Client(base_url=developer_server.url, timeout=60) as client:
        yield client
        client.post("/wake_up")
        assert metric(client, "num_requests_running") == 0
        assert metric(client, "kv_cache_usage_perc") == 0


def metric(client: httpx.Client, name: str, labels: str = "") -> float:
    text = client.get("/metrics").raise_for_status().text
    found = re.search(rf"^vllm:{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json() if response.content else None


class Stream:
    """A streamed completion, read in a thread."""

    def __init__(self, client: httpx.Client, name: str = "", **fields: Any) -> None:
        self.text = ""
        self.finish_reason: str | None = None
        self._client = client
        self._headers = {"X-Request-Id": name} if name else {}
        self._body = GREEDY | {"stream": True} | fields
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def begun(self) -> Stream:
        """Waits for the first text."""
        assert self._has_begun.wait(30)
        return self

    def end(self) -> str | None:
        """Waits for the end; returns the finish reason."""
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.finish_reason

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def _read(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body, headers=self._headers) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"]
                if len(self.text) > 20:
                    self._has_begun.set()


def interrupt(client: httpx.Client, path: str, count: int = 1) -> list[Stream]:
    """Pauses or sleeps while streams run; repeats if one of them ended before."""
    for _ in range(20):
        streams = [Stream(client) for _ in range(count)]
        for stream in streams:
            stream.begun()
        ok(client.post(path))
        if "mode=keep" in path:
            # the engine is asked, since a stream that ended before may still have text to read
            kept = sum(int(metric(client, f"num_requests_{state}")) for state in ("running", "waiting"))
            if kept == count:
                return streams
        elif [stream.end() for stream in streams] == ["abort"] * count:
            return streams
        ok(client.post("/wake_up"))
        for stream in streams:
            stream.end()
    raise AssertionError("streams always end before they are interrupted")


def is_beginning(text: str, whole: str) -> bool:
    """Whether a text is a prefix of another one, except for an incomplete character at its end."""
    return whole.startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))


@pytest.fixture(scope="module")
def whole_text(developer_server: Server) -> str:
    """The text of an undisturbed completion."""
    answer = ok(httpx.post(f"{developer_server.url}/v1/completions", json=GREEDY, timeout=60))
    return str(answer["choices"][0]["text"])


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_the_routes_need_their_switches(http: httpx.Client, method: str, path: str) -> None:
    assert http.request(method, path).status_code == 404


def test_the_prefix_cache_is_forgotten(developer: httpx.Client) -> None:
    body = {"prompt": list(range(105, 205)), "max_tokens": 1, "temperature": 0}

    def num_cached() -> int:
        return int(
            ok(developer.post("/v1/completions", json=body))["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    # whole blocks of 16 tokens
    assert [num_cached() for _ in range(2)] == [0, 96]
    assert ok(developer.post("/reset_prefix_cache")) == {"success": True}
    assert [num_cached() for _ in range(2)] == [0, 96]
    assert metric(developer, "prefix_cache_hits_total") >= 192
    assert 0 < metric(developer, "gpu_prefix_cache_hit_rate") < 1


def test_pausing_ends_what_runs_and_holds_what_comes(developer: httpx.Client, whole_text: str) -> None:
    assert ok(developer.get("/is_paused")) == {"is_paused": False}
    streams = interrupt(developer, "/pause", 2)
    assert [stream.end() for stream in streams] == ["abort", "abort"]
    assert all(is_beginning(stream.text, whole_text) for stream in streams)
    assert ok(developer.get("/is_paused")) == {"is_paused": True}
    held = Stream(developer)
    # a second pause changes nothing
    assert ok(developer.post("/pause?mode=keep")) == {"status": "paused"}
    assert held.is_open
    assert held.text == ""
    assert ok(developer.post("/resume")) == {"status": "resumed"}
    assert held.end() == "length"
    assert held.text == whole_text
    assert ok(developer.get("/is_paused")) == {"is_paused": False}


def test_pausing_may_keep_what_runs(developer: httpx.Client, whole_text: str) -> None:
    (stream,) = interrupt(developer, "/pause?mode=keep&clear_cache=false")
    assert stream.is_open
    ok(developer.post("/resume"))
    assert stream.end() == "length"
    assert stream.text == whole_text


def test_pausing_may_wait_for_what_runs(developer: httpx.Client, whole_text: str) -> None:
    stream = Stream(developer).begun()
    ok(developer.post("/pause?mode=wait"))
    assert stream.end() == "length"
    assert stream.text == whole_text
    ok(developer.post("/resume"))


def test_aborting_some_requests(developer: httpx.Client) -> None:
    def abort(*ids: str) -> int:
        answer = ok(developer.post("/abort_requests", json={"request_ids": list(ids)}))
        assert answer["status"] == "aborted"
        return int(answer["aborted"])

    # held, so that none of them ends by itself before
    ok(developer.post("/pause"))
    one, other, two, three = (Stream(developer, name) for name in ("one", "one-2", "two", "three"))
    while one.is_open or two.is_open:
        # again, if they had not arrived yet
        assert abort("one", "unknown") == 2
        assert abort("cmpl-two") == 1
    assert abort() == 0
    assert [one.end(), two.end()] == ["abort", "abort"]
    ok(developer.post("/resume"))
    assert [other.end(), three.end()] == ["length", "length"]
    streams = interrupt(developer, "/pause?mode=keep", 2)
    assert ok(developer.post("/abort_requests", json={})) == {"status": "aborted", "aborted": 2}
    assert [stream.end() for stream in streams] == ["abort", "abort"]
    ok(developer.post("/resume"))


def test_ids_of_several_prompts_and_forms() -> None:
    engine_ids = ["cmpl-7-0123abcd-0", "cmpl-7-0123abcd-1", "cmpl-77-00000000-0", "chatcmpl-fedcba9876543210-0"]
    assert matching_ids(engine_ids, ["7"]) == engine_ids[:2]
    assert matching_ids(engine_ids, ["cmpl-7-0123abcd-1", "chatcmpl-fedcba9876543210"]) == engine_ids[1::2]
    assert matching_ids(engine_ids, ["cmpl", "0", "7-", ""]) == []


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_under_traffic(developer: httpx.Client, whole_text: str, level: int) -> None:
    assert ok(developer.get("/is_sleeping")) == {"is_sleeping": False}
    assert metric(developer, "engine_sleep_state", 'sleep_state="awake"') == 1
    (stream,) = interrupt(developer, "/sleep" if level == 1 else "/sleep?level=2&mode=keep")
    if level == 1:
        assert stream.end() == "abort"
    else:
        assert stream.is_open
    assert ok(developer.post(f"/sleep?level={level}&mode=keep")) == {"status": "sleeping", "level": level}
    assert ok(developer.get("/is_sleeping")) == {"is_sleeping": True}
    assert ok(developer.get("/is_paused")) == {"is_paused": True}
    assert developer.get("/health").status_code == 200
    state = {1: "weights_offloaded", 2: "discard_all"}[level]
    assert metric(developer, "engine_sleep_state", f'sleep_state="{state}"') == 1
    assert metric(developer, "engine_sleep_state", 'sleep_state="awake"') == 0
    held = Stream(developer)
    refused = developer.post("/resume")
    assert (refused.status_code, "sleeps" in refused.text) == (400, True)
    assert ok(developer.post("/wake_up?tags=weights")) == {"status": "awake", "tags": ["weights"]}
    assert ok(developer.get("/is_sleeping")) == {"is_sleeping": True}
    assert held.text == ""
    assert ok(developer.post("/wake_up")) == {"status": "awake", "tags": None}
    assert ok(developer.get("/is_sleeping")) == {"is_sleeping": False}
    assert metric(developer, "engine_sleep_state", 'sleep_state="awake"') == 1
    for woken in [held] if level == 1 else [stream, held]:
        assert woken.end() == "length"
        assert woken.text == whole_text


def test_traces_of_the_worker(developer: httpx.Client, trace_dir: pathlib.Path) -> None:
    started = developer.post("/start_profile")
    assert (started.status_code, started.content) == (200, b"")
    ok(developer.post("/v1/completions", json=GREEDY | {"max_tokens": 3}))
    assert developer.post("/stop_profile").status_code == 200
    (path,) = trace_dir.iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("ascend_vllm::" in event.get("name", "") for event in events)
    assert developer.post("/stop_profile").status_code == 200
    assert len(list(trace_dir.iterdir())) == 1


def test_server_info(developer: httpx.Client, tiny_dir: str) -> None:
    text = ok(developer.get("/server_info"))["vllm_config"]
    assert isinstance(text, str)
    assert tiny_dir in text
    config = ok(developer.get("/server_info?config_format=json"))["vllm_config"]
    assert config["model"]["model"] == tiny_dir
    assert config["cache"]["enable_prefix_caching"] is True


def test_calling_the_workers(developer: httpx.Client) -> None:
    def call(**body: Any) -> httpx.Response:
        return developer.post("/collective_rpc", json=body)

    assert ok(call(method="determine_num_cpu_blocks"))["results"][0] > 0
    # values that JSON cannot represent are returned as text
    (model,) = ok(call(method="get_model"))["results"]
    assert "Qwen2ForCausalLM" in model
    failed = call(method="sleep", args=["x"], kwargs={"more": 1})
    assert failed.status_code == 500
    assert failed.json()["message"].startswith("Call to collective_rpc method failed: TypeError")
    unknown = call(method="nope")
    assert (unknown.status_code, unknown.json()["message"]) == (400, "workers have no method 'nope'")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/pause?mode=bogus", None, "Input should be 'abort', 'wait' or 'keep'"),
        ("/pause?clear_cache=maybe", None, "Input should be a valid boolean"),
        ("/sleep?level=x", None, "Input should be a valid integer"),
        ("/sleep?level=3", None, "level must be 0, 1 or 2, got 3"),
        ("/sleep?mode=bogus", None, "Input should be 'abort', 'wait' or 'keep'"),
        ("/wake_up?tags=bogus", None, "got ['bogus']"),
        ("/abort_requests", "x", "Invalid JSON format"),
        ("/abort_requests", "", "Invalid JSON format"),
        ("/abort_requests", "[1]", "Request body must be a JSON object"),
        ("/abort_requests", '{"request_ids": "abc"}', "request_ids must be a list of strings"),
        ("/collective_rpc", "{}", "Missing 'method' in request body"),
        ("/collective_rpc", '{"method": "get_model", "args": 3}', "'args' a list"),
        ("/collective_rpc", '{"method": "get_model", "timeout": "long"}', "'timeout' must be a number"),
        ("/collective_rpc", '{"method": "_make"}', "workers have no method '_make'"),
    ],
)
def test_wrong_requests(developer: httpx.Client, path: str, body: str | None, words: str) -> None:
    response = developer.post(path, content=body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == 400


def test_wrong_queries_of_the_configuration(developer: httpx.Client) -> None:
    response = developer.get("/server_info?config_format=zzz")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "query.config_format")
