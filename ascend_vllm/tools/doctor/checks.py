"""Checks whether this machine has what models on NPUs need, and advises what to do.

It reads versions, files and variables; only the devices' number and kind are asked of the runtime, in a
separate process. Formats: version.cfg and ascend_toolkit_install.info of a CANN installation, version.info of a
driver; the rules of the variables are those of CANN's and torch_npu's documentation.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from ascend_vllm.platforms.facts import (
    CANN_WANTED,
    DRIVER_WANTED,
    CannFacts,
    NpuProbe,
    npu_facts,
    probe_npus,
    version_numbers,
)

Level = Literal["ok", "warning", "problem"]

_OLDEST_PYTHON = (3, 11)
# what the operator compiler of CANN's graph engine imports in the server's process, and npugraph_ex beside it
_COMPILER_PACKAGES = ("attrs", "cloudpickle", "decorator", "protobuf", "psutil", "scipy")
_HCCL_EXPANSION_MODES = ("AIV", "AI_CPU", "HOST", "HOST_TS")
_HCCL_SECONDS = ("HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT")
# where CANN is installed; since 8.5 in "cann"
_TOOLKITS = ("cann", "ascend-toolkit", "ascend-toolkit/latest", "latest")
_DEVICE_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        level: whether models run with it: yes; perhaps or slowly; no.
        found: what the machine has.
        advice: what to do; empty if nothing.
    """

    name: str
    level: Level
    found: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The sources of the checks, replaceable in tests.

    Attributes:
        variables: the environment.
        ascend: the default installation directory of CANN and the driver.
        devices: the directory of device files.
        probe: queries the runtime for devices.
        version_of: a Python package's version; PackageNotFoundError if it is not installed.
    """

    variables: Mapping[str, str]
    ascend: pathlib.Path = pathlib.Path("/usr/local/Ascend")
    devices: pathlib.Path = pathlib.Path("/dev")
    probe: Callable[[], NpuProbe] = probe_npus
    version_of: Callable[[str], str] = importlib.metadata.version

    @property
    def toolkit(self) -> pathlib.Path | None:
        """CANN's directory according to the environment."""
        value = self.variables.get("ASCEND_HOME_PATH") or self.variables.get("ASCEND_TOOLKIT_HOME")
        return pathlib.Path(value) if value else None

    def library(self, name: str) -> pathlib.Path | None:
        """A shared library in LD_LIBRARY_PATH."""
        directories = self.variables.get("LD_LIBRARY_PATH", "").split(os.pathsep)
        files = (pathlib.Path(directory) / name for directory in directories if directory)
        return next((file for file in files if file.exists()), None)


def examine(machine: Machine) -> list[Finding]:
    """All findings, in the order in which problems should be fixed."""
    checks = (
        _python,
        _torch,
        _torch_npu,
        _compiler_packages,
        _driver,
        _device_files,
        _cann,
        _devices,
        _visible_devices,
        _autoload,
        _allocator,
        _hccl,
    )
    return [finding for check in checks for finding in check(machine)]


