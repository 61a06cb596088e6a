"""Small routes, and the flags of the OpenAI-compatible server that are off by default."""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from ascend_vllm.args.tables.server import FrontendArgs
from ascend_vllm.entrypoints.http import launcher, tls
from ascend_vllm.entrypoints.openai.api_server import make_parser, run_server
from ascend_vllm.errors import ConfigError
from tests.certificates import make_certificates
from tests.entrypoints.conftest import ENGINE_FLAGS, KEY, Collector
from tests.server import OPENAI_SERVER, Server, is_idle, needs_openssl, wait_until
from tests.tiny_models import tiny_model

HELLO = [{"role": "user", "content": "Hello"}]
BYE = [{"role": "user", "content": "Good bye"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}


@pytest.fixture
def guarded(guarded_server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=guarded_server.url, timeout=60, headers=headers) as client:
        yield client


def test_load(guarded: httpx.Client, guarded_server: Server, http: httpx.Client) -> None:
    assert wait_until(lambda: guarded.get("/load").json() == {"server_load": 0})
    core = guarded_server.engine_core()
    core.suspend()
    try:
        with guarded.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
            assert guarded.get("/load").json() == {"server_load": 1}
            # without the flag it is there, and says nothing
            assert http.get("/load").json() == {"server_load": 0}
    finally:
        core.resume()
    assert wait_until(lambda: guarded.get("/load").json() == {"server_load": 0})


def test_signs_of_life(guarded: httpx.Client, guarded_server: Server) -> None:
    """A stream whose engine makes no progress sends only comments."""
    core = guarded_server.engine_core()
    body = CHAT | {"stream": True}
    core.suspend()
    start = time.monotonic()
    with guarded.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        assert time.monotonic() - start > 0.9
        core.resume()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in rest[:-1])
    whole = guarded.post("/v1/chat/completions", json=CHAT).json()
    assert text == whole["choices"][0]["message"]["content"]
    # a client that leaves while there is nothing but signs of life is noticed
    core.suspend()
    with guarded.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert next(response.iter_lines()) == ": keep-alive"
    core.resume()
    assert wait_until(lambda: is_idle(guarded))


