"""POST /generate in MindIE's form, over HTTPS with certificates on both sides, and the documented requests."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import re
import ssl
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ascend_vllm.entrypoints.generate.mindie import MAX_PROMPT_CHARACTERS, MindieFormat, to_mindie_error
from ascend_vllm.errors import EngineBusyError, EngineDeadError, RequestError
from ascend_vllm.sampling_params import RequestOutputKind
from tests.certificates import make_certificates
from tests.entrypoints.conftest import ENGINE_FLAGS
from tests.raw_requests import post_raw, read_rest
from tests.server import GENERATE_SERVER, Server, needs_curl, needs_openssl, wait_until

pytestmark = [needs_openssl, needs_curl]

BASE = {"prompt": "My name is Olivier and I", "max_tokens": 8, "temperature": 0}

# MindIE's own call, with the paths of its installation
MINDIE_CURL = """\
curl -H "Accept: application/json" -H "Content-type: application/json" --cacert /home/runs/static_conf/ca/ca.pem  \
--cert /home/runs/static_conf/cert/client.pem  --key /home/runs/static_conf/cert/client.key.pem -X POST -d '{
"prompt": "My name is Olivier and I",
"stream": true,
"repetition_penalty": 1.0,
"top_p": 1.0,
"top_k": 10,
"max_tokens": 16,
"temperature": 1.0
}' https://{ip}:{port}/generate"""

MINDIE_BODY = """\
{
    "prompt": "My name is Olivier and I",
    "max_tokens": 20,
    "repetition_penalty": 1.03,
    "presence_penalty": 1.2,
    "frequency_penalty": 1.2,
    "temperature": 0.5,
    "top_k": 10,
    "top_p": 0.95,
    "stream": false
}"""

VLLM_CURLS = (
    """\
curl -X POST http://localhost:8080/generate \\
    -H "Content-Type: application/json" \\
    -d '{
    "prompt": "hello",
    "max_tokens": 100,
    "temperature": 0,
    "ignore_eos": false,
    "presence_penalty":2
     }'""",
    """\
curl -X POST http://localhost:8080/generate \\
    -H "Content-Type: application/json" \\
    -d '{
    "prompt": "hello",
    "max_tokens": 100,
    "top_p": 1,
    "temperature": 0,
    "ignore_eos": false,
    "top_k": -1,
    "use_beam_search":true,
    "best_of":2,
    "length_penalty":2
     }'""",
)


