"""Kernels in Ascend C, compiled for the host shim."""

from __future__ import annotations

import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc_ascend"
CACHE = ROOT / "build" / "npu_kernels"


def compile_library(source: pathlib.Path) -> ctypes.CDLL:
    """A shared library of a source that includes the shim; kept until it, the shim or a kernel changes."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    # half to float and back in one instruction each: the kernels' tests spend most of their time there
    flags = ["-std=c++17", "-O1", "-mf16c", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    flags += [f"-I{CSRC / 'sim' / 'ascendc'}"]
    included = [*sorted((CSRC / "sim" / "ascendc").glob("*.h")), *sorted((CSRC / "npu").glob("*/*"))]
    key = hashlib.sha256(" ".join([compiler, *flags]).encode())
    for path in [source, *included]:
        key.update(path.read_bytes())
    library = CACHE / f"{source.stem}-{key.hexdigest()[:16]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, "-o", made, source], check=True, timeout=300)
        made.rename(library)
    return ctypes.CDLL(str(library))


class _Buffer(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("writable", ctypes.c_int64))


class Work(ctypes.Structure):
    """What a launch did: `ascend_sim::ascendc::Work`."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("bytes_in", "bytes_out", "instructions", "repeats", "scalars")
    )
    bytes_in: int
    bytes_out: int
    instructions: int
    repeats: int
    scalars: int


class Kernels:
    """The kernels of csrc_ascend/npu on simulated vector cores."""

    def __init__(self) -> None:
        self._library = compile_library(pathlib.Path(__file__).with_name("kernels.cpp"))
        self._library.run_kernel.restype = ctypes.c_char_p

    def run(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        numbers: Sequence[int],
        *,
        reals: Sequence[float] = (),
        cores: int = 3,
    ) -> Work:
        """Runs a kernel in place, and counts what it did.

        Args:
            name: of a runner in kernels.cpp.
            inputs: tensors that the kernel may only read, in the launch function's order.
            outputs: tensors that it may write, likewise, behind the inputs.
            numbers: what the op's host code takes.
            reals: likewise.
            cores: vector cores of the simulated chip.

        Raises:
            ValueError: the host code or the shim objects; its text.
        """
        buffers = [
            _Buffer(
                tensor.data_ptr(), tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize, w
            )
            for tensors, w in ((inputs, 0), (outputs, 1))
            for tensor in tensors
        ]
        work = Work()
        message = self._library.run_kernel(
            name.encode(),
            (_Buffer * len(buffers))(*buffers),
            len(buffers),
            (ctypes.c_int64 * max(1, len(numbers)))(*numbers),
            (ctypes.c_double * max(1, len(reals)))(*reals),
            ctypes.c_int64(cores),
            ctypes.byref(work),
        ).decode()
        if message:
            raise ValueError(message)
        return work


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """Compiled once."""
    return Kernels()
