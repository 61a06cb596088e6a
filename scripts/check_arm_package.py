"""Imports the Python package by Debian's Python for arm64, which qemu-user runs where this machine is another one.

    scripts/check_arm_package.py [DIRECTORY]        where downloads are kept (build/arm, about 300 MB)

Debian has the interpreter and its libraries, PyPI wheels of the dependencies for aarch64. Neither has torch in a
build for CPUs alone, nor packages that need it, so modules that import these are counted and left out: what is left
are servers, engine core, command line and configuration. Exits with 1 if a module fails in another way.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
INTERPRETER = "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib"
LIBRARIES = "libc6 libgcc-s1 libstdc++6 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1"
# these and what imports them
WITHOUT_WHEELS = ("torch", "xgrammar", "llguidance")

IMPORT_ALL = """
import importlib, pkgutil, platform, sys
root, site, *without = sys.argv[1:]
sys.path[:0] = [root, site]
sys.dont_write_bytecode = True
import ascend_vllm
imported, lacking, failed = [], [], []
# _C is the native library, of this machine's processor
for module in pkgutil.walk_packages(ascend_vllm.__path__, "ascend_vllm.", onerror=lambda name: None):
    if module.name == "ascend_vllm._C":
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        (lacking if error.name in without else failed).append(f"{module.name}: {error}")
    except Exception as error:
        failed.append(f"{module.name}: {type(error).__name__}: {error}")
    else:
        imported.append(module.name)
print(f"{platform.machine()}, Python {platform.python_version()}: {len(imported)} modules imported,", flush=True)
print(f"{len(lacking)} need {', '.join(without)}, {len(failed)} failed", *failed, sep="\\n")
needed = {"ascend_vllm.entrypoints.openai.api_server", "ascend_vllm.entrypoints.cli", "ascend_vllm.core.engine_core"}
sys.exit(bool(failed) or not needed <= set(imported))
"""


def download_interpreter(directory: pathlib.Path) -> pathlib.Path:
    """Debian's Python with its libraries, unpacked; apt's lists for arm64 are kept apart from this machine's."""
    root, packages = directory / "root", directory / "packages"
    if root.exists():
        return root
    for name in ("state/lists/partial", "cache/archives/partial", "packages"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    (directory / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": directory / "state",
        "Dir::State::status": directory / "status",
        "Dir::Cache": directory / "cache",
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *INTERPRETER.split(), *LIBRARIES.split()], cwd=packages, check=True)
    for package in packages.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    return root


def install_wheels(directory: pathlib.Path) -> pathlib.Path:
    """The package's dependencies for aarch64, without those that need torch."""
    site = directory / "site"
    if site.exists():
        return site
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = [name for name in wanted if re.split(r"[^\w-]", name)[0] not in WITHOUT_WHEELS]
    platforms = [f"--platform=manylinux{version}_aarch64" for version in ("_2_28", "_2_17", "2014")]
    abis = [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
    options = ["--quiet", "--no-compile", "--only-binary=:all:", "--python-version=3.11", *platforms, *abis]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, f"--target={site}", *wanted], check=True)
    return site


def main() -> int:
    """Downloads what is missing, and imports."""
    directory = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "arm").absolute()
    root, site = download_interpreter(directory), install_wheels(directory)
    command = ["qemu-aarch64", "-L", root, root / "usr/bin/python3.11", "-I", "-c", IMPORT_ALL]
    return subprocess.run([*command, ROOT, site, *WITHOUT_WHEELS], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
