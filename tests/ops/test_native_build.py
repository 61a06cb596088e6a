"""The build of the CPU kernels, on a source tree of one tiny kernel."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

SOURCES = pathlib.Path(__file__).resolve().parents[2] / "csrc_ascend"
KERNEL = """
#pragma once
#include "cpu/dispatch.h"
namespace ascend_vllm {
struct NothingArgs { int x; };
ASCEND_VLLM_KERNEL(nothing, NothingArgs)
}
#ifdef ASCEND_VLLM_ISA
namespace ascend_vllm {
%s
ASCEND_VLLM_DEFINE_KERNEL(nothing, NothingArgs) { (void)args; %s }
}
#endif
"""


@pytest.fixture
def build(tmp_path: pathlib.Path) -> Iterator[ModuleType]:
    tree = tmp_path / "csrc_ascend"
    for folder in ("common", "cpu/isa", "cpu/variants"):
        shutil.copytree(SOURCES / folder, tree / folder)
    for name in ("build.py", "cpu/dispatch.h", "cpu/dispatch.cpp", "cpu/team.h", "cpu/team.cpp"):
        shutil.copy(SOURCES / name, tree / name)
    (tree / "cpu/kernels").mkdir()
    (tree / "cpu/kernels/nothing.h").write_text(KERNEL % ("", ""))
    spec = importlib.util.spec_from_file_location("native_build_under_test", tree / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_only_what_changed_is_compiled(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_unit = build.compile_unit

    def recording(compiler: str, unit: object, target: pathlib.Path) -> str:
        compiled.append(unit.name)  # type: ignore[attr-defined]
        output: str = compile_unit(compiler, unit, target)
        return output

    monkeypatch.setattr(build, "compile_unit", recording)
    assert build.build_library() is True
    kernels = {f"nothing-{isa}" for isa in build.VARIANTS if isa not in build.ASKED_FOR}
    assert set(compiled) == {"dispatch", "team", *kernels}
    assert build.DEFAULT_OUTPUT.stat().st_size > 0

    compiled.clear()
    linked = build.DEFAULT_OUTPUT.stat().st_mtime_ns
    assert build.build_library() is True
    assert compiled == []
    assert build.DEFAULT_OUTPUT.stat().st_mtime_ns == linked

    header = build.SOURCE_ROOT / "cpu/isa/scalar.h"
    header.write_text(header.read_text() + "\n// a change\n")
    assert build.build_library() is True
    assert compiled == ["nothing-scalar"]


def test_a_set_that_has_to_be_asked_for_is(build: ModuleType) -> None:
    kernel = build.SOURCE_ROOT / "cpu/kernels/nothing.h"

    def variants() -> set[str]:
        return {unit.source.stem for unit in build.units() if unit.kernel == kernel}

    assert variants() == build.VARIANTS.keys() - build.ASKED_FOR.keys()
    for isa in build.ASKED_FOR.keys() & build.VARIANTS.keys():  # none on other processors than x86
        kernel.write_text(KERNEL % ("", "") + f"// {build.ASKED_FOR[isa]}\n")
        assert isa in variants()


def test_code_that_variants_could_share_is_refused(build: ModuleType) -> None:
    kernel = build.SOURCE_ROOT / "cpu/kernels/nothing.h"
    kernel.write_text(KERNEL % ('__attribute__((noinline)) inline void shared() { asm volatile(""); }', "shared();"))
    with pytest.raises(build.BuildError, match=r"mergeable symbol .*shared.*anonymous namespaces"):
        build.build_library()
    assert not build.DEFAULT_OUTPUT.exists()


def test_a_compile_error_shows_the_compilers_words(build: ModuleType) -> None:
    (build.SOURCE_ROOT / "cpu/kernels/nothing.h").write_text(KERNEL % ("", "this is no C++;"))
    with pytest.raises(build.BuildError, match=r"nothing\.h:\d+:\d+: error"):
        build.build_library()


def test_without_a_compiler_the_build_warns_and_succeeds(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "argv", ["build.py"])
    assert build.main() == 0
    assert "no C++ compiler found" in capsys.readouterr().err
    assert not build.DEFAULT_OUTPUT.exists()


@pytest.mark.exhaustive
def test_a_library_that_checks_itself_lies_elsewhere(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    output = tmp_path / "checked" / "_C.so"
    assert build.build_library(output, sanitizers="undefined") is True
    assert b"__ubsan_handle" in output.read_bytes()
    monkeypatch.setattr(sys, "argv", ["build.py", "--sanitize", "undefined"])
    with pytest.raises(SystemExit):
        build.main()
    assert "--sanitize needs another --output" in capsys.readouterr().err
    assert not build.DEFAULT_OUTPUT.exists()