def run_curl(command: str) -> bytes:
    """What a shell's curl prints."""
    done = subprocess.run(
        command.replace("curl ", "curl -sS --fail ", 1), shell=True, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificates(directory)
    return directory


@pytest.fixture(scope="module")
def server(tiny_dir: str, certificates: pathlib.Path) -> Iterator[Server]:
    """A server in MindIE's form that only those with a certificate may ask."""
    flags = ["--model", tiny_dir, "--generate-format", "mindie", *ENGINE_FLAGS]
    # a certificate's file may hold the key too
    both = certificates / "both.pem"
    both.write_text("".join((certificates / name).read_text() for name in ("server.pem", "server.key")))
    flags += ["--ssl-certfile", str(both)]
    flags += ["--ssl-ca-certs", str(certificates / "ca.pem"), "--ssl-cert-reqs", "2"]
    server = Server(GENERATE_SERVER, flags, scheme="https")
    try:
        assert wait_until(lambda: "Uvicorn running on https://" in server.log, 90), server.log
        yield server
        assert server.terminate() == 0
        assert server.orphans() == []
    finally:
        server.close()


@pytest.fixture
def mindie(server: Server, certificates: pathlib.Path) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    with httpx.Client(base_url=server.url, timeout=60, verify=context) as client:
        yield client


def frames(mindie: httpx.Client, **fields: Any) -> list[list[str]]:
    with mindie.stream("POST", "/generate", json=BASE | fields | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        body = b"".join(response.iter_raw())
    assert body.endswith(b"\0")
    found = [json.loads(frame) for frame in body.split(b"\0")[:-1]]
    assert all(list(frame) == ["text"] for frame in found)
    return [frame["text"] for frame in found]


def joined(pieces: list[list[str]]) -> list[str]:
    return ["".join(parts) for parts in zip(*pieces, strict=True)]


def test_the_documented_call_with_certificates(
    server: Server, certificates: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    command = MINDIE_CURL.replace("/home/runs/static_conf/ca/ca.pem", str(certificates / "ca.pem"))
    command = command.replace("/home/runs/static_conf/cert/client.pem", str(certificates / "client.pem"))
    command = command.replace("/home/runs/static_conf/cert/client.key.pem", str(certificates / "client.key"))
    command = command.replace("{ip}:{port}", f"127.0.0.1:{server.port}")
    assert "/home" not in command
    answer = run_curl(command)
    found = [json.loads(frame)["text"] for frame in answer.split(b"\0")[:-1]]
    assert answer.endswith(b"\0")
    assert 1 <= len(found) <= 16
    assert all(len(texts) == 1 and not texts[0].startswith("My name") for texts in found)
    # without a certificate, and with one that another authority has signed
    make_certificates(tmp_path)
    strangers = [re.sub(r"--cert \S+ +--key \S+ ", "", command)]
    strangers.append(command.replace(str(certificates / "client."), str(tmp_path / "client.")))
    assert len({command, *strangers}) == 3
    for stranger in strangers:
        done = subprocess.run(stranger, shell=True, capture_output=True, timeout=30, check=False)
        assert done.returncode != 0
        assert done.stdout == b""


@pytest.mark.parametrize("curl", VLLM_CURLS)
def test_vllm_s_documented_bodies_are_taken_too(mindie: httpx.Client, generate_server: Server, curl: str) -> None:
    (body,) = re.findall(r"-d '(.*)'", curl, re.DOTALL)
    (text,) = mindie.post("/generate", content=body).raise_for_status().json()["text"]
    assert text.startswith("hello")
    plain = json.loads(run_curl(curl.replace("localhost:8080", f"127.0.0.1:{generate_server.port}")))
    assert plain == {"text": [text]}


def test_mindie_s_documented_bodies_in_both_forms(mindie: httpx.Client, generate_server: Server) -> None:
    (stream,) = re.findall(r"-d '(.*)'", MINDIE_CURL, re.DOTALL)
    for body in (MINDIE_BODY, stream):
        response = httpx.post(f"{generate_server.url}/generate", content=body, timeout=60)
        assert response.status_code == 200
        assert mindie.post("/generate", content=body).status_code == 200
    (text,) = mindie.post("/generate", content=MINDIE_BODY).json()["text"]
    assert text.startswith("My name is Olivier and I")


def test_a_stream_holds_only_what_is_new(mindie: httpx.Client) -> None:
    response = mindie.post("/generate", json=BASE)
    assert response.headers["content-type"] == "application/json"
    (whole,) = response.json()["text"]
    pieces = frames(mindie)
    assert len(pieces) > 1
    assert [BASE["prompt"] + text for text in joined(pieces)] == [whole]
    fields = {"n": 3, "best_of": 3, "temperature": 1.0, "seed": 2**64 - 1}
    wholes = mindie.post("/generate", json=BASE | fields).json()["text"]
    pieces = frames(mindie, **fields)
    assert all(len(texts) == 3 for texts in pieces)
    assert [BASE["prompt"] + text for text in joined(pieces)] == wholes
    assert len(set(wholes)) == 3
    # characters are written as they are
    assert "é" in mindie.post("/generate", json=BASE | {"prompt": "é"}).content.decode()


def test_fields_of_later_versions(mindie: httpx.Client) -> None:
    def ask(**fields: Any) -> list[str]:
        response = mindie.post("/generate", json=BASE | {"max_tokens": 24, "ignore_eos": True} | fields)
        assert response.status_code == 200, response.text
        return [text.removeprefix(str(BASE["prompt"])) for text in response.json()["text"]]

    (text,) = ask()
    middle = text[5:7]
    expected = text[: text.index(middle)]
    assert ask(stop=[middle]) == ask(stop=middle) == [expected]
    assert ask(stop=middle, include_stop_str_in_output=True) == [expected + middle]
    assert ask(stop_token_ids=list(range(1000)), include_stop_str_in_output=True)[0] != text
    assert ask(seed=1, temperature=1.0) == ask(seed=1, temperature=1.0) != ask(seed=2, temperature=1.0)
    best = ask(n=1, best_of=4, temperature=1.0, seed=3)
    assert best[0] in ask(n=4, best_of=4, temperature=1.0, seed=3)
    assert ask(model="any", skip_special_tokens=False, unheard_of={"x": 1}, seed=None, stop=None) == [text]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": "a" * (MAX_PROMPT_CHARACTERS + 1)}, "prompt"),
    ({"prompt": "one two " * 400}, "maximum context length"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens must be in (0, "),
    ({"max_tokens": 2**70}, ""),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 2.01}, "repetition_penalty"),
    ({"presence_penalty": -2.1}, "presence_penalty"),
    ({"presence_penalty": True}, "presence_penalty"),
    ({"frequency_penalty": 2.1}, "frequency_penalty"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": 0}, "top_k must be -1 or in (0, "),
    ({"top_k": -2}, "top_k must be -1 or in (0, "),
    ({"top_k": 2**31}, "top_k must be -1 or in (0, "),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"stream": 1}, "stream"),
    ({"seed": 0}, "seed"),
    ({"seed": 2**64}, ""),
    ({"n": 0}, "n`"),
    ({"n": 129, "temperature": 1}, "n`"),
    ({"best_of": 129, "temperature": 1}, "best_of"),
    ({"n": 3, "best_of": 2, "temperature": 1}, "best_of must "),
    ({"n": 1, "best_of": 2, "temperature": 1, "stream": True}, "best_of must equal n in a stream"),
    ({"n": 2, "best_of": 2, "use_beam_search": True, "stream": True}, "use_beam_search cannot be used in a stream"),
    ({"stop": [""]}, "stop"),
    ({"stop": 3}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
]


def test_bad_requests(mindie: httpx.Client) -> None:
    for (fields, text), stream in itertools.product(BAD, (False, True)):
        response = mindie.post("/generate", json=BASE | {"stream": stream} | fields)
        assert response.status_code == 422, (fields, response.text)
        body = response.json()
        assert body["type"] == "Input Validation Error"
        assert body["error"].startswith("Input validation error: ")
        assert text in body["error"], (fields, body)
    for content in (b"{x", b"[]", b"", b'{"prompt": "\xff"}', b'{"prompt": "a", "temperature": NaN}'):
        assert mindie.post("/generate", content=content).status_code == 422, content
    assert mindie.post("/generate", json=BASE).status_code == 200


def test_unknown_fields_are_logged_once(mindie: httpx.Client, server: Server) -> None:
    long = "x" * 5000
    for _ in range(2):
        assert mindie.post("/generate", json=BASE | {"image_url": "file:///etc/passwd", long: 1}).status_code == 200
    lines = [line for line in server.log.splitlines() if "does not know" in line and "image_url" in line]
    assert len(lines) == 1 and len(lines[0]) < 400


def test_the_edges_of_the_ranges(mindie: httpx.Client) -> None:
    rows: list[dict[str, Any]] = [
        {"repetition_penalty": 2},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"temperature": 0.001},
        {"temperature": 5, "top_k": 1},
        {"top_k": -1, "top_p": 0.001, "temperature": 1},
        {"max_tokens": 1, "top_p": 1},
        {"n": 1, "best_of": 1},
    ]
    for fields in rows:
        assert mindie.post("/generate", json=BASE | fields).status_code == 200, fields


def test_wrong_paths_and_methods(mindie: httpx.Client) -> None:
    response = mindie.get("/nowhere")
    assert (response.status_code, response.json()) == (404, {"type": "NotFoundError", "error": "not found"})
    assert mindie.get("/generate").status_code == 405
    assert "error" in mindie.get("/generate").json()
    assert mindie.get("/health").status_code == 200


def test_the_longest_prompt_is_read() -> None:
    form = MindieFormat(vocab_size=100, max_model_len=50)
    body = json.dumps({"prompt": "é" * MAX_PROMPT_CHARACTERS, "top_k": 99, "max_tokens": 50}).encode()
    prompt, stream, params = form.parse(body)
    assert (len(prompt), stream) == (MAX_PROMPT_CHARACTERS, False)
    assert (params.top_k, params.max_tokens, params.output_kind) == (99, 50, RequestOutputKind.FINAL_ONLY)
    assert form.parse(b'{"prompt": "a"}')[2].top_k == -1
    for fields in ({"top_k": 100}, {"max_tokens": 51}):
        with pytest.raises(RequestError):
            form.parse(json.dumps({"prompt": "a"} | fields).encode())


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (EngineBusyError("m"), 429, {"error": "Model is overloaded"}),
        (EngineDeadError("m"), 424, {"error": "Request failed during generation"}),
        (KeyError("secret"), 500, {"error": "Incomplete generation"}),
        (
            RequestError("x must be y"),
            422,
            {"type": "Input Validation Error", "error": "Input validation error: x must be y"},
        ),
    ],
)
def test_errors(error: Exception, status: int, body: dict[str, str]) -> None:
    assert to_mindie_error(error) == (status, body)


