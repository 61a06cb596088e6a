"""The path of one streaming chat request through the files of the package, as docs/architecture.md lists it.

A real server and its engine core note which files' functions run from the moment a request is sent until the model is
called; see tests/request_trace.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import time

import httpx
import pytest

from tests.server import OPENAI_SERVER, ROOT, Server, further_flags, running, wait_until

# without a good reason for more
MAX_FILES = 40
HEADING = "## The path of one streaming chat request, file by file"
# code that runs independently of requests: the server's clock, the log, the metrics' timer
BESIDE = {"entrypoints/http/launcher.py", "entrypoints/http/server.py", "log_lines.py", "engine/metrics.py"}
NUM_REQUESTS = 3


def listed_files() -> list[str]:
    """The files of the section, in its order."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split(HEADING)[1].split("\n## ")[0]
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.MULTILINE)


def ask(server: Server, text: str) -> None:
    body = {"model": "tiny", "stream": True, "max_tokens": 4, "ignore_eos": True}
    body["messages"] = [{"role": "user", "content": text}]
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")


def traced_files(server: Server, directory: pathlib.Path, number: int) -> set[str]:
    """The files that one request passes before the model is called."""
    (directory / f"begin-{number}").touch()
    assert wait_until(lambda: len(list(directory.glob(f"begun-{number}-*"))) == 2, 30)
    start = time.monotonic()
    ask(server, f"The {number}. request")
    (directory / f"end-{number}").touch()
    assert wait_until(lambda: len(list(directory.glob(f"{number}-*.json"))) == 2, 30)
    traces = [json.loads(path.read_text()) for path in directory.glob(f"{number}-*.json")]
    (called,) = [trace.pop("model")[0] for trace in traces if "model" in trace]
    # something may have called a file before, such as a timer
    return {path for trace in traces for path, times in trace.items() if any(start <= at < called for at in times)}


def test_a_streaming_chat_request_passes_the_files_that_the_document_lists(
    tiny_dir: str, tmp_path: pathlib.Path
) -> None:
    if further_flags():
        pytest.skip("the list is that of a server with one CPU worker")
    listed = listed_files()
    assert len(set(listed)) == len(listed) <= MAX_FILES
    environment = {
        "REQUEST_TRACE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "request_trace"), str(ROOT)]),
    }
    flags = ["--model", tiny_dir, "--served-model-name", "tiny", "--dtype", "float32"]
    with running(OPENAI_SERVER, [*flags, "--kv-cache-memory-bytes", "32M"], environment) as server:
        # what is made once, and kept
        ask(server, "Hello")
        traced = set().union(*(traced_files(server, tmp_path, number) for number in range(NUM_REQUESTS)))
    assert (sorted(traced - BESIDE - set(listed)), sorted(set(listed) - traced)) == ([], [])
