"""The examples of the README run as they stand."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

from tests.server import Server

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _example(name: str) -> str:
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    assert found, f"README.md has no example {name}"
    return found[1]


def _run(code: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_openai_client_example(demo_server: Server) -> None:
    code = _example("openai_client").replace("http://localhost:8000", demo_server.url)
    assert "--max-model-len" in _run(code)


def test_offline_example(demo_model_dir: str) -> None:
    assert len(_run(_example("offline")).splitlines()) >= 3


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
