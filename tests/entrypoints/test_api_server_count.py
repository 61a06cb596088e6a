"""--api-server-count 2: both processes answer at one address, as one server would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from ascend_vllm.entrypoints.openai import api_server
from ascend_vllm.errors import ConfigError
from tests.entrypoints.conftest import ENGINE_FLAGS, LONG_ENV, LONG_FLAGS, LONG_TOKENS
from tests.server import OPENAI_SERVER, Server, is_idle, metric, wait_until

COUNT = ["--api-server-count", "2"]
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "Hello!", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
ENDLESS = SHORT | {"max_tokens": LONG_TOKENS, "stream": True}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "Hello!", "max_output_tokens": 4, "ignore_eos": True}
LIMIT = 6
# a client without one reads all certificates of the system
WITHOUT_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def api_servers(server: Server) -> list[psutil.Process]:
    """The processes that answer requests, by their numbers."""
    children = psutil.Process(server.process.pid).children()
    return sorted(
        (child for child in children if "ascend_vllm.core.proc" not in child.cmdline()), key=lambda child: child.pid
    )


def owner_of(response: httpx.Response, processes: list[psutil.Process]) -> int:
    """The number of the process that a response came from: the one that has the connection."""
    port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
    for index, process in enumerate(processes):
        if any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp")):
            return index
    raise RuntimeError(f"nobody has the connection from port {port}")


@contextlib.contextmanager
def connect(server: Server, index: int) -> Iterator[httpx.Client]:
    """A client with one connection, to the process of this number."""
    processes = api_servers(server)
    for _ in range(300):
        limits = httpx.Limits(max_connections=1)
        with httpx.Client(base_url=server.url, timeout=60, limits=limits, verify=WITHOUT_TLS) as client:
            if owner_of(client.get("/health"), processes) == index:
                yield client
                return
    raise RuntimeError(f"process {index} takes no connections")


@pytest.fixture(scope="module")
def server(tiny_dir: str) -> Iterator[Server]:
    flags = ["--model", tiny_dir, "--served-model-name", "tiny", *LONG_FLAGS, *COUNT, "--enable-sleep-mode"]
    flags += ["--max-concurrent-requests-per-key", str(LIMIT), "--enable-server-load-tracking"]
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}
    with contextlib.closing(Server(OPENAI_SERVER, flags, LONG_ENV | env)) as server:
        server.wait_ready()
        assert wait_until(lambda: len(api_servers(server)) == 2)
        yield server


@pytest.fixture
def both(server: Server) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """A client of each process; afterwards nothing runs."""
    with connect(server, 0) as first, connect(server, 1) as second:
        yield first, second
        assert wait_until(lambda: is_idle(first))


@contextlib.contextmanager
def stream(server: Server, index: int, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of an endless completion of one process, on a connection of its own."""
    with (
        connect(server, index) as client,
        client.stream("POST", "/v1/completions", json=ENDLESS | fields) as response,
    ):
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(lines)
        yield lines


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["type"]


def test_both_answer_alike(both: tuple[httpx.Client, httpx.Client]) -> None:
    texts = set()
    for client in both:
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        texts.add(client.post("/v1/completions", json=SHORT).json()["choices"][0]["text"])
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True}
        text = client.post("/v1/chat/completions", json=chat).text
        assert text.endswith("data: [DONE]\n\n")
        assert error_of(client.post("/v1/completions", json=SHORT | {"max_tokens": -1}))[0] == 400
        assert client.post("/v1/responses", json=[]).status_code == 400
    assert len(texts) == 1


def test_the_start_is_logged_once(server: Server) -> None:
    for text in ("Application startup complete", "is ready:", "server launch time cost", "Uvicorn running on"):
        assert server.log.count(text) == 1, text


def test_chosen_ids_are_unique_over_both(server: Server, both: tuple[httpx.Client, httpx.Client]) -> None:
    named = {"request_id": "mine"}
    with stream(server, 0, **named):
        for client in both:
            assert client.post("/v1/completions", json=SHORT | named).status_code == 409
    assert wait_until(lambda: both[1].post("/v1/completions", json=SHORT | named).status_code == 200)
    # the header may be the same everywhere
    headers = {"X-Request-Id": "same"}
    with stream(server, 0):
        assert all(client.post("/v1/completions", json=SHORT, headers=headers).is_success for client in both)


@pytest.mark.parametrize("index", [0, 1])
def test_a_disconnect_aborts(server: Server, both: tuple[httpx.Client, httpx.Client], index: int) -> None:
    with stream(server, index):
        assert wait_until(lambda: metric(both[1], "num_requests_running") == 1)
        # one process's idleness is not the engine's
        assert metric(both[0], "num_requests_running") == 1
    assert wait_until(lambda: is_idle(both[index]))


def test_limits_and_load_are_those_of_both(server: Server, both: tuple[httpx.Client, httpx.Client]) -> None:
    with contextlib.ExitStack() as streams:
        for number in range(LIMIT - 1):
            streams.enter_context(stream(server, number % 2))
        for client in both:
            assert client.get("/load").json() == {"server_load": LIMIT - 1}
        streams.enter_context(stream(server, 1))
        for client in both:
            assert error_of(client.post("/v1/completions", json=SHORT)) == (429, "TooManyRequestsError")
    assert wait_until(lambda: both[1].post("/v1/completions", json=SHORT).status_code == 200)
    assert wait_until(lambda: both[1].get("/load").json() == {"server_load": 0})


