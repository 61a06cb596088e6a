"""A file of requests, answered without a server."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.server import ROOT

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "temperature": 0}
COMPLETION = {"prompt": "hello", "max_tokens": 4, "temperature": 0}


def line(custom_id: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def run(tmp_path: pathlib.Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "in.jsonl").write_text(text)
    command = [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "run-batch"]
    command += ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_answers_are_those_of_the_server(tmp_path: pathlib.Path, tiny_dir: str, http: httpx.Client) -> None:
    requests = [
        line("chat", "/v1/chat/completions", CHAT),
        line("completion", "/v1/completions", COMPLETION),
        line("unsupported", "/v1/audio/speech", {}),
        line("stream", "/v1/completions", {**COMPLETION, "stream": True}),
        line("wrong", "/v1/completions", {**COMPLETION, "temperature": -1}),
        line("model", "/v1/completions", {**COMPLETION, "model": "nobody"}),
    ]
    flags = ["--model", tiny_dir, "--served-model-name", "tiny", "--dtype", "float32"]
    done = run(tmp_path, "\n".join(map(json.dumps, requests)) + "\n\n", *flags, "--kv-cache-memory-bytes", "32M")
    assert done.returncode == 0, done.stderr
    assert "Running batch: 100%" in done.stderr
    outputs = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [output["custom_id"] for output in outputs] == [request["custom_id"] for request in requests]
    assert all(output["id"].startswith("vllm-") for output in outputs)
    by_id = {output["custom_id"]: output for output in outputs}
    for name, request in (("chat", requests[0]), ("completion", requests[1])):
        response = by_id[name]["response"]
        assert (response["status_code"], by_id[name]["error"]) == (200, None)
        assert response["request_id"].startswith("vllm-batch-")
        expected = http.post(request["url"], json=request["body"]).json()
        assert response["body"]["choices"] == expected["choices"]
        assert response["body"]["usage"] == expected["usage"]
    assert by_id["unsupported"]["response"]["status_code"] == 400
    assert by_id["unsupported"]["response"]["body"] is None
    assert "supported in the batch endpoint" in by_id["unsupported"]["error"]
    assert (by_id["stream"]["response"], by_id["stream"]["error"]) == (
        None,
        "Request must not be sent in stream mode",
    )
    assert by_id["wrong"]["response"]["status_code"] == 400
    assert by_id["wrong"]["error"]["error"]["message"] == "temperature must be non-negative, got -1.0."
    assert by_id["model"]["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"custom_id": "a"}', "line 1: Object missing required field `method`"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "line 1: Invalid enum value"),
        ("nonsense", "line 1: JSON is malformed"),
    ],
)
def test_a_wrong_line_ends_it_before_the_model_is_loaded(
    tmp_path: pathlib.Path, tiny_dir: str, text: str, words: str
) -> None:
    done = run(tmp_path, text, "--model", tiny_dir)
    assert done.returncode == 2
    assert words in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_files_that_are_not_there(tmp_path: pathlib.Path, tiny_dir: str) -> None:
    missing = tmp_path / "missing" / "file"
    for words, flag in ((["-i", str(missing)], "--input-file"), (["-o", str(missing)], "--output-file")):
        done = run(tmp_path, json.dumps(line("a", "/v1/completions", COMPLETION)), "--model", tiny_dir, *words)
        assert done.returncode == 2
        assert f"{flag} {missing} cannot be" in done.stderr
