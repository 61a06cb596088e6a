"""How a server starts, refuses to start, loses clients, loses its engine, and ends."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from ascend_vllm.entrypoints.demo_model import demo_model_path
from tests.certificates import make_certificates
from tests.entrypoints.conftest import ENGINE_FLAGS, LONG_ENV, LONG_FLAGS, LONG_TOKENS
from tests.raw_requests import post_raw, read_events, read_rest
from tests.server import (
    OPENAI_SERVER,
    Server,
    is_idle,
    metric,
    needs_curl,
    needs_openssl,
    running,
    wait_until,
)

LONG = {"model": "tiny", "prompt": "Hello", "max_tokens": LONG_TOKENS, "temperature": 0, "ignore_eos": True}


def count_aborted(http: httpx.Client) -> float:
    """Requests that ended early so far."""
    found = re.search(r'^vllm:request_success_total\{.*"abort".*\} (\S+)$', http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_client_frees_its_blocks(patient_server: Server, path: str, stream: bool) -> None:
    with httpx.Client(base_url=patient_server.url, timeout=30) as http:
        before = count_aborted(http)
        body = LONG | {"stream": stream, "messages": [{"role": "user", "content": "Hello"}]}
        with post_raw(patient_server, path, body) as sock:
            if stream:
                read_events(sock, 3)
            assert wait_until(lambda: metric(http, "num_requests_running") == 1)
            assert metric(http, "gpu_cache_usage_perc") > 0
        assert wait_until(lambda: is_idle(http)), http.get("/metrics").text
        assert count_aborted(http) == before + 1
    name = "chatcmpl" if "chat" in path else "cmpl"
    assert re.search(
        rf"Received request {name}-[\w-]+: prompt: '.*Hello.*', params: SamplingParams\(n=1", patient_server.log
    )
    assert wait_until(lambda: f"Aborted request {name}-" in patient_server.log)


@pytest.fixture(scope="module")
def guarded(tiny_dir: str) -> Iterator[Server]:
    """A server with keys, a request-id header, no documentation, and room for one running and one waiting request."""
    flags = ["--model", tiny_dir, "--api-key", "sesame", "second", "--disable-fastapi-docs", "--disable-log-requests"]
    flags += ["--enable-request-id-headers", "--disable-uvicorn-access-log", "--enable-prompt-tokens-details"]
    flags += ["--enable-cum-log-probs", *LONG_FLAGS, "--max-num-seqs", "1", "--max-num-queued-reqs", "1"]
    with running(OPENAI_SERVER, flags, LONG_ENV) as server:
        yield server


def test_flags_of_the_http_layer(guarded: Server, tiny_dir: str) -> None:
    with httpx.Client(base_url=guarded.url, timeout=30) as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                response = http.request(method, path, headers=headers)
                assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})
                assert "www-authenticate" not in response.headers
        for path in ("/health", "/version", "/metrics"):
            assert http.get(path).status_code == 200
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 401
        assert http.options("/v1/completions").status_code == 405
        http.headers["Authorization"] = "Bearer second"
        assert http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert http.get(path).status_code == 404
        response = http.get("/v1/models", headers={"X-Request-Id": "abc"})
        assert response.json()["data"][0]["id"] == tiny_dir
        assert response.headers["x-request-id"] == "abc"
        answer = http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2}).json()
        assert answer["choices"][0]["cum_log_probs"] < 0
        assert answer["choices"][0]["logprobs"] is None
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert "sesame" not in guarded.log
    assert "POST /v1/completions" not in guarded.log


def test_a_full_queue_is_a_503(guarded: Server, tiny_dir: str) -> None:
    headers = {"Authorization": "Bearer sesame"}
    body = LONG | {"model": tiny_dir}
    with httpx.Client(base_url=guarded.url, timeout=30, headers=headers) as http:
        lines = [f"{name}: {value}" for name, value in headers.items()]
        first = post_raw(guarded, "/v1/completions", body | {"stream": True}, lines)
        read_events(first, 1)
        waiting = post_raw(guarded, "/v1/completions", body | {"stream": True}, lines)
        assert wait_until(lambda: metric(http, "num_requests_waiting") == 1)
        for stream in (False, True):
            response = http.post("/v1/completions", json=body | {"stream": stream})
            assert response.status_code == 503, response.text
            assert response.json()["error"]["type"] == "ServiceUnavailableError"
        # the waiting one goes away before it ever ran, while the other one goes on, then that one
        aborted = count_aborted(http)
        waiting.close()
        assert wait_until(lambda: metric(http, "num_requests_waiting") == 0)
        assert count_aborted(http) == aborted + 1
        assert metric(http, "num_requests_running") == 1
        first.close()
        assert wait_until(lambda: is_idle(http))
        assert http.post("/v1/completions", json=body | {"max_tokens": 1}).status_code == 200
    assert " request cmpl-" not in guarded.log


def test_the_engine_s_death_ends_streams_with_an_error_and_the_server(tiny_dir: str) -> None:
    server = Server(OPENAI_SERVER, ["--model", tiny_dir, "--served-model-name", "tiny", *LONG_FLAGS], LONG_ENV)
    try:
        server.wait_ready()
        streaming = post_raw(server, "/v1/completions", LONG | {"stream": True, "n": 2, "temperature": 1})
        received = read_events(streaming, 3)
        whole = post_raw(server, "/v1/completions", LONG)
        # the request must be in the engine, or it would be refused before
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert wait_until(lambda: metric(http, "num_requests_running") == 3)
        server.engine_core().kill()
        received += read_rest(streaming)
        *_, error, done = [line for line in received.decode().splitlines() if line.startswith("data: ")]
        assert done == "data: [DONE]"
        body = json.loads(error.removeprefix("data: "))
        assert (body["error"]["code"], body["error"]["type"]) == (500, "InternalServerError")
        answer = read_rest(whole)
        assert answer.startswith(b"HTTP/1.1 500")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "InternalServerError"
        assert server.wait_exit(20) == 1
        assert server.orphans() == []
        assert "The engine is dead" in server.log
    finally:
        server.close()


HANG_FLAGS = ["--served-model-name", "tiny", *LONG_FLAGS, "--max-num-seqs", "1"]
HANG_ENV = LONG_ENV | {"VLLM_ENGINE_ITERATION_TIMEOUT_S": "2"}


# test_kill_matrix.py has it of an engine with a worker that hangs, and test_core_client.py how the process is killed
@pytest.mark.exhaustive
def test_an_engine_that_hangs_ends_streams_with_an_error_and_the_server(tiny_dir: str) -> None:
    server = Server(OPENAI_SERVER, ["--model", tiny_dir, *HANG_FLAGS], HANG_ENV)
    try:
        server.wait_ready()
        streaming = post_raw(server, "/v1/completions", LONG | {"stream": True})
        received = read_events(streaming, 3)
        whole = post_raw(server, "/v1/completions", LONG)
        with httpx.Client(base_url=server.url, timeout=60) as http:
            assert wait_until(lambda: metric(http, "num_requests_waiting") == 1)
        server.engine_core().suspend()
        received += read_rest(streaming)
        *_, error, done = [line for line in received.decode().splitlines() if line.startswith("data: ")]
        assert done == "data: [DONE]"
        body = json.loads(error.removeprefix("data: "))
        assert (body["error"]["code"], body["error"]["type"]) == (500, "InternalServerError")
        assert "VLLM_ENGINE_ITERATION_TIMEOUT_S" in body["error"]["message"]
        answer = read_rest(whole)
        assert answer.startswith(b"HTTP/1.1 500")
        assert "VLLM_ENGINE_ITERATION_TIMEOUT_S" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert server.wait_exit(20) == 1
        assert server.orphans() == []
        assert server.log.count("Engine iteration timed out. This should never happen!") == 1
    finally:
        server.close()


@pytest.fixture(scope="module")
def stubborn(tiny_dir: str) -> Iterator[Server]:
    """A server that stays without its engine, and runs one request at a time: another waits three seconds at most."""
    flags = ["--model", tiny_dir, *HANG_FLAGS, "--queue-timeout-s", "3"]
    server = Server(OPENAI_SERVER, flags, HANG_ENV | {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"})
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def test_a_request_that_waits_too_long_is_a_503(stubborn: Server) -> None:
    rejections = r'^vllm:admission_rejections_total\{.*"queue_timeout".*\} (\S+)$'
    with httpx.Client(base_url=stubborn.url, timeout=30) as http:
        in_front = post_raw(stubborn, "/v1/completions", LONG | {"stream": True})
        read_events(in_front, 1)
        start = time.monotonic()
        too_long = [
            post_raw(stubborn, "/v1/completions", LONG | {"stream": stream, "max_tokens": 2}, ["Connection: close"])
            for stream in (False, True)
        ]
        for sock in too_long:
            head, _, content = read_rest(sock).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503"), head
            assert b"content-type: application/json" in head.lower()
            assert json.loads(content)["error"]["type"] == "ServiceUnavailableError"
            assert json.loads(content)["message"]
            assert time.monotonic() - start >= 3
        # the running one was not touched, and one that waits for less is served
        assert metric(http, "num_requests_running") == 1
        waiting = post_raw(stubborn, "/v1/completions", LONG | {"max_tokens": 2}, ["Connection: close"])
        assert wait_until(lambda: metric(http, "num_requests_waiting") == 1)
        in_front.close()
        assert read_rest(waiting).startswith(b"HTTP/1.1 200")
        assert wait_until(lambda: is_idle(http))
        found = re.search(rejections, http.get("/metrics").text, re.MULTILINE)
        assert found is not None and float(found[1]) == 2


def test_a_server_that_must_stay_kills_an_engine_that_hangs(stubborn: Server) -> None:
    """The last of the tests that share this server."""
    stubborn.engine_core().suspend()
    with httpx.Client(base_url=stubborn.url, timeout=30) as http:
        assert http.get("/health").status_code == 200
        # an idle core owes nothing; with this request it does
        assert http.post("/v1/completions", json=LONG).status_code == 500
        assert http.get("/health").status_code == 503
        for stream in (False, True):
            response = http.post("/v1/completions", json=LONG | {"max_tokens": 8, "stream": stream})
            assert (response.status_code, response.json()["type"]) == (500, "InternalServerError")
    assert stubborn.orphans() == []
    assert stubborn.terminate() == 1


# what follows a death is the same when the engine hangs and is killed, and cores of several workers are killed in
# test_data_parallel.py
@pytest.mark.exhaustive
def test_a_server_that_must_stay_tells_that_its_engine_is_dead(tiny_dir: str) -> None:
    env = {"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}
    server = Server(OPENAI_SERVER, ["--model", tiny_dir, "--served-model-name", "tiny", *ENGINE_FLAGS], env)
    try:
        server.wait_ready()
        server.engine_core().kill()
        with httpx.Client(base_url=server.url, timeout=30) as http:
            assert wait_until(lambda: http.get("/health").status_code == 503)
            for stream in (False, True):
                response = http.post("/v1/completions", json=LONG | {"max_tokens": 8, "stream": stream})
                assert (response.status_code, response.json()["type"]) == (500, "InternalServerError")
        assert server.terminate() == 1
    finally:
        server.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_loads(tiny_dir: str, number: signal.Signals) -> None:
    server = Server(OPENAI_SERVER, ["--model", tiny_dir, *ENGINE_FLAGS])
    try:
        assert wait_until(lambda: bool(server.children()), 30), server.log
        server.process.send_signal(number)
        assert server.wait_exit(20) == 1
        assert server.orphans() == []
        assert "Traceback" not in server.log
    finally:
        server.close()


def ends_without_listening(arguments: list[str], port: int | None = None) -> tuple[int, str]:
    """Exit code and log of a server that cannot start; nothing may ever accept a connection."""
    server = Server(OPENAI_SERVER, arguments, port=port)
    try:
        while server.process.poll() is None:
            if port is None:
                with socket.socket() as sock:
                    assert sock.connect_ex(("127.0.0.1", server.port)) != 0, "it listens"
            time.sleep(0.02)
        assert server.orphans() == []
        return server.process.returncode, server.log
    finally:
        server.close()


def broken_copy(tiny_dir: str, tmp_path: pathlib.Path) -> pathlib.Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny_dir, copy)
    return copy


def errors(log: str) -> list[str]:
    assert "Traceback" not in log, log
    return [line for line in log.splitlines() if line.startswith("ERROR")]


def test_a_truncated_weight_file(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    model = broken_copy(tiny_dir, tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, log = ends_without_listening(["--model", str(model), *ENGINE_FLAGS])
    assert code == 1
    (line,) = errors(log)
    assert "model.safetensors" in line


# refused in this process by test_model_loader.py; how the server ends is tested above
@pytest.mark.exhaustive
def test_an_architecture_nobody_knows(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    model = broken_copy(tiny_dir, tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["NopeForCausalLM"]}))
    code, log = ends_without_listening(["--model", str(model), *ENGINE_FLAGS])
    assert code == 1
    assert any("NopeForCausalLM" in line for line in errors(log)), log


def test_errors_before_anything_is_loaded(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, log = ends_without_listening(["--model", tiny_dir], port)
    assert code == 2
    assert f"127.0.0.1:{port} is already in use" in errors(log)[0]
    for flags, text in (
        (["--chat-template", "./nope.jinja"], "appears path-like, but doesn't exist!"),
        (["--ssl-keyfile", "k", "--ssl-certfile", "c"], "The TLS files (c, k) cannot be used"),
        (["--enable-prompt-adapter"], "--enable-prompt-adapter is not supported"),
    ):
        code, log = ends_without_listening(["--model", tiny_dir, *flags])
        assert code == 2, log
        assert text in errors(log)[-1]
        assert "Loading" not in log
    code, log = ends_without_listening(["--model", str(tmp_path / "nowhere")])
    assert code != 0
    assert "nowhere" in errors(log)[-1]


# of one server more: test_generate_mindie_http.py has what callers need, and test_small_routes_http.py this program
@pytest.mark.exhaustive
@needs_openssl
@needs_curl
def test_mutual_tls(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "strangers").mkdir()
    for directory in (tmp_path, tmp_path / "strangers"):
        make_certificates(directory)
    # a certificate's file may hold the key too
    both = tmp_path / "both.pem"
    both.write_text("".join((tmp_path / name).read_text() for name in ("server.pem", "server.key")))
    flags = ["--ssl-certfile", str(both)]
    flags += ["--ssl-ca-certs", str(tmp_path / "ca.pem"), "--ssl-cert-reqs", "2"]
    server = Server(OPENAI_SERVER, ["--model", tiny_dir, *flags, *ENGINE_FLAGS], scheme="https")
    curl = ["curl", "-sS", "--cacert", str(tmp_path / "ca.pem"), f"{server.url}/version"]
    identity = ["--cert", str(tmp_path / "client.pem"), "--key", str(tmp_path / "client.key")]
    try:
        assert wait_until(lambda: "Uvicorn running on https://" in server.log, 90), server.log
        done = subprocess.run([*curl, *identity], capture_output=True, timeout=30)
        assert b"version" in done.stdout, done.stderr
        stranger = [str(tmp_path / "strangers" / name) for name in ("client.pem", "client.key")]
        for shown in ([], ["--cert", stranger[0], "--key", stranger[1]]):
            refused = subprocess.run([*curl, *shown], capture_output=True, timeout=30)
            assert refused.returncode != 0
            assert b"version" not in refused.stdout
        assert server.terminate() == 0
    finally:
        server.close()


@needs_curl
def test_model_demo_is_served_under_its_name_with_a_curl_to_try(
    tiny_dir: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model stands where the trained one would be, so that nothing is trained here. Ctrl-C ends the server."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    shutil.copytree(tiny_dir, demo_model_path())
    server = Server(OPENAI_SERVER, ["--model", "demo", *ENGINE_FLAGS])
    try:
        server.wait_ready()
        assert httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"][0]["id"] == "demo"
        found = re.search(r"^ +(curl .*)$", server.log, re.MULTILINE)
        assert found is not None, server.log
        done = subprocess.run(found[1], shell=True, capture_output=True, timeout=60)
        assert json.loads(done.stdout)["model"] == "demo", done
        sock = post_raw(server, "/v1/completions", LONG | {"model": "demo", "max_tokens": 450, "stream": True})
        received = read_events(sock, 1)
        server.process.send_signal(signal.SIGINT)
        received += read_rest(sock)
        assert b"data: [DONE]" in received, "an open stream runs to its end"
        assert server.wait_exit() == 0
        assert server.orphans() == []
    finally:
        server.close()
