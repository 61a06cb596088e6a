"""The kernels on Arm processors: cross-compiled, and run by qemu-user where this machine is none.

What is compared with what is in csrc_ascend/cpu/check. Needs Debian's g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# qemu's processors, and the sets that they have: a Cortex-A72, one with what a Kunpeng 920 has, and all there is
PROCESSORS = {
    "cortex-a72": ["neon", "scalar"],
    "neoverse-n1": ["neon_dotprod", "neon", "scalar"],
    "max": ["neon_bf16", "neon_dotprod", "neon", "scalar"],
}


def _native_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ascend_vllm_arm_build", ROOT / "csrc_ascend" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The program of cpu/check for aarch64, with the emulator that runs it if it cannot run here."""
    build = _native_build()
    compiler = build.find_compiler("aarch64")
    emulator = [] if build.MACHINE == "aarch64" else [shutil.which("qemu-aarch64")]
    if compiler is None or None in emulator:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user of Debian")
    path = tmp_path_factory.mktemp("arm") / "check"
    build.build_check(path, "aarch64", compiler)
    return [*emulator, str(path)]


def _run(program: list[str], processor: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    is_emulated = len(program) > 1
    command = [program[0], "-cpu", processor, *program[1:]] if is_emulated else program
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa",
    [
        "neon_dotprod",
        "neon_bf16",
        pytest.param("neon", marks=pytest.mark.exhaustive),
        pytest.param("scalar", marks=pytest.mark.exhaustive),
    ],
)
def test_kernels_equal_plain_loops(program: list[str], isa: str) -> None:
    done = _run(program, "max", isa)
    if len(program) == 1 and "not possible" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout
    checked = {line.split()[1] for line in done.stdout.splitlines()}
    kernels = set()
    for header in (ROOT / "csrc_ascend/cpu/kernels").glob("*.h"):
        kernels.update(re.findall(r"^ASCEND_VLLM_DEFINE_KERNEL\((\w+),", header.read_text(), re.MULTILINE))
    assert len(kernels) > 20 and kernels <= checked, f"without a check: {kernels - checked}"


@pytest.mark.parametrize("processor", PROCESSORS)
def test_sets_are_those_of_the_processor(program: list[str], processor: str) -> None:
    if len(program) == 1:
        pytest.skip("runs on this machine's own processor")
    done = _run(program, processor, "nothing")
    assert done.returncode == 1
    assert done.stdout == f"nothing: not possible, the machine has {','.join(PROCESSORS[processor])}\n"