def total(client: httpx.Client, start: str) -> float:
    """The sum of the metric's samples whose lines begin like this."""
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_metrics_are_sums(both: tuple[httpx.Client, httpx.Client]) -> None:
    names = {
        "vllm:generation_tokens_total": 4,
        'vllm:request_success_total{engine="0",finished_reason="length"': 1,
        "vllm:e2e_request_latency_seconds_count": 1,
        'http_requests_total{handler="/v1/completions",method="POST",status="2xx"}': 1,
    }
    before = {name: total(both[0], name) for name in names}
    for client in both:
        client.post("/v1/completions", json=SHORT).raise_for_status()
    expected = {name: before[name] + 2 * change for name, change in names.items()}
    for client in both:
        assert wait_until(lambda client=client: {name: total(client, name) for name in names} == expected)
        text = client.get("/metrics").text
        for gauge in ("vllm:num_requests_running{", "vllm:cache_config_info{", "process_resident_memory_bytes "):
            assert text.count("\n" + gauge) == 1
    # steps of the one engine are counted once
    before_steps = total(both[0], "vllm:iteration_tokens_total_sum")
    both[1].post("/v1/completions", json=SHORT).raise_for_status()
    prompt = both[1].post("/tokenize", json={"model": "tiny", "prompt": SHORT["prompt"]}).json()["count"]
    assert wait_until(lambda: total(both[0], "vllm:iteration_tokens_total_sum") == before_steps + prompt + 4)


@pytest.mark.parametrize("maker", [0, 1])
def test_responses_are_kept_for_both(both: tuple[httpx.Client, httpx.Client], maker: int) -> None:
    made, other = both[maker], both[1 - maker]
    response = made.post("/v1/responses", json=RESPONSE).raise_for_status().json()
    path = f"/v1/responses/{response['id']}"
    assert other.get(path).json() == made.get(path).json() == response
    again = other.post("/v1/responses", json=RESPONSE | {"previous_response_id": response["id"]})
    assert again.json()["usage"]["input_tokens"] > response["usage"]["input_tokens"]
    assert len(other.get(f"{path}/input_items").json()["data"]) == 1
    assert other.delete(path).json()["deleted"]
    assert (made.get(path).status_code, other.get(path).status_code) == (404, 404)


@pytest.mark.parametrize("maker", [0, 1])
def test_background_responses_are_cancelled_by_both(both: tuple[httpx.Client, httpx.Client], maker: int) -> None:
    made, other = both[maker], both[1 - maker]
    body = RESPONSE | {"max_output_tokens": LONG_TOKENS, "background": True}
    response = made.post("/v1/responses", json=body).raise_for_status().json()
    path = f"/v1/responses/{response['id']}"
    assert wait_until(lambda: other.get(path).json()["status"] == "in_progress")
    assert other.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert made.get(path).json()["status"] == "cancelled"


def test_a_streamed_response_ends_with_its_client(server: Server, both: tuple[httpx.Client, httpx.Client]) -> None:
    body = RESPONSE | {"max_output_tokens": LONG_TOKENS, "stream": True}
    with connect(server, 1) as client, client.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: response.created"
        assert wait_until(lambda: metric(both[0], "num_requests_running") == 1)
    assert wait_until(lambda: is_idle(both[1]))


class Asked:
    """A request in a thread."""

    def __init__(self, ask: Callable[[], httpx.Response]) -> None:
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(ask,))
        self._thread.start()

    def _run(self, ask: Callable[[], httpx.Response]) -> None:
        self.response = ask()

    def end(self) -> httpx.Response:
        self._thread.join(60)
        assert self.response is not None
        return self.response


@pytest.mark.parametrize("asked", [0, 1])
def test_a_pause_concerns_both(server: Server, both: tuple[httpx.Client, httpx.Client], asked: int) -> None:
    with stream(server, 0) as own, stream(server, 1) as others:
        assert both[asked].post("/pause").json() == {"status": "paused"}
        for lines in (own, others):
            *_, last = (line for line in lines if line.startswith("data: {"))
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    # no step is made that would tell
    assert wait_until(lambda: is_idle(both[0]))
    assert [client.get("/is_paused").json()["is_paused"] for client in both] == [True, True]
    with connect(server, 1 - asked) as client:
        waiting = Asked(lambda: client.post("/v1/completions", json=SHORT))
        assert both[1 - asked].post("/resume").json() == {"status": "resumed"}
        assert waiting.end().status_code == 200
    assert [client.get("/is_paused").json()["is_paused"] for client in both] == [False, False]


