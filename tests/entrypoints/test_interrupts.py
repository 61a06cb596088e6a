"""Ctrl-C in the commands that a user runs in a terminal: one line, exit code 130."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.server import GENERATE_SERVER, OPENAI_SERVER, ROOT, Server, wait_until

CLI = "ascend_vllm.entrypoints.cli"
INTERRUPTED = 130

# runs a program, with Ctrl-C while it imports a module
_INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

program, module = sys.argv[1:3]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
del sys.argv[1:3]
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("program", "module"),
    [
        (CLI, "ascend_vllm.args.engine_args"),
        (CLI, "ascend_vllm.entrypoints.openai.api_server"),
        (OPENAI_SERVER, "ascend_vllm.args.parser"),
        (OPENAI_SERVER, "ascend_vllm.entrypoints.openai.chat_tools"),
        (GENERATE_SERVER, "ascend_vllm.entrypoints.http.launcher"),
    ],
)
def test_while_a_program_imports(program: str, module: str) -> None:
    words = ["serve", "/no/model"] if program == CLI else ["--model", "/no/model"]
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT, program, module, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "ascend-vllm: interrupted\n")


@contextlib.contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[bytes], pathlib.Path]]:
    """A command with nothing to read yet, and the file with all that it prints."""
    with tempfile.NamedTemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", CLI, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, pathlib.Path(printed.name)
        finally:
            process.kill()
            process.communicate()


def check_interrupt(words: list[str], mark: str, typed: bytes = b"") -> None:
    """Interrupts a command, and all that it has started, once it has printed something."""
    with command(*words) as (process, printed):
        assert process.stdin is not None
        process.stdin.write(typed)
        process.stdin.flush()
        assert wait_until(lambda: mark in printed.read_text() or process.poll() is not None)
        before = printed.read_text()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == INTERRUPTED, printed.read_text()
        *progress, last = printed.read_text()[len(before) :].strip("\n").rsplit("\n", 1)
        assert last.endswith("ascend-vllm: interrupted")
        assert "Traceback" not in printed.read_text() and "Error" not in "".join(progress)


def test_in_a_chat(patient_server: Server) -> None:
    url = f"{patient_server.url}/v1"
    check_interrupt(["chat", "--url", url], "> ")
    # in the middle of an answer
    check_interrupt(["complete", "--url", url, "--model-name", "tiny"], "> ", b"hello\n")


def test_in_a_benchmark_of_a_server(patient_server: Server) -> None:
    words = ["bench", "serve", "--base-url", patient_server.url, "--num-prompts", "2", "--random-output-len", "30000"]
    check_interrupt([*words, "--random-input-len", "5"], "Sending 2 requests")


def test_in_a_benchmark_of_the_engine(tiny_dir: str) -> None:
    words = ["bench", "throughput", "--model", tiny_dir, "--num-prompts", "500", "--input-len", "5"]
    words += ["--output-len", "500", "--kv-cache-memory-bytes", "32M"]
    check_interrupt(words, "Processed prompts")
