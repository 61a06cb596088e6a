"""Third-party clients get the same answers as plain HTTP requests.

One is in every run, another one with --all; `make test-clients` runs them all, by all_clients.py.
"""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from tests.clients import checks
from tests.server import Server

ROOT = checks.HERE.parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "further"), [("langchain", {"brief"}), pytest.param("litellm", set(), marks=pytest.mark.exhaustive)]
)
def test_answers_are_those_of_http(
    name: str,
    further: set[str],
    clients_environment: pathlib.Path,
    clients_home: pathlib.Path,
    clients_server: Server,
) -> None:
    seen = checks.run_client(name, clients_environment, clients_home, clients_server.url, "", checks.QUESTION)
    assert set(seen) == {"chat", "finish_reason", "usage", "stream", "completion", "tool", "structured"} | further
    checks.check(seen, checks.ask(clients_server.url, ""))


def _pinned(directory: pathlib.Path) -> dict[str, str]:
    """What a client is installed from: package → version."""
    if (directory / "package.json").exists():
        pinned: dict[str, str] = json.loads((directory / "package.json").read_text())["dependencies"]
        return pinned
    lines = (directory / "requirements.txt").read_text().splitlines()
    return dict(re.fullmatch(r"([\w.-]+)(?:\[.*\])?==(\S+)", line).groups() for line in lines if line[:1] != "#")


def test_the_page_names_every_client_and_its_version() -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    programs = [*checks.HERE.glob("*/client.py"), *checks.HERE.glob("*/client.mjs")]
    assert len(programs) >= 10
    for directory in (program.parent for program in programs):
        assert f"](../tests/clients/{directory.name}/" in page, directory.name
        for package, version in _pinned(directory).items():
            assert f"{package} {version}" in page, directory.name
