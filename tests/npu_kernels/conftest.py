"""Kernels in Ascend C, compiled for the host shim."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc_ascend"
CACHE = ROOT / "build" / "npu_kernels"


def compile_library(sources: list[pathlib.Path]) -> ctypes.CDLL:
    """A shared library of sources that include the shim; kept until one of them or a header changes."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    # half to float and back in one instruction each: the kernels' tests spend most of their time there
    flags = ["-std=c++17", "-O2", "-mf16c", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    flags += [f"-I{CSRC / 'sim' / 'ascendc'}"]
    headers = [*sorted((CSRC / "sim" / "ascendc").glob("*.h")), *sorted((CSRC / "npu").glob("**/*.h"))]
    key = hashlib.sha256(" ".join([compiler, *flags]).encode())
    for path in [*sources, *headers]:
        key.update(path.read_bytes())
    library = CACHE / f"{sources[0].stem}-{key.hexdigest()[:16]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, "-o", made, *sources], check=True, timeout=300)
        made.rename(library)
    return ctypes.CDLL(str(library))