def test_errors_of_a_server_that_is_full_and_of_one_whose_engine_dies(tiny_dir: str) -> None:
    flags = ["--model", tiny_dir, "--generate-format", "mindie", *ENGINE_FLAGS, "--max-model-len", "32768"]
    flags += ["--kv-cache-memory-bytes", "256M", "--max-num-seqs", "1", "--max-num-queued-reqs", "1"]
    flags += ["--max-body-bytes", "1000"]
    long = BASE | {"max_tokens": 30_000, "ignore_eos": True, "stream": True}
    server = Server(GENERATE_SERVER, flags, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    try:
        server.wait_ready()
        url = f"{server.url}/generate"
        large = httpx.post(url, json=BASE | {"prompt": "x" * 1000}, timeout=60)
        assert (large.status_code, list(large.json())) == (413, ["type", "error"])
        with contextlib.closing(post_raw(server, "/generate", long)) as first:
            received = first.recv(65536)
            with contextlib.closing(post_raw(server, "/generate", long)):
                # the waiting one may still be on its way to the queue: then this one waits, and is given up
                assert wait_until(lambda: is_overloaded(url, long)), server.log
            server.engine_core().kill()
            received += read_rest(first)
        assert b'{"error":"Request failed during generation"}\0' in received
        assert server.wait_exit(20) == 1
    finally:
        server.close()


def is_overloaded(url: str, body: dict[str, Any]) -> bool:
    """Whether a request is refused for the others that wait."""
    with contextlib.suppress(httpx.ReadTimeout):
        response = httpx.post(url, json=body, timeout=1)
        assert (response.status_code, response.json()) == (429, {"error": "Model is overloaded"})
        return True
    return False
