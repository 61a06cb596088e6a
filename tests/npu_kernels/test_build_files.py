"""What CANN's toolchain is given: every kernel, nothing that device code may not have, and clear refusals."""

from __future__ import annotations

import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

import pytest

from tests.npu_kernels.conftest import CSRC

NPU = CSRC / "npu"
OPS = sorted(path.parent.name for path in NPU.glob("*/op_kernel.cpp"))
# what runs on the chip; launch.h is where the launch syntax is
DEVICE_FILES = [
    *sorted(NPU.glob("*/op_kernel.*")),
    *sorted(NPU.glob("*/params.h")),
    *(NPU / "edit_and_sample" / f"{name}.h" for name in ("logits", "numbers")),
    *(
        NPU / "common" / f"{name}.h"
        for name in (
            "adapter_runs",
            "device",
            "kv_strides",
            "run_tokens",
            "types",
        )
    ),
]
HOST_ONLY = ("op_host.h", "common/host.h", "common/kv_layout.h")


def code_of(path: pathlib.Path) -> str:
    """Without comments."""
    return re.sub(r"//[^\n]*", "", path.read_text())


def test_cmake_builds_every_operator() -> None:
    listed = re.search(r"set\(ASCEND_VLLM_NPU_OPS([^)]*)\)", (NPU / "ops.cmake").read_text())
    assert listed is not None
    assert listed.group(1).split() == OPS
    assert all((NPU / op / "op_host.cpp").exists() for op in OPS)


@pytest.mark.parametrize(
    "path",
    [pathlib.Path(__file__).with_name("kernels.cpp"), CSRC / "sim" / "custom" / "kernels.cpp"],
    ids=["shim", "simulated runtime"],
)
def test_every_operator_is_compiled(path: pathlib.Path) -> None:
    assert re.findall(r'#include "npu/(\w+)/op_kernel.cpp"', path.read_text()) == OPS


def test_every_binding_is_compiled_for_the_simulated_runtime() -> None:
    compiled = (CSRC / "sim" / "custom" / "bindings.cpp").read_text()
    sources = [*NPU.glob("bind/*.cpp"), *NPU.glob("*/op_host.cpp")]
    assert re.findall(r'#include "(.*)"', compiled) == sorted(str(path.relative_to(CSRC)) for path in sources)


@pytest.mark.parametrize("path", DEVICE_FILES, ids=lambda path: str(path.relative_to(NPU)))
def test_device_code_keeps_to_what_the_chip_knows(path: pathlib.Path) -> None:
    code = code_of(path)
    assert re.findall(r"\b(?:virtual|std::|throw|try|catch|double|new|delete|dynamic_cast|typeid)\b", code) == []
    assert "<<<" not in code
    included = re.findall(r'#include ["<]([^">]*)[">]', code)
    assert not [name for name in included if name.endswith(HOST_ONLY)]
    assert {name for name in included if not name.startswith("npu/")} <= {"kernel_operator.h", "cstdint"}


@pytest.mark.parametrize("op", OPS)
def test_kernels_declare_that_they_run_on_vector_cores_alone(op: str) -> None:
    """Otherwise CANN's compiler infers it from the code, and may make the kernel wait for matrix cores as well."""
    code = code_of(NPU / op / "op_kernel.cpp")
    declared = re.findall(r"__global__[^{]*\{\s*KERNEL_TASK_TYPE_DEFAULT\(KERNEL_TYPE_AIV_ONLY\);", code)
    assert len(declared) == code.count("__global__") > 0


def test_bindings_implement_what_they_declare() -> None:
    declared = re.findall(r'm\.def\(\s*"(\w+)\(', (NPU / "bind" / "schemas.cpp").read_text())
    implemented = [
        name for path in NPU.glob("bind/*.cpp") for name in re.findall(r'm\.impl\(\s*"(\w+)"', path.read_text())
    ]
    assert sorted(declared) == sorted(implemented)
    assert len(declared) == len(OPS)


@pytest.mark.parametrize(
    ("cann", "soc", "message"),
    [
        (None, "", "CANN was not found: ASCEND_HOME_PATH is not set. Source CANN's set_env.sh first."),
        ("empty", "", "where there is no ascendc_kernel_cmake/ascendc.cmake: install CANN's toolkit"),
        ("found", "Ascend310P3", "SOC_VERSION is Ascend310P3: these operators are written for the vector cores of"),
    ],
)
def test_cmake_says_what_is_missing(tmp_path: pathlib.Path, cann: str | None, soc: str, message: str) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    environment = {name: value for name, value in os.environ.items() if name != "ASCEND_HOME_PATH"}
    if cann is not None:
        environment["ASCEND_HOME_PATH"] = str(tmp_path / cann)
    (tmp_path / "found" / "compiler" / "tikcpp" / "ascendc_kernel_cmake").mkdir(parents=True)
    (tmp_path / "found" / "compiler" / "tikcpp" / "ascendc_kernel_cmake" / "ascendc.cmake").touch()
    command = [cmake, "-S", str(CSRC), "-B", str(tmp_path / "build"), *([f"-DSOC_VERSION={soc}"] if soc else [])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


def test_cmake_finds_all_that_it_compiles_and_says_where_it_goes(tmp_path: pathlib.Path) -> None:
    """With a file in the place of CANN's that takes kernels for ordinary sources; nothing is compiled.

    It lies where only the host's processor leads to it.
    """
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    machine = f"{platform.machine()}-linux"
    framework = tmp_path / "cann" / machine / "tikcpp" / "ascendc_kernel_cmake" / "ascendc.cmake"
    framework.parent.mkdir(parents=True)
    framework.write_text(
        "function(ascendc_library name type)\n  add_library(${name} ${type} ${ARGN})\nendfunction()\n"
        "function(ascendc_include_directories)\n  target_include_directories(${ARGN})\nendfunction()\n"
    )
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").touch()
    variables = {"ASCEND_HOME_PATH": str(tmp_path / "cann"), "PYTHONPATH": str(tmp_path)}
    options = {"Python3_EXECUTABLE": sys.executable, "CMAKE_EXPORT_COMPILE_COMMANDS": "ON"}
    build = tmp_path / "build"
    command = [cmake, "-S", str(CSRC), "-B", str(build), *(f"-D{key}={value}" for key, value in options.items())]
    result = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    compiled = {
        entry["file"]: entry["command"] for entry in json.loads((build / "compile_commands.json").read_text())
    }
    assert set(compiled) == {str(path) for path in (*NPU.glob("*/op_*.cpp"), *NPU.glob("bind/*.cpp"))}
    assert f"-isystem {tmp_path / 'torch_npu' / 'include'}" in compiled[str(NPU / "bind" / "device.cpp")]
    installed = (build / "cmake_install.cmake").read_text()
    for name in ("libascend_vllm_npu.so", "libascend_vllm_npu_kernels.so"):
        assert re.search(rf"ascend_vllm/_npu.*{re.escape(name)}", installed), name