def _python(_machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _OLDEST_PYTHON:
        yield Finding("Python", "problem", version, f"use Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer")
    else:
        yield Finding("Python", "ok", version)


def _version(machine: Machine, package: str) -> str | None:
    try:
        return machine.version_of(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(torch: str) -> str:
    """ "2.13.0+cpu" → "2.13.0"."""
    return torch.partition("+")[0]


def _install(requirement: str) -> str:
    """The command that installs a package into this Python, in backticks; works in any shell and directory."""
    python = shlex.quote(sys.executable)
    # environments that uv made have no pip of their own
    installer = f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"
    return f"`{installer} {requirement}`"


def _torch(machine: Machine) -> Iterator[Finding]:
    version = _version(machine, "torch")
    if version is None:
        yield Finding("torch", "problem", "not installed", f"{_install('torch')}: every model needs it")
    else:
        yield Finding("torch", "ok", version)


def _torch_npu(machine: Machine) -> Iterator[Finding]:
    version, torch = _version(machine, "torch_npu"), _version(machine, "torch")
    if version is None:
        package = "torch_npu" if torch is None else f"torch_npu=={_release(torch)}"
        yield Finding("torch_npu", "problem", "not installed", _install(package))
        return
    # a build requires the release of torch that it was compiled with; .postN are its own patches
    release = ".".join(version.split(".")[:3])
    if torch is not None and _release(torch) != release:
        packages = f"torch_npu=={_release(torch)}", f"torch=={release}"
        advice = f"install a pair of one release: {' or '.join(map(_install, packages))}"
        yield Finding("torch_npu", "problem", f"{version}, made for torch {release} and not {torch}", advice)
    else:
        yield Finding("torch_npu", "ok", version)


def _compiler_packages(machine: Machine) -> Iterator[Finding]:
    if _version(machine, "torch_npu") is None:
        # one command at a time
        return
    missing = [name for name in _COMPILER_PACKAGES if _version(machine, name) is None]
    if missing:
        advice = f"{_install(' '.join(missing))}: operators that CANN compiles when they are first called import them"
        yield Finding("packages of CANN's compiler", "warning", f"{', '.join(missing)} missing", advice)
    else:
        yield Finding("packages of CANN's compiler", "ok", f"{len(_COMPILER_PACKAGES)} installed")


def _driver(machine: Machine) -> Iterator[Finding]:
    path = machine.ascend / "driver" / "version.info"
    tool = shutil.which("npu-smi", path=machine.variables.get("PATH", ""))
    version = _value_of(path, "Version")
    mount = f"install the driver on the host, and mount {machine.ascend / 'driver'} into the container"
    if version is None:
        known = "npu-smi is there, but its version is not" if tool else "not found"
        yield Finding("driver", "warning" if tool else "problem", f"{known} ({path})", mount)
    elif version_numbers(version) < version_numbers(DRIVER_WANTED):
        advice = (
            f"install {DRIVER_WANTED} or newer, which CANN {CANN_WANTED} needs: graphs run out of streams with this"
        )
        yield Finding("driver", "problem", version, advice)
    else:
        yield Finding("driver", "ok", version)
    if tool is None:
        yield Finding("npu-smi", "warning", "not in PATH", "mount it from the host; it shows what the NPUs are doing")
    else:
        yield Finding("npu-smi", "ok", tool)


def _device_files(machine: Machine) -> Iterator[Finding]:
    cards = _cards(machine)
    if not cards:
        level: Level = "warning" if machine.probe().count else "problem"
        advice = f"give the container its cards: --device {machine.devices}/davinci0, or the device plug-in"
        yield Finding("device files", level, f"no {machine.devices}/davinci*", advice)
        return
    missing = [name for name in _DEVICE_FILES if not (machine.devices / name).exists()]
    if missing:
        names = ", ".join(str(machine.devices / name) for name in missing)
        yield Finding("device files", "problem", f"{names} missing", f"give the container {names} beside the cards")
    files = [*cards, *(machine.devices / name for name in _DEVICE_FILES if name not in missing)]
    closed = [str(file) for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if closed:
        advice = "run as a member of the group that owns them (HwHiAiUser), or as root"
        yield Finding("device files", "problem", f"no permission for {', '.join(closed)}", advice)
    elif not missing:
        yield Finding("device files", "ok", f"{len(cards)} cards")


def _cards(machine: Machine) -> list[pathlib.Path]:
    return sorted(path for path in machine.devices.glob("davinci*") if path.name.removeprefix("davinci").isdecimal())


def _cann(machine: Machine) -> Iterator[Finding]:
    toolkit = machine.toolkit
    paths = [machine.ascend / name / "set_env.sh" for name in _TOOLKITS]
    script = next((path for path in paths if path.exists()), None)
    source = f"source {script or 'set_env.sh of CANN'} in the shell that starts the server"
    if toolkit is None:
        advice = source if script else f"install CANN's toolkit and kernels below {machine.ascend}, then {source}"
        yield Finding("CANN", "problem", "ASCEND_HOME_PATH is not set", advice)
    elif not toolkit.is_dir():
        yield Finding("CANN", "problem", f"ASCEND_HOME_PATH={toolkit} is not there", source)
    else:
        version = _cann_version(toolkit) or machine.probe().cann
        facts = CannFacts.of(version)
        if not version:
            yield Finding("CANN", "warning", f"no version in {toolkit}", "check that the installation is complete")
        elif sentence := facts.refusal or facts.warning:
            yield Finding("CANN", "problem" if facts.refusal else "warning", version, sentence)
        else:
            yield Finding("CANN", "ok", version)
    error = machine.probe().error
    if error:
        advice = source if "cannot be loaded" in error else "see the log of CANN in ~/ascend/log, and dmesg"
        yield Finding("CANN runtime", "problem", error, advice)
    else:
        yield Finding("CANN runtime", "ok", str(machine.library("libascendcl.so") or "loaded"))


def _cann_version(toolkit: pathlib.Path) -> str | None:
    # runtime_running_version=[7.5.0.1.129:8.1.RC1]
    found = re.search(r"running_version=\[[^\]:]*:([^\]]+)\]", _text(toolkit / "version.cfg"))
    if found:
        return found[1]
    files = (toolkit / "ascend_toolkit_install.info", *sorted(toolkit.glob("*-linux/ascend_toolkit_install.info")))
    return next((version for file in files if (version := _value_of(file, "version"))), None)


def _devices(machine: Machine) -> Iterator[Finding]:
    found = machine.probe()
    if found.error:
        return
    if found.count == 0:
        advice = "unset ASCEND_RT_VISIBLE_DEVICES, or give the container cards that nobody else has"
        yield Finding("NPUs", "problem", "the runtime sees none", advice)
    elif (facts := npu_facts(found.soc)) is None or facts.refusal:
        advice = "models run on Ascend910B1 to B4 and Ascend910_93; use --device cpu here"
        yield Finding("NPUs", "problem", f"{found.count} x {found.soc}", advice)
    else:
        yield Finding("NPUs", "ok", f"{found.count} x {found.soc}")


def _visible_devices(machine: Machine) -> Iterator[Finding]:
    name = "ASCEND_RT_VISIBLE_DEVICES"
    value, num_cards = machine.variables.get(name), len(_cards(machine))
    if not value:
        yield Finding(name, "ok", "not set: all NPUs of the container are used")
        return
    numbers = value.split(",")
    if not all(number.strip().isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        yield Finding(name, "problem", value, "list each NPU once, by number, separated by commas: 0,1")
    elif num_cards and max(map(int, numbers)) >= num_cards:
        advice = f"the container has {num_cards}; count from 0 within it, whatever the host's numbers are"
        yield Finding(name, "problem", value, advice)
    else:
        yield Finding(name, "ok", value)


def _autoload(machine: Machine) -> Iterator[Finding]:
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    value = machine.variables.get(name, "0")
    if value == "0":
        yield Finding(name, "ok", "0: torch_npu is loaded by workers on NPUs alone")
    else:
        advice = "unset it: every program that imports torch loads torch_npu, and fails where CANN is not set up"
        yield Finding(name, "warning", value, advice)


def _allocator(machine: Machine) -> Iterator[Finding]:
    name = "PYTORCH_NPU_ALLOC_CONF"
    value = machine.variables.get(name)
    if not value:
        yield Finding(name, "ok", "not set: expandable_segments:True")
        return
    settings = dict(part.partition(":")[::2] for part in value.split(","))
    if not all(re.fullmatch(r"\w+", key.strip()) and setting for key, setting in settings.items()):
        yield Finding(
            name, "problem", value, "write NAME:VALUE, separated by commas, such as expandable_segments:True"
        )
    elif settings.get("expandable_segments", "False") != "True":
        advice = "expandable_segments:True wastes less memory; leave it off only if the allocator errs with it"
        yield Finding(name, "warning", value, advice)
    else:
        yield Finding(name, "ok", value)


def _hccl(machine: Machine) -> Iterator[Finding]:
    values = {name: value for name, value in sorted(machine.variables.items()) if name.startswith("HCCL_")}
    if not values:
        yield Finding("HCCL", "ok", "no variable is set")
    for name, value in values.items():
        if name == "HCCL_OP_EXPANSION_MODE" and value not in _HCCL_EXPANSION_MODES:
            yield Finding(name, "problem", value, f"one of {', '.join(_HCCL_EXPANSION_MODES)}")
        elif name in _HCCL_SECONDS and not value.isdecimal():
            yield Finding(name, "problem", value, "a whole number of seconds")
        else:
            yield Finding(name, "ok", value)


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _value_of(path: pathlib.Path, key: str) -> str | None:
    """The text behind "key=" in a file."""
    found = re.search(rf"^{key}\s*=\s*(\S+)", _text(path), re.MULTILINE)
    return found[1] if found else None


def describe(findings: list[Finding]) -> str:
    """The findings as text, one per line, each followed by its advice."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.name:<{width}}  {finding.found}")
        if finding.advice:
            lines.append(f"{'':<8} {'':<{width}}  -> {finding.advice}")
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    lines.append(f"{counts['problem']} problems, {counts['warning']} warnings")
    return "\n".join(lines)
