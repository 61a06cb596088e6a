"""Measures the machine's limits: memory bandwidth and multiply-adds per second.

`peaks.cpp` is compiled when needed, for this machine's instruction set.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Sequence

_SOURCE = pathlib.Path(__file__).with_name("peaks.cpp")
_OPTIONS = ("-O2", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-pthread", "-Wno-psabi")
_COMPILERS = ("g++", "c++", "clang++")


@dataclasses.dataclass(frozen=True)
class Reading:
    """The limits at one moment.

    Attributes:
        bandwidth_gb_s: streaming read, 10^9 bytes per second.
        fp32_gflop_s: float32 multiply-adds, 10^9 operations per second, two for each.
        bf16_gflop_s: dot products of bfloat16 pairs; 0 where the processor has none.
    """

    bandwidth_gb_s: float
    fp32_gflop_s: float
    bf16_gflop_s: float

    @property
    def peak_gflop_s(self) -> float:
        """Peak for bfloat16 matrix products, which use float32 on processors without bfloat16 instructions."""
        return self.bf16_gflop_s or self.fp32_gflop_s

    @property
    def peak_name(self) -> str:
        """The name of the dtype of `peak_gflop_s`."""
        return "bf16 dot products" if self.bf16_gflop_s else "fp32 FMA (the processor has no bf16 dot product)"

    def as_dict(self) -> dict[str, float]:
        """The reading for JSON."""
        return dataclasses.asdict(self)


def median_reading(readings: Sequence[Reading]) -> Reading:
    """The median of each limit."""
    names = [field.name for field in dataclasses.fields(Reading)]
    return Reading(**{name: statistics.median(getattr(reading, name) for reading in readings) for name in names})


def best_reading(readings: Sequence[Reading]) -> Reading:
    """The highest of each limit."""
    names = [field.name for field in dataclasses.fields(Reading)]
    return Reading(**{name: max(getattr(reading, name) for reading in readings) for name in names})


class Peaks:
    """Measures the limits. Close it when they are known: it holds a large buffer.

    Args:
        gib: size of the buffer to read, in GiB; far larger than the caches.
        seconds: duration of one measurement of arithmetic.
        passes: measurements of each limit per reading, of which the best counts, as others are slowed down
            by other load.
        threads: None: one for each core that this process may use.

    Attributes:
        threads: that number.

    Raises:
        SystemExit: there is no C++ compiler, or it cannot compile the source, or memory is short.
    """

    def __init__(self, gib: float = 1.0, seconds: float = 0.02, passes: int = 3, threads: int | None = None) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        self._seconds = seconds
        self._passes = passes
        self._library = _compile(_compiler())
        self._bytes = max(int(gib * 2**30) // 2**21, 1) * 2**21
        self._buffer: int | None = self._library.peaks_buffer(self._bytes, self.threads)
        if not self._buffer:
            raise SystemExit(f"No memory for a buffer of {gib} GiB; ask for a smaller one with --gib.")

    def read(self, threads: int | None = None) -> Reading:
        """All limits, with `threads` threads or with all."""
        count = threads or self.threads
        return best_reading([self._read_once(count) for _ in range(self._passes)])

    def _read_once(self, threads: int) -> Reading:
        seconds: float = self._library.peaks_read(self._buffer, self._bytes, threads)
        return Reading(
            self._bytes / seconds / 1e9,
            self._library.peaks_fp32(threads, self._seconds) / 1e9,
            self._library.peaks_bf16(threads, self._seconds) / 1e9,
        )

    def close(self) -> None:
        """Frees the buffer."""
        if self._buffer:
            self._library.peaks_free(self._buffer, self._bytes)
            self._buffer = None

    def __enter__(self) -> Peaks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _compiler() -> str:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise SystemExit("The machine's limits are measured by compiled code: install a C++ compiler, such as g++.")
    return compiler


@functools.cache
def _compile(compiler: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        target = pathlib.Path(directory) / "peaks.so"
        command = [compiler, *_OPTIONS, "-o", str(target), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{compiler} cannot compile {_SOURCE.name}:\n{done.stderr}")
        library = ctypes.CDLL(str(target))
    library.peaks_buffer.restype = ctypes.c_void_p
    library.peaks_buffer.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.peaks_free.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.peaks_free.restype = None
    library.peaks_read.restype = ctypes.c_double
    library.peaks_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for name in ("peaks_fp32", "peaks_bf16"):
        function = getattr(library, name)
        function.restype = ctypes.c_double
        function.argtypes = [ctypes.c_int, ctypes.c_double]
    return library
