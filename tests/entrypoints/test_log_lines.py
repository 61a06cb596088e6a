"""What clients send does not forge lines of the log, colour them, or turn them around."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from uvicorn.logging import AccessFormatter

from ascend_vllm.log_lines import MAX_CHARACTERS, keep_safe, one_line
from tests.server import ROOT, Server, wait_until

FORGED = "FORGED it"
# ways to begin a line, to colour it, and to show it in another order
EVIL = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\x1b[2K", "\x9b2K", "\x00", "\x7f"]
EVIL += ["\t", "\u202e", "\u2066", "\u200f", "\u061c"]
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def ask_raw(server: Server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_nothing_of_a_request_forges_a_line(patient_server: Server) -> None:
    """Names of fields, texts, headers and paths are logged; ids that clients chose were, too."""
    server = patient_server
    before = len(server.log)
    text = "x" + FORGED.join(EVIL) + FORGED
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for stream in (False, True):
            body = {"prompt": text, "max_tokens": 1, "user": text, "stream": stream}
            body |= {f"field{number}{evil}{FORGED}": 1 for number, evil in enumerate(EVIL)}
            assert http.post("/v1/completions", json=body | {"stop": [text]}).status_code == 200, stream
        http.post("/v1/completions", json=body | {"request_id": f"evil{text}"})
        http.post("/v1/completions", json=body | {"model": text, "guided_regex": text})
        http.post("/v1/completions", json={"prompt": "x", "guided_regex": f"({text}"})
        http.post("/v1/chat/completions", json={"messages": [{"role": text, "content": text}], "max_tokens": 1})
        http.post("/v1/responses", json={"input": "x", "request_id": text, "max_output_tokens": 1})
    for target in (b"/%0aFORGED", b"/%1b%5b2K", b"/x?a=%0d%0aFORGED", b"/x?\x9b2KFORGED", b"/\xc2\x85FORGED"):
        ask_raw(server, b"GET " + target + b" HTTP/1.1\r\nConnection: close\r\n\r\n")
    evil_headers = b"X-Forwarded-For: \x9b2K\x85FORGED\r\nX-Request-Id: \x85FORGED\r\nConnection: close\r\n\r\n"
    ask_raw(server, b"GET /version HTTP/1.1\r\n" + evil_headers)
    assert wait_until(lambda: "GET /version" in server.log[before:])
    log = server.log[before:]
    assert "Received request cmpl-" in log and "Ignored fields" in log
    lines = log.split("\n")
    assert not [line for line in lines if line.lstrip().startswith("FORGED")]
    assert not UNSAFE.search(log), UNSAFE.findall(log)
    assert max(map(len, lines)) < MAX_CHARACTERS + 200


def test_prompts_are_private_unless_requests_are_logged(openai_server: Server, patient_server: Server) -> None:
    for server, is_logged in ((openai_server, False), (patient_server, True)):
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for stream in (False, True):
                body = {"model": "tiny", "max_tokens": 1, "stream": stream}
                assert http.post("/v1/completions", json=body | {"prompt": "my secret"}).status_code == 200
                messages = [{"role": "user", "content": "my secret"}]
                assert http.post("/v1/chat/completions", json=body | {"messages": messages}).status_code == 200
            http.post("/v1/completions", json={"model": "nobody", "prompt": "my secret"})
            http.post("/v1/completions", json={"prompt": "my secret", "max_tokens": -1})
        assert wait_until(lambda server=server: "POST /v1/chat/completions" in server.log)
        assert ("my secret" in server.log) is is_logged


def test_a_line_has_a_limit(openai_server: Server) -> None:
    before = len(openai_server.log)
    target = b"/version?q=" + b"y" * 60_000
    answer = ask_raw(openai_server, b"GET %b HTTP/1.1\r\nConnection: close\r\n\r\n" % target)
    assert answer.startswith(b"HTTP/1.1 200")
    assert wait_until(lambda: "GET /version?q=yyy" in openai_server.log[before:])
    (line,) = [line for line in openai_server.log[before:].split("\n") if "GET /version?q=yyy" in line]
    assert len(line) < MAX_CHARACTERS + 200
    assert "(cut, of 60011 characters)" in line and line.endswith("200 OK")


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger with a handler and a format that are not this package's."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(name)s|%(message)s"))
    logger = logging.Logger("foreign")
    logger.addHandler(handler)
    logging.Logger.manager.loggerDict["foreign"] = logger
    keep_safe("foreign", "foreign")
    yield logger, written
    del logging.Logger.manager.loggerDict["foreign"]


def test_text_stays_and_what_is_no_text_is_shown(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log, written = logger
    log.info("ordinary %s, %d %%", "texts: é 漢字 🙂 «»", 7)
    log.info("%s", "".join(EVIL) + "\ud800")
    log.info("behind\n")
    shown = written.getvalue().split("\n")
    assert shown[0] == "foreign|ordinary texts: é 漢字 🙂 «», 7 %"
    assert shown[1] == (
        r"foreign|\n\r\r\n\x0b\x0c\x1c\x85\u2028\u2029\x1b[2K\x9b2K\x00\x7f\t\u202e\u2066\u200f\u061c\ud800"
    )
    assert shown[2:] == ["foreign|behind", ""]
    log.info("%d", "no number")  # a mistake is the handler's to tell


def test_tracebacks_keep_their_lines_and_messages_in_them_begin_none(
    logger: tuple[logging.Logger, io.StringIO],
) -> None:
    log, written = logger
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            error = ValueError(f"told by a client:\n{FORGED}\x1b[2K\u202e")
            error.add_note(f"a note\n{FORGED}")
            raise error from inner
    except ValueError:
        log.exception("it failed: %s", "so\nit did")
    first, *lines = written.getvalue().rstrip("\n").split("\n")
    assert first == r"foreign|it failed: so\nit did"
    assert lines[0] == "  Traceback (most recent call last):"
    assert "  ValueError: told by a client:" in lines and f"  {FORGED}\\x1b[2K\\u202e" in lines
    assert f"  {FORGED}" in lines and "  KeyError: 'inner'" in lines
    assert all(line.startswith("  ") for line in lines)


def test_messages_and_tracebacks_are_cut(logger: tuple[logging.Logger, io.StringIO]) -> None:
    log, written = logger
    log.info("%s", "a" * 10_000_000)
    log.info("%s", "\n" * 10_000)
    try:
        raise ValueError("\n" * 1_000_000)
    except ValueError:
        log.exception("b" * MAX_CHARACTERS)
    first, second, third, *lines = written.getvalue().rstrip("\n").split("\n")
    assert first == f"foreign|{'a' * MAX_CHARACTERS} … (cut, of 10000000 characters)"
    assert second == "foreign|"  # nothing but line ends
    assert third == f"foreign|{'b' * MAX_CHARACTERS}"
    assert len(lines) < 100_000 and any("(cut, of 100" in line for line in lines)
    assert len(one_line("\n" * 5000)) < MAX_CHARACTERS + 100


def test_uvicorn_s_own_formatter_of_the_access_log() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(AccessFormatter('%(client_addr)s - "%(request_line)s" %(status_code)s', use_colors=False))
    arguments = ("a\x9b:1", "GET", "/\n" + "y" * 9000, "1.1", 200)
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', arguments, None)
    keep_safe("uvicorn.access")
    log = logging.getLogger("uvicorn.access")
    assert log.filter(record)
    handler.handle(record)
    assert written.getvalue().startswith(r'a\x9b:1 - "GET /\nyyyy') and written.getvalue().endswith('" 200 OK\n')
    assert len(written.getvalue()) < MAX_CHARACTERS + 100


def test_it_holds_for_a_configured_log(tmp_path: pathlib.Path) -> None:
    """Of VLLM_LOGGING_CONFIG_PATH, read before the loggers are made, or any read later."""
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"own": {"format": "OWN %(message)s"}},
        "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own", "stream": "ext://sys.stdout"}},
        "loggers": {"ascend_vllm": {"handlers": ["own"], "level": "INFO"}},
    }
    path = tmp_path / "logging.json"
    path.write_text(json.dumps(settings))
    program = (
        "import json, logging.config, sys; from ascend_vllm.logger import init_logger; "
        "log = init_logger('ascend_vllm.x'); log.info('first%s', '\\nFORGED'); "
        f"logging.config.dictConfig(json.load(open({str(path)!r}))); log.info('second%s', '\\nFORGED')"
    )
    for env in ({"VLLM_LOGGING_CONFIG_PATH": str(path)}, {}):
        command, env = [sys.executable, "-c", program], env | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert r"first\nFORGED" in done.stdout + done.stderr
        assert r"OWN second\nFORGED" in done.stdout
        assert not [line for line in (done.stdout + done.stderr).split("\n") if line.startswith("FORGED")]
