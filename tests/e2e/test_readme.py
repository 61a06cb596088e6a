"""Every block of the README runs as it is printed, in order, in shells that know the system's programs only."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import httpx
import pytest

from ascend_vllm import envs
from tests.server import ROOT, free_port, needs_curl, wait_until


class Way(Enum):
    """How a block is run."""

    COMMANDS = "commands that end"
    SERVER = "a server, which runs until the next one is started"
    ENTER = "commands that every later terminal begins with"
    PROGRAM = "a program in Python"
    # a suite of tests within a test of its own would never end
    DRY = "as far as make says what it would do; this suite is what it does"


class Block(NamedTuple):
    """What is known of a block.

    Attributes:
        start: how its text begins.
        way: how it is run.
        shows: a pattern of its output, or of the server's log.
        port: of a server.
        only_all: whether it is left to --all.
    """

    start: str
    way: Way
    shows: str = ""
    port: int = 0
    only_all: bool = False


BLOCKS = [
    Block("make serve ", Way.SERVER, "Application startup complete", 8000),
    Block("curl -X POST http://localhost:8000/v1/chat/completions", Way.COMMANDS, "KV cache"),
    Block("make test ", Way.DRY, "-m pytest"),
    Block("source .venv/bin/activate", Way.ENTER),
    Block("ascend-vllm serve demo", Way.SERVER, port=8000),
    Block("pip install openai", Way.COMMANDS),
    Block("from openai import OpenAI", Way.PROGRAM, "--max-model-len"),
    Block("python -m ascend_vllm.entrypoints.api_server", Way.SERVER, port=8080),
    Block("curl -X POST http://localhost:8080/generate", Way.COMMANDS, "The KV cache [a-z]+ "),
    # how "hello" goes on changes with the demo model, which learns the flags' descriptions; that it is one does not
    Block(
        "from ascend_vllm import LLM",
        Way.PROGRAM,
        r"The KV cache [a-z]+ [\s\S]*\nhello\s[\s\S]*demo model[\s\S]*\nHello[\s\S]*demo model",
    ),
    Block("python scripts/make_random_model.py", Way.SERVER, port=8000, only_all=True),
    Block("python benchmarks/benchmark_serving.py", Way.COMMANDS, "Output token throughput", only_all=True),
    Block("python benchmarks/benchmark_throughput.py", Way.COMMANDS, "Total num output tokens", only_all=True),
]


def _printed() -> list[str]:
    """The text of all blocks."""
    return re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)


def test_every_block_is_known() -> None:
    printed = _printed()
    unknown = [text for text, block in zip(printed, BLOCKS, strict=False) if not text.startswith(block.start)]
    assert not unknown and len(printed) == len(BLOCKS)


class Machine:
    """A clone of this tree that is built, the home of a user, and the terminals where blocks are run.

    Attributes:
        log: where the server that runs writes to.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self._tree = directory / "ascend-vllm"
        self._home = directory / "home"
        self.log = directory / "server.log"
        self._entered = ""
        self._server: subprocess.Popen[bytes] | None = None
        # where another program listens already, another port than the printed one
        self._ports = {
            port: port if _is_free(port) else free_port() for port in {block.port for block in BLOCKS} - {0}
        }
        self._clone()
        cache = self._home / ".cache"
        cache.mkdir(parents=True)
        (cache / "ascend_vllm").symlink_to(envs.cache_root())

    def _clone(self) -> None:
        """The tree, and an environment that finds the packages of this one; `make` takes both for built."""
        left_out = shutil.ignore_patterns(".git", ".venv", "build", "*-pytest-*.pyc", ".*_cache", "_npu", "_sim")
        shutil.copytree(ROOT, self._tree, symlinks=True, ignore=left_out)
        environment = self._tree / ".venv"
        venv.create(environment, symlinks=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "packages.pth").write_text(f"{self._tree}\n{sysconfig.get_path('purelib')}\n")
        for name, module in (("ascend-vllm", "ascend_vllm.entrypoints.cli"), ("pip", "pip._internal.cli.main")):
            program = environment / "bin" / name
            program.write_text(
                f"#!{environment}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
            )
            program.chmod(0o755)
        (environment / ".stamps").mkdir()
        for name in ("torch", "native", "package"):
            (environment / ".stamps" / name).touch()

    def _shell(self, script: str) -> list[str]:
        for printed, port in self._ports.items():
            script = script.replace(str(printed), str(port))
        clean = ["env", "-i", f"HOME={self._home}", "PATH=/usr/bin:/bin"]
        if self._ports[8000] != 8000:
            clean.append(f"PORT={self._ports[8000]}")
        return [*clean, "bash", "-e", "-o", "pipefail", "-c", self._entered + script]

    def run(self, script: str) -> str:
        """What a block prints."""
        done = subprocess.run(self._shell(script), cwd=self._tree, capture_output=True, text=True, timeout=1200)
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}\nThe server:\n{log}"
        return done.stdout

    def run_program(self, source: str) -> str:
        """What a Python program prints."""
        (self._home / "program.py").write_text(source)
        return self.run("python ~/program.py")

    def enter(self, script: str) -> None:
        """Every terminal from now on begins with this."""
        self.run(script)
        self._entered += script

    def serve(self, script: str, port: int) -> str:
        """Starts a server in place of the one that runs; gives its log when it is ready."""
        self.stop()
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(
                self._shell(script), cwd=self._tree, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        server, url = self._server, f"http://127.0.0.1:{self._ports[port]}/health"

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(url, timeout=30).status_code == 200
            return server.poll() is not None

        assert wait_until(is_ready, 300) and server.poll() is None, self.log.read_text(errors="replace")
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """Ctrl-C in the server's terminal."""
        if self._server is not None:
            os.killpg(self._server.pid, signal.SIGINT)
            self._server.wait(60)
            self._server = None

    def close(self) -> None:
        """Ends what is left, by force."""
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(60)


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


@pytest.fixture
def machine(demo_model_dir: str, tmp_path: pathlib.Path) -> Iterator[Machine]:
    """One that has the demo model."""
    machine = Machine(tmp_path)
    yield machine
    machine.close()


@needs_curl
@pytest.mark.slow
def test_every_block_runs_as_printed(machine: Machine, runs_all: bool) -> None:
    for text, block in zip(_printed(), BLOCKS, strict=True):
        if block.only_all and not runs_all:
            continue
        shown = ""
        match block.way:
            case Way.COMMANDS:
                shown = machine.run(text)
            case Way.SERVER:
                shown = machine.serve(text, block.port)
            case Way.ENTER:
                machine.enter(text)
            case Way.PROGRAM:
                shown = machine.run_program(text)
            case Way.DRY:
                shown = machine.run(text.replace("make ", "make -n "))
        assert re.search(block.shows, shown), f"{text}\n{shown}"
    machine.stop()


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    prose = {page: re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL) for page in pages}
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose[page])
        if not (page.parent / target).exists()
    ]
    assert broken == []