def test_a_pause_waits_for_the_requests_of_both(server: Server, both: tuple[httpx.Client, httpx.Client]) -> None:
    with connect(server, 1) as client:
        body = SHORT | {"max_tokens": 2000}
        waited_for = Asked(lambda: client.post("/v1/completions", json=body))
        assert wait_until(lambda: metric(both[0], "num_requests_running") == 1)
        assert both[0].post("/pause", params={"mode": "wait"}).status_code == 200
        assert waited_for.end().json()["choices"][0]["finish_reason"] == "length"
    assert both[1].post("/resume").status_code == 200


def test_sleep_is_seen_by_both(both: tuple[httpx.Client, httpx.Client]) -> None:
    assert both[1].post("/sleep").json() == {"status": "sleeping", "level": 1}
    for client in both:
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert total(client, 'vllm:engine_sleep_state{engine="0",model_name="tiny",sleep_state="weights_off') == 1
    assert both[0].post("/wake_up").status_code == 200
    assert both[1].get("/is_sleeping").json() == {"is_sleeping": False}
    assert both[1].post("/v1/completions", json=SHORT).status_code == 200


def test_requests_of_both_are_aborted_by_id(server: Server, both: tuple[httpx.Client, httpx.Client]) -> None:
    with stream(server, 1, request_id="seven") as lines:
        assert both[0].post("/abort_requests", json={"request_ids": ["seven"]}).json()["aborted"] == 1
        assert any('"finish_reason":"abort"' in line for line in lines)
    with stream(server, 0) as own, stream(server, 1) as others:
        assert both[1].post("/abort_requests", json={}).json()["aborted"] == 2
        assert all(any('"finish_reason":"abort"' in line for line in lines) for lines in (own, others))
    assert both[1].post("/reset_prefix_cache").json() == {"success": True}


# ---- the end -------------------------------------------------------------------------------------------------


def start(tiny_dir: str) -> Server:
    server = Server(
        OPENAI_SERVER, ["--model", tiny_dir, "--served-model-name", "tiny", *LONG_FLAGS, *COUNT], LONG_ENV
    )
    server.wait_ready()
    return server


def rest_of(lines: Iterator[str]) -> str:
    with contextlib.suppress(httpx.TransportError):
        return "\n".join(lines)
    return ""


def test_sigterm_lets_open_streams_of_both_end(server: Server) -> None:
    """The last of the tests that share this server."""
    with (
        stream(server, 0, max_tokens=2000) as own,
        stream(server, 1, max_tokens=2000) as others,
        connect(server, 1) as client,
    ):
        body = RESPONSE | {"max_output_tokens": 2000}
        forwarded = Asked(lambda: client.post("/v1/responses", json=body))
        assert wait_until(lambda: forwarded.response is not None or metric_of(server) == 3)
        server.process.send_signal(signal.SIGTERM)
        assert all(rest_of(lines).endswith("data: [DONE]\n") for lines in (own, others))
        assert forwarded.end().status_code == 200
    assert server.wait_exit() == 0
    assert not server.orphans()


def test_an_api_server_that_is_killed_ends_the_server(tiny_dir: str) -> None:
    with contextlib.closing(start(tiny_dir)) as server, stream(server, 1), connect(server, 0) as client:
        victim = api_servers(server)[1]
        short = Asked(lambda: client.post("/v1/completions", json=SHORT | {"max_tokens": 1500}))
        assert wait_until(lambda: short.response is not None or metric_of(server) == 2)
        victim.kill()
        # what the other one has begun it finishes
        assert short.end().json()["usage"]["completion_tokens"] == 1500
        assert server.wait_exit() == 1
        assert server.log.count(f"ApiServer_1 (pid {victim.pid}) was killed by signal 9; the server ends") == 1
        assert server.log.count("API server 1 is gone: its 1 requests are aborted") == 1
        assert not server.orphans()


def metric_of(server: Server) -> float:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return metric(client, "num_requests_running")


def test_the_engine_cores_death_ends_the_server(tiny_dir: str) -> None:
    with contextlib.closing(start(tiny_dir)) as server, stream(server, 0) as own, stream(server, 1) as others:
        server.engine_core().kill()
        assert all("was killed by signal 9" in rest_of(lines) for lines in (own, others))
        assert server.wait_exit() == 1
        assert not server.orphans()


@pytest.mark.exhaustive
def test_the_parents_death_ends_all(tiny_dir: str) -> None:
    with contextlib.closing(start(tiny_dir)) as server:
        server.children()
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert not server.orphans()


# ---- flags -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "environment", "finding"),
    [
        (["--api-server-count", "0"], {}, "--api-server-count 0 starts no API server"),
        (["--api-server-count", "-1"], {}, "--api-server-count -1 starts no API server"),
        (
            ["--headless", "--nnodes", "2", "--node-rank", "1", *COUNT],
            {},
            "--api-server-count=2 cannot be used with --headless (no API servers are started in headless mode).",
        ),
        (
            COUNT,
            {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1",
        ),
    ],
)
def test_flags_that_contradict_it_are_refused(
    tiny_dir: str, flags: list[str], environment: dict[str, str], finding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    args = api_server.make_parser().parse_args(["--model", tiny_dir, *ENGINE_FLAGS, *flags])
    with pytest.raises(ConfigError, match=re.escape(finding)):
        api_server._run_server(args)