def test_invocations(guarded: httpx.Client) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Hello"}),
    ):
        body = {"model": "tiny", "max_tokens": 8, "temperature": 0} | fields
        direct, through = guarded.post(path, json=body).json(), guarded.post("/invocations", json=body).json()
        assert through["object"] == direct["object"]
        assert through["choices"] == direct["choices"]
        stream = guarded.post("/invocations", json=body | {"stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
    nothing = guarded.post("/invocations", json={"model": "tiny"})
    assert (nothing.status_code, nothing.json()["error"]["param"]) == (400, "prompt")
    assert guarded.post("/invocations", json=[1]).status_code == 400
    # /invocations, which forwards to the same route, needs the key, too
    assert httpx.post(guarded.base_url.join("/invocations"), json=CHAT, timeout=60).status_code == 401


def test_a_batch_of_conversations(guarded: httpx.Client) -> None:
    answer = guarded.post("/v1/chat/completions/batch", json=CHAT | {"messages": [HELLO, BYE]}).json()
    alone = [
        guarded.post("/v1/chat/completions", json=CHAT | {"messages": messages}).json() for messages in (HELLO, BYE)
    ]
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["message"] for choice in answer["choices"]] == [one["choices"][0]["message"] for one in alone]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == sum(one["usage"][name] for one in alone)
    for fields, status, text in (
        ({"messages": []}, 400, "at least 1 item"),
        ({"messages": [HELLO, []]}, 400, "body.messages.1"),
        ({"messages": HELLO}, 400, "valid list"),
        ({"n": 2}, 400, "Batch chat completions do not support `n > 1`. Please set `n` to 1."),
        ({"stream": True}, 400, "do not support `stream`"),
        ({"temperature": "x"}, 400, "body.temperature"),
        ({"model": "nope"}, 404, "The model `nope` does not exist."),
    ):
        response = guarded.post("/v1/chat/completions/batch", json=CHAT | {"messages": [HELLO]} | fields)
        assert (response.status_code, text in response.json()["error"]["message"]) == (status, True), response.text


def test_the_tokenizer(guarded: httpx.Client, http: httpx.Client) -> None:
    info = guarded.get("/tokenizer_info").json()
    assert info["tokenizer_class"]
    assert info["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in info["chat_template"]
    assert http.get("/tokenizer_info").status_code == 404


def test_what_this_server_does_not_have(guarded: httpx.Client, http: httpx.Client) -> None:
    for path in ("/inference/v1/generate", "/v1/completions/render", "/v1/messages/render"):
        response = guarded.post(path, json={})
        assert (response.status_code, response.json()["error"]["type"]) == (403, "PermissionDeniedError")
        assert response.json()["message"].startswith("Scale-out endpoints are disabled.")
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        response = guarded.post(path, json={"lora_name": "a", "lora_path": "b"})
        assert response.status_code in (400, 404)
        assert "LoRA is not enabled" in response.json()["message"] or "cannot be found" in response.json()["message"]
        assert http.post(path, json={}).status_code == 404


def test_answers_in_the_log(guarded: httpx.Client, guarded_server: Server) -> None:
    request_id = f"logged-{time.monotonic_ns()}"
    for stream in (False, True):
        body = CHAT | {"stream": stream, "request_id": f"{request_id}-{stream}"}
        text = guarded.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
        assert guarded.post("/v1/chat/completions", json=body).status_code == 200
        pattern = re.compile(rf"Generated response chatcmpl-{request_id}-{stream}\S*, (.*)")
        assert wait_until(lambda pattern=pattern: pattern.search(guarded_server.log) is not None)
        line = pattern.search(guarded_server.log)
        assert line is not None
        assert line[1] == f"choice 0: output: {text!r}, finish_reason: length"


def test_paths_without_a_line_in_the_access_log(guarded: httpx.Client, guarded_server: Server) -> None:
    for path in ("/ping", "/v1/models?x=1", "/version"):
        assert guarded.get(path).status_code == 200
    assert wait_until(lambda: "GET /version" in guarded_server.log)
    assert "GET /ping" not in guarded_server.log
    assert "GET /v1/models" not in guarded_server.log


def attributes(span: Span) -> dict[str, Any]:
    """A span's attributes with Python's types."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_traces(guarded: httpx.Client, collector: Collector) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    before = time.time_ns()
    body = CHAT | {"request_id": "traced", "n": 2, "temperature": 0.5, "top_p": 0.9, "ignore_eos": True}
    answer = guarded.post("/v1/chat/completions", json=body, headers={"traceparent": parent}).json()

    def spans() -> list[Span]:
        return [span for span in collector.spans if "traced" in attributes(span)["gen_ai.request.id"]]

    assert wait_until(lambda: len(spans()) == 1)
    (span,) = spans()
    assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(parent.split("-")[1:3])
    found = attributes(span)
    assert found["gen_ai.request.id"].startswith("chatcmpl-traced")
    expected = {
        "gen_ai.usage.prompt_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 16,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.n": 2,
    }
    assert {name: found[name] for name in expected} == expected
    times = {name: found[f"gen_ai.latency.{name}"] for name in ("e2e", "time_to_first_token", "time_in_queue")}
    phases = [found[f"gen_ai.latency.time_in_model_{name}"] for name in ("prefill", "decode", "inference")]
    assert 0 <= times["time_in_queue"] <= times["time_to_first_token"] <= times["e2e"]
    assert phases[0] + phases[1] == pytest.approx(phases[2])
    assert before <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(times["e2e"] * 1e9, abs=1e6)


def test_http_metrics(guarded: httpx.Client) -> None:
    def row(name: str, **labels: str) -> float:
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in guarded.get("/metrics").text.splitlines():
            found, _, value = line.rpartition(" ")
            if (
                found.partition("{")[0] == name
                and set(found.partition("{")[2].rstrip("}").split(",")) - {""} == wanted
            ):
                return float(value)
        return 0.0

    path = "/v1/completions"
    totals = {
        status: row("http_requests_total", handler=path, method="POST", status=status) for status in ("2xx", "4xx")
    }
    sizes = [row(f"http_{kind}_size_bytes_sum", handler=path) for kind in ("request", "response")]
    count = row("http_request_duration_highr_seconds_count")
    lost = row("http_requests_total", handler="none", method="GET", status="4xx")
    body = b'{"prompt": "x", "max_tokens": 2}'
    answer = guarded.post(path, content=body, headers={"content-type": "application/json"})
    assert guarded.post(path, json={"prompt": "x", "n": 0}).status_code == 400
    guarded.get("/nowhere/1")
    guarded.get("/nowhere/2")
    guarded.get("/health")
    for status, change in (("2xx", 1), ("4xx", 1)):
        assert row("http_requests_total", handler=path, method="POST", status=status) == totals[status] + change
    assert row("http_requests_total", handler="none", method="GET", status="4xx") == lost + 2
    assert row("http_request_duration_highr_seconds_count") == count + 4
    assert row("http_request_size_bytes_sum", handler=path) > sizes[0] + len(body)
    assert row("http_response_size_bytes_sum", handler=path) > sizes[1] + len(answer.content)
    assert row("http_request_duration_seconds_count", handler=path, method="POST") >= 2
    assert row("http_request_duration_seconds_bucket", handler=path, method="POST", le="+Inf") >= 2
    assert "/health" not in guarded.get("/metrics").text


def test_the_metric_of_tool_parsers(guarded: httpx.Client) -> None:
    def count(mode: str) -> float:
        name = "vllm:tool_call_parser_invocations_total"
        labels = f'mode="{mode}",model_name="tiny",outcome="no_tool_call",request_type="chat_completions"'
        found = re.search(re.escape(f"{name}{{{labels}}} ") + r"(\S+)", guarded.get("/metrics").text)
        assert found is not None
        return float(found[1])

    before = {mode: count(mode) for mode in ("streaming", "non_streaming")}
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
    for stream in (False, True):
        assert guarded.post("/v1/chat/completions", json=CHAT | {"tools": tools, "stream": stream}).status_code == 200
    assert count("non_streaming") == before["non_streaming"] + 1
    assert count("streaming") > before["streaming"]


# ---- a server of its own -------------------------------------------------------------------------------------


def certificate_of(path: pathlib.Path) -> bytes:
    """The certificate that the server shows to a new connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(path))
        with context.wrap_socket(raw) as wrapped:
            shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return shown


@needs_openssl
def test_a_unix_socket_with_tls_that_is_renewed(tiny_dir: str, tmp_path: pathlib.Path) -> None:
    make_certificates(tmp_path)
    path, log_config = tmp_path / "server.sock", tmp_path / "log.json"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    handler = {"class": "logging.StreamHandler", "formatter": "own"}
    log_config.write_text(
        json.dumps(
            {
                "version": 1,
                "disable_existing_loggers": False,
                "formatters": {"own": {"format": "OWN %(name)s %(message)s"}},
                "handlers": {"own": handler},
                "loggers": {name: {"handlers": ["own"], "level": "INFO"} for name in ("uvicorn", "ascend_vllm")},
            }
        )
    )
    flags = ["--uds", str(path), "--ssl-keyfile", str(tmp_path / "server.key"), "--enable-ssl-refresh"]
    flags += ["--ssl-certfile", str(tmp_path / "server.pem"), "--ssl-ciphers", "ECDHE-RSA-AES256-GCM-SHA384"]
    flags += ["--log-config-file", str(log_config)]
    server = Server(OPENAI_SERVER, ["--model", tiny_dir, *flags, *ENGINE_FLAGS])
    try:
        assert wait_until(lambda: f"OWN uvicorn.error Uvicorn running on unix socket {path}" in server.log, 90)
        assert (
            f"OWN ascend_vllm.entrypoints.http.launcher   address   https://localhost/v1 through {path}\n"
            in server.log
        )
        transport = httpx.HTTPTransport(uds=str(path), verify=False)
        with httpx.Client(transport=transport, base_url="https://localhost") as client:
            assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        first = certificate_of(path)
        for kind in ("key", "pem"):
            shutil.copy(tmp_path / f"client.{kind}", tmp_path / f"server.{kind}")
        assert wait_until(lambda: certificate_of(path) != first)
        with pytest.raises(ConfigError, match="already in use"):
            launcher.bind_uds(str(path))
        assert server.terminate() == 0
        assert not path.exists()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--ssl-ciphers", "ALL"], "--ssl-ciphers needs --ssl-certfile."),
        (["--enable-ssl-refresh"], "--enable-ssl-refresh needs --ssl-certfile."),
        (["--sse-keep-alive-interval", "-1"], "--sse-keep-alive-interval must not be negative, got -1.0."),
        (["--enable-log-outputs", "--disable-log-requests"], "--enable-log-outputs requires --enable-log-requests."),
        (["--log-config-file", "/absent.json"], "--log-config-file /absent.json cannot be used"),
        (["--uds", "/absent/x.sock"], "Cannot listen on --uds /absent/x.sock"),
        (["--collect-detailed-traces", "model"], "--collect-detailed-traces needs --otlp-traces-endpoint."),
        (
            ["--collect-detailed-traces", "soul", "--otlp-traces-endpoint", "http://x"],
            "Invalid module soul in collect_detailed_traces. Valid modules are model, worker, all.",
        ),
    ],
)
def test_wrong_flags_end_the_start(flags: list[str], text: str, caplog: pytest.LogCaptureFixture) -> None:
    port = [] if "--uds" in flags else ["--port", "0"]
    args: argparse.Namespace = make_parser().parse_args(["--model", tiny_model("qwen2"), *port, *flags])
    assert run_server(args) == 2
    assert text in caplog.text


