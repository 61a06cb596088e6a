"""Programs of benchmarks/ and scripts/: run by themselves, or as modules whose neighbours are found as then."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types

from tests.server import ROOT

_DIRECTORY = str(ROOT / "benchmarks")


def load_benchmark(name: str) -> types.ModuleType:
    """The module of benchmarks/NAME.py, NAME being dotted for one of its packages."""
    if _DIRECTORY not in sys.path:
        sys.path.append(_DIRECTORY)
    return importlib.import_module(name)


def load_script(name: str) -> types.ModuleType:
    """The module of scripts/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(*words: str, **variables: str) -> str:
    """What a program of this repository prints, which must end well; its path is relative to the repository."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
