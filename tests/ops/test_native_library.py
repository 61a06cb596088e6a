"""Loading the compiled kernels, and running without them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from ascend_vllm.errors import ConfigError
from ascend_vllm.ops import native


def _load_again() -> bool:
    result: bool = native.load_native_library.__wrapped__()
    return result


def test_the_best_set_of_the_machine_is_chosen() -> None:
    isas = native.available_cpu_isas()
    assert isas[-1] == "scalar"
    assert native.cpu_isa() in isas


def test_an_impossible_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.cpu_isa()
    with pytest.raises(ConfigError, match=r"ASCEND_VLLM_CPU_ISA='mmx' is not possible .* it has .*scalar"):
        native.set_cpu_isa("mmx")
    monkeypatch.setenv("ASCEND_VLLM_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match="mmx"):
        _load_again()
    assert native.cpu_isa() == before


def test_a_missing_library_is_a_loud_warning(
    monkeypatch: pytest.MonkeyPatch, package_log: pytest.LogCaptureFixture, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(native, "LIBRARY_PATH", tmp_path / "_C.so")
    assert _load_again() is False
    assert "THE CPU KERNELS ARE MISSING" in package_log.text and "was not built" in package_log.text
    package_log.clear()
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert _load_again() is False
    assert "cannot be loaded" in package_log.text and "too short" in package_log.text, "the loader's reason is shown"
    assert {record.levelname for record in package_log.records} == {"WARNING"}


def test_the_environment_forces_a_set() -> None:
    """In a process of its own: importing an op is enough to load the kernels."""
    program = "from ascend_vllm.ops import elementwise, native; print(native.cpu_isa())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ASCEND_VLLM_CPU_ISA": "scalar", "OMP_NUM_THREADS": "1"},
        cwd=pathlib.Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "scalar"


def test_one_thread_pool_serves_torch_and_the_kernels() -> None:
    """A second libgomp in the process would mean twice the threads."""
    assert native.load_native_library()
    maps = pathlib.Path("/proc/self/maps").read_text()
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) == 1