def test_traces_need_their_packages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    flags = ["--port", "0", "--otlp-traces-endpoint", "http://localhost:4317"]
    assert run_server(make_parser().parse_args(["--model", tiny_model("qwen2"), *flags])) == 2
    assert "pip install 'ascend-vllm[otel]'" in caplog.text


def test_a_wrong_protocol_of_traces(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "pigeon")
    flags = ["--port", "0", "--otlp-traces-endpoint", "http://localhost:4317"]
    assert run_server(make_parser().parse_args(["--model", tiny_model("qwen2"), *flags])) == 2
    assert "must be grpc or http/protobuf, got 'pigeon'" in caplog.text


def test_a_log_configuration_that_is_none(tmp_path: pathlib.Path) -> None:
    for content in ("[]", "{", '{"version": 7}'):
        (tmp_path / "log.json").write_text(content)
        with pytest.raises(ConfigError, match="--log-config-file"):
            launcher._configure_log(str(tmp_path / "log.json"))


@needs_openssl
def test_tls_files_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    make_certificates(tmp_path)
    args = FrontendArgs(
        ssl_keyfile=str(tmp_path / "server.key"), ssl_certfile=str(tmp_path / "server.pem"), ssl_ciphers="ROT13"
    )
    with pytest.raises(ConfigError, match="--ssl-ciphers ROT13 cannot be used"):
        tls.check_files(args)
    lock = ["openssl", "rsa", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key"]
    subprocess.run(lock, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    args = FrontendArgs(ssl_keyfile=str(tmp_path / "locked.key"), ssl_certfile=str(tmp_path / "server.pem"))
    with pytest.raises(
        ConfigError, match=r"locked\.key\) cannot be used: the private key is encrypted; give --ssl-key"
    ):
        tls.check_files(args)
    with pytest.raises(ConfigError, match=r"server\.pem\) cannot be used"):  # it holds no key
        tls.check_files(FrontendArgs(ssl_certfile=str(tmp_path / "server.pem")))
