"""Programs of benchmarks/ as modules, with their neighbours found as if they were run."""

from __future__ import annotations

import importlib
import sys
import types

from tests.server import ROOT

_DIRECTORY = str(ROOT / "benchmarks")


def load_benchmark(name: str) -> types.ModuleType:
    """The module of benchmarks/NAME.py, NAME being dotted for one of its packages."""
    if _DIRECTORY not in sys.path:
        sys.path.append(_DIRECTORY)
    return importlib.import_module(name)
