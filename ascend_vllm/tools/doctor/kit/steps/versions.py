"""What is installed: what the doctor checks, packages, devices, variables, custom operators."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Callable

import ascend_vllm
from ascend_vllm import envs
from ascend_vllm.platforms.facts import probe_npus
from ascend_vllm.tools.doctor.checks import Machine, examine
from ascend_vllm.tools.doctor.kit.private import Redactor
from ascend_vllm.tools.doctor.kit.rows import Status
from ascend_vllm.tools.doctor.kit.session import Case, Result, Session

_PACKAGES = (
    "torch",
    "torch_npu",
    "numpy",
    "transformers",
    "safetensors",
    "attrs",
    "cloudpickle",
    "decorator",
    "protobuf",
    "psutil",
    "scipy",
)
_NPU_SMI_SECONDS = 20.0
# what `npu-smi info` tells of processes begins here, which may be those of others
_PROCESSES = "Process id"
_LAST_CHARACTERS = 4000


def cases(session: Session) -> list[Case]:
    """See `steps`."""
    found: dict[str, Callable[[], Result]] = {
        "runtime": lambda: _runtime(session),
        "system": _system,
        "packages": _packages,
        "checks": _checks,
        "npu-smi": _npu_smi,
        "environment": _environment,
        "custom operators": _custom_operators,
    }
    return [Case(name, run) for name, run in found.items()]


def _facts(**facts: str) -> Result:
    return Result(facts=facts)


def _runtime(session: Session) -> Result:
    probe = probe_npus()
    if probe.error:
        return Result(Status.FAILED, message=probe.error)
    kind = "simulated" if session.is_simulated else "CANN"
    return _facts(runtime=kind, cann=probe.cann, soc=probe.soc, devices=str(probe.count))


def _system() -> Result:
    kernel = ".".join(platform.release().split(".")[:2])
    return _facts(kernel=kernel, processor=platform.machine(), python=platform.python_version())


def _packages() -> Result:
    versions = {"ascend_vllm": ascend_vllm.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return Result(facts=versions)


def _checks() -> Result:
    """What `ascend-vllm doctor` says, without what only repeats variables."""
    variables = envs.everything()
    findings = [finding for finding in examine(Machine(variables)) if finding.name not in variables]
    return Result(facts={finding.name: f"{finding.level}: {finding.found}" for finding in findings})


def _npu_smi() -> Result:
    tool = shutil.which("npu-smi")
    if tool is None:
        return Result(Status.SKIPPED, message="npu-smi is not in PATH")
    done = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=_NPU_SMI_SECONDS, check=False)
    return _facts(info=done.stdout.partition(_PROCESSES)[0])


@functools.cache
def _known_variables() -> dict[str, str]:
    variables = envs.everything()
    return Redactor.of_this_machine(variables).variables(variables)


def _environment() -> Result:
    return Result(facts=_known_variables())


def _custom_operators() -> Result:
    from ascend_vllm.ops.ascend_custom import DIRECTORY, LIBRARY

    if not (DIRECTORY / LIBRARY).exists():
        return Result(Status.SKIPPED, message=f"{LIBRARY} is not installed in the package")
    log = DIRECTORY / "build.log"
    text = log.read_text(encoding="utf-8", errors="replace")[-_LAST_CHARACTERS:] if log.exists() else "not kept"
    return _facts(library=LIBRARY, build_log=text)
