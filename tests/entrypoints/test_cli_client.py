"""`ascend-vllm complete`, `chat` and `collect-env`, typed as a user types them."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

import httpx
import pytest

from tests.server import ROOT, Server, free_port


def run(*words: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ascend_vllm.entrypoints.cli", *words],
        cwd=ROOT,
        input=typed,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_complete(openai_server: Server) -> None:
    done = run("complete", "--url", f"{openai_server.url}/v1", typed="hello\n\nagain\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Using model: tiny\nPlease enter prompt to complete:\n> ")
    # the empty line is asked for again and not sent
    assert done.stdout.count("> ") >= 4


def num_prompt_tokens(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total")]
    return float(line.split()[-1])


def test_chat_keeps_the_conversation(patient_server: Server) -> None:
    words = ["chat", "--url", f"{patient_server.url}/v1", "--model-name", "alias", "--system-prompt", "Be brief."]
    counts = [num_prompt_tokens(patient_server)]
    for typed in ("hello\n", "hello\nhello\n"):
        done = run(*words, typed=typed)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Using model: alias\nPlease enter a message for the chat model:\n> ")
        counts.append(num_prompt_tokens(patient_server))
    one, two = counts[1] - counts[0], counts[2] - counts[1]
    # the second question brings the first one and its answer along
    assert two > 2 * one


@pytest.mark.parametrize("name", ["chat", "complete"])
def test_one_message_only(openai_server: Server, name: str) -> None:
    for flag in ("-q", "--quick"):
        done = run(name, "--url", f"{openai_server.url}/v1", flag, "hello", typed="not read\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Using model: tiny\n") and "Please enter" not in done.stdout
        assert len(done.stdout.splitlines()) > 1


def test_lines_are_edited_and_recalled_in_a_terminal() -> None:
    """Arrow keys were sent to the model as escape sequences."""
    pytest.importorskip("readline")
    code = "import sys; from ascend_vllm.entrypoints import cli_client as c; "
    code += "print(list(c._typed_lines('Please', sys.stdin, sys.stdout)))"
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as keyboard:
        environment = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull, "PYTHONPATH": str(ROOT)}
        child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, env=environment)
        os.close(theirs)
        seen = b""
        # left, "l"; up, "!"; a pasted text of two lines; the end of the input
        for keys in (b"helo\x1b[Dl\r", b"\x1b[A!\r", b"\x1b[200~two\nlines\x1b[201~\r", b"\x04"):
            while not seen.endswith(b"> ") and child.poll() is None:
                seen += keyboard.read(1024)
            keyboard.write(keys)
            seen = b""
        with contextlib.suppress(OSError):  # a terminal ends with EIO
            while more := keyboard.read(1024):
                seen += more
        assert child.wait(60) == 0
    assert b"['hello', 'hello!', 'two\\nlines']" in seen


def test_a_server_that_refuses_is_one_line(openai_server: Server) -> None:
    done = run("complete", "--url", f"{openai_server.url}/v1", "--model-name", "nobody", typed="hello\n")
    assert done.returncode == 1
    assert "answers 404: The model `nobody` does not exist." in done.stderr
    assert "Traceback" not in done.stderr


def test_no_server_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    done = run("chat", "--url", url, typed="hello\n")
    assert done.returncode == 1
    assert f"{url} cannot be reached" in done.stderr
    assert "--url names another" in done.stderr


def test_collect_env() -> None:
    done = run("collect-env")
    assert done.returncode == 0
    facts = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert facts["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert facts["torch"][0].isdigit()
    assert "Native kernels    loaded" in done.stdout
