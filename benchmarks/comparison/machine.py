"""Describes the machine for results."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

import psutil
import torch

import ascend_vllm
from ascend_vllm.ops import native
from ascend_vllm.ops.kernel_choice import choose_cpu_kernels

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# instruction sets that determine a processor's performance, as in /proc/cpuinfo on x86 and Arm
_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16"),
)


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    text = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read(path: str) -> str | None:
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError:
        return None


def _commit() -> str | None:
    """The measured commit, with a plus if the tree has changes."""
    try:
        words = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _chosen_huge_pages() -> str | None:
    text = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else None


def _chosen_isa() -> str | None:
    """The sets that bfloat16 models are computed with on this machine, which this process uses from now on too."""
    choice = choose_cpu_kernels(torch.bfloat16, probe=True)
    return native.cpu_isa() if choice is None else " and ".join(dict.fromkeys(choice.values()))


def describe(isa: str | None = None) -> dict[str, Any]:
    """The hardware, system and software that affect results.

    Args:
        isa: instruction set that the caller has selected for all kernels, if it has.
    """
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    native.load_native_library()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": info.get("model name") or info.get("CPU part") or platform.processor(),
        "cpu_family_model_stepping": [info.get(name) for name in ("cpu family", "model", "stepping")],
        "architecture": platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "cache": info.get("cache size"),
        "last_level_cache": _read("/sys/devices/system/cpu/cpu0/cache/index3/size"),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "is_virtual": "hypervisor" in flags,
        "kernel": platform.release(),
        "transparent_huge_pages": _chosen_huge_pages(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ascend_vllm": ascend_vllm.__version__,
        "commit": _commit(),
        "kernels_isa": isa or _chosen_isa(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def one_line(machine: dict[str, Any]) -> str:
    """The description in one line of text."""
    load = machine["load_average"][0]
    return (
        f"{machine['cpu']} ({', '.join(machine['flags'])}), {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"Linux {machine['kernel']}, torch {machine['torch']}, kernels for {machine['kernels_isa']}, load {load}"
    )
