"""`ascend-vllm doctor` over machines that are made of directories and variables."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from ascend_vllm.entrypoints import cli
from ascend_vllm.platforms.facts import NpuProbe
from ascend_vllm.tools.doctor.checks import Finding, Machine, describe, examine
from tests.server import ROOT

VERSIONS = {"torch": "2.13.0+cpu", "torch_npu": "2.13.0.post1"}


# that CANN's compiler imports
PACKAGES = dict.fromkeys(("attrs", "cloudpickle", "decorator", "protobuf", "psutil", "scipy"), "1.0")


def version_of(package: str, versions: dict[str, str] = VERSIONS) -> str:
    if package not in PACKAGES | versions:
        raise importlib.metadata.PackageNotFoundError(package)
    return (PACKAGES | versions)[package]


def write(path: pathlib.Path, text: str = "") -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    """Nothing is wrong with it."""
    toolkit = tmp_path / "Ascend" / "cann"
    write(toolkit / "version.cfg", "# version\nruntime_running_version=[7.9.0.1.238:9.1.0]\n")
    write(toolkit / "set_env.sh")
    write(toolkit / "lib64" / "libascendcl.so")
    write(tmp_path / "Ascend" / "driver" / "version.info", "Version=25.5.1\nascendhal_version=7.35.23\n")
    write(tmp_path / "bin" / "npu-smi").chmod(0o755)
    for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
        write(tmp_path / "dev" / name)
    variables = {
        "ASCEND_HOME_PATH": str(toolkit),
        "LD_LIBRARY_PATH": f"/nowhere:{toolkit / 'lib64'}",
        "PATH": str(tmp_path / "bin"),
    }
    return Machine(
        variables, tmp_path / "Ascend", tmp_path / "dev", lambda: NpuProbe(count=2, soc="Ascend910B3"), version_of
    )


def changed(machine: Machine, **variables: str) -> Machine:
    return dataclasses.replace(machine, variables={**machine.variables, **variables})


def complaints(machine: Machine) -> dict[str, Finding]:
    """By name, whatever is not well; each says what to do."""
    found = {finding.name: finding for finding in examine(machine) if finding.level != "ok"}
    assert all(finding.advice for finding in found.values())
    return found


def test_a_machine_without_faults(machine: Machine) -> None:
    assert complaints(machine) == {}
    found = {finding.name: finding.found for finding in examine(machine)}
    assert found["CANN"] == "9.1.0"
    assert found["packages of CANN's compiler"] == "6 installed"
    assert found["driver"] == "25.5.1"
    assert found["NPUs"] == "2 x Ascend910B3"
    assert found["CANN runtime"].endswith("lib64/libascendcl.so")
    assert describe(examine(machine)).endswith("\n0 problems, 0 warnings")


@pytest.mark.parametrize(
    ("versions", "name", "advice"),
    [
        ({"torch": "2.13.0+cpu"}, "torch_npu", f"`{sys.executable} -m pip install torch_npu==2.13.0`"),
        (
            {"torch": "2.10.0+cpu", "torch_npu": "2.13.0"},
            "torch_npu",
            f"`{sys.executable} -m pip install torch_npu==2.10.0` or `{sys.executable} -m pip install torch==2.13.0`",
        ),
        ({"torch_npu": "2.13.0"}, "torch", f"`{sys.executable} -m pip install torch`"),
    ],
)
def test_packages_that_do_not_fit(machine: Machine, versions: dict[str, str], name: str, advice: str) -> None:
    found = complaints(dataclasses.replace(machine, version_of=lambda package: version_of(package, versions)))
    assert list(found) == [name]
    assert found[name].level == "problem" and advice in found[name].advice


def test_an_environment_that_was_not_set_up(machine: Machine) -> None:
    probe = NpuProbe(error="libascendcl.so of CANN cannot be loaded (no such file)")
    bare = dataclasses.replace(machine, variables={"PATH": "/nowhere"}, probe=lambda: probe)
    found = complaints(bare)
    script = machine.ascend / "cann" / "set_env.sh"
    assert (
        found["CANN"].advice == found["CANN runtime"].advice == f"source {script} in the shell that starts the server"
    )
    assert {name: finding.level for name, finding in found.items()} == {
        "npu-smi": "warning",
        "CANN": "problem",
        "CANN runtime": "problem",
    }


def test_nothing_is_installed(machine: Machine, tmp_path: pathlib.Path) -> None:
    probe = NpuProbe(error="libascendcl.so of CANN cannot be loaded (no such file)")
    empty = Machine({}, tmp_path / "a", tmp_path / "b", lambda: probe, version_of)
    found = complaints(empty)
    assert {name for name, finding in found.items() if finding.level == "problem"} == {
        "driver",
        "device files",
        "CANN",
        "CANN runtime",
    }
    assert f"install CANN's toolkit and kernels below {tmp_path / 'a'}" in found["CANN"].advice


def test_old_versions(machine: Machine) -> None:
    assert machine.toolkit is not None
    write(machine.toolkit / "version.cfg", "")
    write(machine.toolkit / "x86_64-linux" / "ascend_toolkit_install.info", "package_name=T\nversion=7.0.RC1\n")
    write(machine.ascend / "driver" / "version.info", "Version=24.1.rc2\n")
    found = complaints(machine)
    assert (found["CANN"].level, found["CANN"].found) == ("problem", "7.0.RC1")
    assert (found["driver"].level, found["driver"].found) == ("problem", "24.1.rc2")
    assert "install 25.5.1 or newer, which CANN 9.1.0 needs" in found["driver"].advice


@pytest.mark.parametrize(
    ("version", "level", "missing"),
    [
        ("8.3.RC1", "problem", "attention over blocks takes bfloat16 only, and rotary embedding heads of 128 only"),
        ("8.5.0", "problem", "attention over blocks has no sliding window, and blocks of 128 tokens only"),
        ("9.0.0", "warning", "weights are cast to FRACTAL_NZ by the graph engine"),
        ("9.1.RC1", None, ""),
        ("10.0.0", None, ""),
    ],
)
def test_what_versions_of_cann_lack(machine: Machine, version: str, level: str | None, missing: str) -> None:
    assert machine.toolkit is not None
    write(machine.toolkit / "version.cfg", f"runtime_running_version=[7.7.0.1.238:{version}]\n")
    found = complaints(machine)
    assert [(finding.name, finding.level) for finding in found.values()] == ([("CANN", level)] if level else [])
    assert all(missing in finding.advice for finding in found.values())
    # what the runtime says counts where no file does
    write(machine.toolkit / "version.cfg", "")
    probe = NpuProbe(count=2, soc="Ascend910B3", cann=version)
    assert complaints(dataclasses.replace(machine, probe=lambda: probe)) == found


def test_packages_of_the_compiler(machine: Machine) -> None:
    packages = {
        name: version for name, version in (PACKAGES | VERSIONS).items() if name not in ("scipy", "decorator")
    }

    def found_version(package: str) -> str:
        return packages[package] if package in packages else version_of("", {})

    found = complaints(dataclasses.replace(machine, version_of=found_version))["packages of CANN's compiler"]
    assert (found.level, found.found) == ("warning", "decorator, scipy missing")
    assert "pip install decorator scipy`" in found.advice


def test_devices_that_are_missing_or_closed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.devices / "hisi_hdc").unlink()
    # root may open everything, whatever the permissions are
    monkeypatch.setattr("os.access", lambda path, _mode: pathlib.Path(path).name != "davinci1")
    missing, closed = (finding for finding in examine(machine) if finding.name == "device files")
    assert missing.level == closed.level == "problem"
    assert missing.found == f"{machine.devices}/hisi_hdc missing"
    assert closed.found == f"no permission for {machine.devices}/davinci1" and "HwHiAiUser" in closed.advice


@pytest.mark.parametrize(
    ("probe", "found"),
    [
        (NpuProbe(count=0, soc="Ascend910B3"), "the runtime sees none"),
        (NpuProbe(count=1, soc="Ascend310B1"), "1 x Ascend310B1"),
        (NpuProbe(count=2, soc="Ascend310P3"), "2 x Ascend310P3"),
    ],
)
def test_npus_that_cannot_be_used(machine: Machine, probe: NpuProbe, found: str) -> None:
    complaint = complaints(dataclasses.replace(machine, probe=lambda: probe))["NPUs"]
    assert (complaint.level, complaint.found) == ("problem", found)
    assert "310" not in complaint.advice


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("ASCEND_RT_VISIBLE_DEVICES", "1,0", None),
        ("ASCEND_RT_VISIBLE_DEVICES", "4,5", "problem"),
        ("ASCEND_RT_VISIBLE_DEVICES", "0,0", "problem"),
        ("ASCEND_RT_VISIBLE_DEVICES", "all", "problem"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "1", "warning"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:256", None),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False", "warning"),
        ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments=True", "problem"),
        ("HCCL_OP_EXPANSION_MODE", "AIV", None),
        ("HCCL_OP_EXPANSION_MODE", "aiv", "problem"),
        ("HCCL_CONNECT_TIMEOUT", "120s", "problem"),
        ("HCCL_CONNECT_TIMEOUT", "7200", None),
    ],
)
def test_variables(machine: Machine, name: str, value: str, level: str | None) -> None:
    found = complaints(changed(machine, **{name: value}))
    assert {key: finding.level for key, finding in found.items()} == ({name: level} if level else {})
    assert all(finding.found == value for finding in found.values())


def test_the_command_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Which has no NPU and no torch_npu."""
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem  torch_npu" in text and f"-> `{sys.executable} -m pip install torch_npu==" in text
    assert cli.main(["doctor", "--json"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["torch"]["level"] == findings["Python"]["level"] == "ok"
    assert findings["CANN runtime"]["level"] == "problem"


@pytest.mark.parametrize("is_checkout", [True, False])
def test_the_commands_that_it_names_exist(is_checkout: bool, tmp_path: pathlib.Path) -> None:
    """In a checkout and where only the package is; in a shell that knows of no environment."""
    directory = ROOT if is_checkout else tmp_path
    if not is_checkout:
        (tmp_path / "ascend_vllm").symlink_to(ROOT / "ascend_vllm")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(directory)}
    command = [sys.executable, "-m", "ascend_vllm.entrypoints.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    advice = " ".join(finding["advice"] for finding in json.loads(done.stdout))
    commands = [shlex.split(found) for found in re.findall("`(.+?)`", advice)]
    assert [words[-1].partition("==")[0] for words in commands] == ["torch_npu"]
    assert "pip install" not in re.sub("`.+?`", "", advice)
    for words in commands:
        known = [*words[: words.index("install") + 1], "--help"]
        assert subprocess.run(known, cwd=tmp_path, env=environment, capture_output=True, timeout=60).returncode == 0
