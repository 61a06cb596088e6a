"""Programs of benchmarks/, scripts/ and examples/: run by themselves or by this process, or loaded as modules."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pathlib
import runpy
import subprocess
import sys
import types

import pytest

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


def run_here(*words: str, directory: pathlib.Path = ROOT) -> tuple[str, str]:
    """What a program of this repository writes to stdout and stderr when this process runs it.

    It need not import torch and the package again, which takes longer than most programs need for the rest.

    Args:
        words: the program's path, relative to the repository, and its arguments.
        directory: to run it in.
    """
    program = ROOT / words[0]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        patch.chdir(directory)
        patch.syspath_prepend(str(program.parent))
        patch.setattr("sys.argv", [str(program), *words[1:]])
        runpy.run_path(str(program), run_name="__main__")
    return stdout.getvalue(), stderr.getvalue()
