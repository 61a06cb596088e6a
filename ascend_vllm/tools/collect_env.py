"""`ascend-vllm collect-env`: describes the machine and the installed packages for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import pathlib
import platform
import sys

import psutil

import ascend_vllm

_GIB = 1 << 30
_PACKAGES = (
    "torch",
    "torch_npu",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "fastapi",
    "uvicorn",
    "pydantic",
    "msgspec",
    "pyzmq",
    "ray",
)
_INSTRUCTION_SETS = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_bf16",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
)


def collect() -> dict[str, str]:
    """Names and values of the facts, in the order in which they are shown."""
    flags, model = _cpu()
    facts = {
        "ascend-vllm": ascend_vllm.__version__,
        "Python": f"{platform.python_version()} ({sys.executable})",
        "OS": platform.platform(),
        "CPU": f"{model}, {len(os.sched_getaffinity(0))} of {psutil.cpu_count()} logical cores usable",
        "Instruction sets": " ".join(name for name in _INSTRUCTION_SETS if name in flags) or "none of those known",
        "Memory": f"{psutil.virtual_memory().total / _GIB:.1f} GiB, "
        f"{psutil.virtual_memory().available / _GIB:.1f} GiB available",
        "Native kernels": _native_kernels(),
    }
    facts |= {name: _version(name) for name in _PACKAGES}
    return facts


def _cpu() -> tuple[set[str], str]:
    """Name and feature flags of the processor, as far as the system reports them."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set(), platform.processor() or platform.machine()
    entries = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = entries.get("flags") or entries.get("Features") or ""
    return set(flags.split()), entries.get("model name") or platform.machine()


def _native_kernels() -> str:
    try:
        from ascend_vllm.ops.native import load_native_library

        load_native_library()
    except Exception as error:  # any failure belongs in the report
        return f"cannot be loaded: {error}"
    return "loaded"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the command; it has no arguments."""
    parser.description = "Prints what a bug report should say of this machine and of what is installed."


def run(namespace: argparse.Namespace) -> int:  # noqa: ARG001 - every command gets its namespace
    facts = collect()
    width = max(map(len, facts))
    print("\n".join(f"{name:<{width}}  {fact}" for name, fact in facts.items()))
    return 0
