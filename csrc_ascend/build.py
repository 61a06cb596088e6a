"""Builds the CPU kernels into ``ascend_vllm/_C.so``; needs g++ (or another GNU-like compiler) and torch's headers.

Run it directly for a progress bar, or let pip run it through setup.py; both share the object cache under
``build/native``. Objects are keyed by the content of the source, of every header of this repository it includes,
of the flags and of the compiler, so a second build with nothing changed only checks hashes.

    python csrc_ascend/build.py [--output FILE] [--jobs N] [--force]
    python csrc_ascend/build.py --sanitize address,undefined --output FILE
    python csrc_ascend/build.py --check aarch64 [--output FILE]

Without a compiler it warns loudly and succeeds: the package then computes on the references of its ops.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

SOURCE_ROOT = pathlib.Path(__file__).resolve().parent
PROJECT_ROOT = SOURCE_ROOT.parent
CACHE = PROJECT_ROOT / "build" / "native"
DEFAULT_OUTPUT = PROJECT_ROOT / "ascend_vllm" / "_C.so"
CACHE_DAYS = 14

COMMON_FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-unused-function", "-Wno-psabi",
    "-Wno-unknown-pragmas",
)  # fmt: skip
# Kernels include no framework and need neither exceptions nor type information.
KERNEL_FLAGS = ("-fno-exceptions", "-fno-rtti")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512_FLAGS = (
    *_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
    # GCC 12 warns of the undefined lanes its own intrinsics headers pass on purpose (GCC bug 105593).
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
_AVX512_VNNI_FLAGS = (*_AVX512_FLAGS, "-mavx512vnni")
_AVX512_BF16_FLAGS = (*_AVX512_VNNI_FLAGS, "-mavx512bf16")
MACHINE = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
# Machine -> instruction set -> flags; the sets a machine cannot have are not built for it.
VARIANTS_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "scalar": (),
        "avx2": _AVX2_FLAGS,
        "avx512": _AVX512_FLAGS,
        "avx512_vnni": _AVX512_VNNI_FLAGS,
        "avx512_bf16": _AVX512_BF16_FLAGS,
        "amx_bf16": (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    "aarch64": {
        "scalar": (),
        "neon": (),
        "neon_dotprod": ("-march=armv8.2-a+dotprod",),
        "neon_bf16": ("-march=armv8.2-a+dotprod+bf16+i8mm",),
    },
}
VARIANTS = VARIANTS_OF.get(MACHINE, {"scalar": ()})
# What the header of a kernel must mention to be built for a set: the others would be the same as for the set below.
# On Arm that is what x86's sets for the same purpose ask for, products of bytes and products of matrices.
ASKED_FOR = {
    "amx_bf16": "__AMX_BF16__",
    "avx512_vnni": "__AVX512VNNI__",
    "neon_dotprod": "__AVX512VNNI__",
    "neon_bf16": "__AMX_BF16__",
}

NO_COMPILER = """
********************************************************************************************
WARNING: no C++ compiler found (looked for $CXX, g++, c++, clang++).
The CPU kernels of ascend-vllm are NOT built. The package works, but every op runs on its plain
torch reference, many times slower. Install g++ (Debian/Ubuntu: apt-get install g++) and run
    python csrc_ascend/build.py
********************************************************************************************
"""


class BuildError(Exception):
    """A translation unit does not compile or breaks a rule of the house; the message holds the output."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """One translation unit.

    Attributes:
        name: file name of its object, without suffix and hash.
        source: the .cpp file.
        flags: every flag but -I, -c and -o.
        kernel: the kernel header compiled through a variant, or None.
        include_dirs: directories besides ``csrc_ascend``.
    """

    name: str
    source: pathlib.Path
    flags: tuple[str, ...]
    kernel: pathlib.Path | None = None
    include_dirs: tuple[pathlib.Path, ...] = ()


def find_compiler(machine: str = MACHINE) -> str | None:
    """Path of the C++ compiler for a machine, or None; for others than this one the name that Debian gives it."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++") if machine == MACHINE else (f"{machine}-linux-gnu-g++",)
    for name in names:
        if name and (path := shutil.which(name)):
            return path
    return None


def torch_dir() -> pathlib.Path:
    """Where torch is installed, found without importing it (an import takes seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed; its headers are needed to build the CPU kernels")
    return pathlib.Path(spec.origin).parent


def sanitizer_flags(sanitizers: str | None) -> tuple[str, ...]:
    """Flags of a library that checks itself while it runs, and ends the program where it finds something wrong.

    Args:
        sanitizers: as behind -fsanitize=, such as "address,undefined" or "thread"; None for an ordinary library.
    """
    if sanitizers is None:
        return ()
    return (
        f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-fno-sanitize=vptr", "-fno-omit-frame-pointer",
        "-g1", "-O1",
    )  # fmt: skip


def kernel_units(machine: str = MACHINE, further_flags: tuple[str, ...] = ()) -> list[Unit]:
    """What needs no torch: dispatcher, team of threads, and each kernel once per instruction set.

    Args:
        machine: whose sets.
        further_flags: of every unit, behind its own.
    """
    cpu = SOURCE_ROOT / "cpu"
    found = [Unit(name, cpu / f"{name}.cpp", COMMON_FLAGS + further_flags) for name in ("dispatch", "team")]
    for kernel in sorted((cpu / "kernels").glob("*.h")):
        text = kernel.read_text()
        if "ASCEND_VLLM_DEFINE_KERNEL" not in text:
            continue  # a header shared by kernels
        define = f'-DASCEND_VLLM_KERNEL_HEADER="{kernel.relative_to(SOURCE_ROOT).as_posix()}"'
        for isa, isa_flags in VARIANTS_OF.get(machine, VARIANTS).items():
            if ASKED_FOR.get(isa, "") not in text:
                continue
            flags = (*COMMON_FLAGS, *KERNEL_FLAGS, *isa_flags, define, *further_flags)
            found.append(Unit(f"{kernel.stem}-{isa}", cpu / "variants" / f"{isa}.cpp", flags, kernel))
    return found


def units(further_flags: tuple[str, ...] = ()) -> list[Unit]:
    """Every translation unit of the library: `kernel_units`, and bindings.

    Args:
        further_flags: of every unit, behind its own.
    """
    torch_include = (torch_dir() / "include",)
    # Bindings first: they take longest. Their own code is only argument checks, so light optimisation will do.
    bind_flags = (*COMMON_FLAGS, "-O1", *further_flags)
    bindings = [
        Unit(f"bind-{source.stem}", source, bind_flags, include_dirs=torch_include)
        for source in sorted((SOURCE_ROOT / "cpu" / "bind").glob("*.cpp"))
    ]
    return bindings + kernel_units(further_flags=further_flags)


@functools.cache
def _included(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Headers of this repository that a file includes directly."""
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE)
    return tuple(SOURCE_ROOT / name for name in names if (SOURCE_ROOT / name).is_file())


def _closure(roots: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    seen: set[pathlib.Path] = set()
    todo = list(roots)
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo.extend(_included(path))
    return sorted(seen)


def object_path(unit: Unit, compiler_id: str) -> pathlib.Path:
    """Where the object of a unit is cached."""
    digest = hashlib.sha256()
    for text in (compiler_id, *unit.flags):
        digest.update(text.encode() + b"\0")
    if unit.include_dirs:
        # torch's version, not its place: pip's isolated builds install it in a new place every time
        digest.update(importlib.metadata.version("torch").encode())
    for path in _closure([unit.source] + ([unit.kernel] if unit.kernel else [])):
        digest.update(path.relative_to(SOURCE_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return CACHE / f"{unit.name}-{digest.hexdigest()[:16]}.o"


def run(command: list[str]) -> str:
    """What a program prints; BuildError, with its words, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(" ".join(command) + "\n" + done.stderr)
    return done.stdout + done.stderr


def _check_symbols(unit: Unit, path: pathlib.Path) -> None:
    """Refuses a kernel object with symbols that the linker could merge with another variant's.

    An inline function of a header compiled with AVX-512 flags would become the only copy of the program, and
    machines without AVX-512 would die in it.
    """
    nm = shutil.which("nm")
    # sanitizers add symbols of their own; what they are in runs on this machine only
    is_sanitized = any(flag.startswith("-fsanitize=") for flag in unit.flags)
    if unit.kernel is None or nm is None or is_sanitized:
        return
    own = re.compile(rf"ascend_vllm_\w+_{unit.source.stem}$")
    for line in run([nm, "-g", "--defined-only", str(path)]).splitlines():
        *_, kind, name = line.split()
        if kind != "T" or not own.match(name):
            demangled = run(["c++filt", name]).strip() if shutil.which("c++filt") else name
            raise BuildError(
                f"{unit.kernel.name} for {unit.source.stem} defines the mergeable symbol {demangled}: keep code in"
                " anonymous namespaces and out of the standard library's inline functions"
            )


def compile_unit(compiler: str, unit: Unit, target: pathlib.Path) -> str:
    """Compiles one unit into ``target`` atomically; returns the compiler's warnings."""
    partial = target.with_suffix(f".{os.getpid()}.tmp.o")
    includes = [f"-I{SOURCE_ROOT}"] + [f"-isystem{path}" for path in unit.include_dirs]
    try:
        output = run([compiler, *unit.flags, *includes, "-c", str(unit.source), "-o", str(partial)])
        _check_symbols(unit, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return output


def link(
    compiler: str, objects: list[pathlib.Path], output: pathlib.Path, further_flags: tuple[str, ...] = ()
) -> None:
    """Links the library; at run time torch's libraries, libgomp among them, are the ones already loaded."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_suffix(f".{os.getpid()}.tmp")
    # No C++ runtime of another version: torch's is in the process already, and -lgomp resolves to the soname
    # libgomp.so.1 that torch has loaded.
    command = [
        compiler, "-shared", "-fopenmp", *map(str, objects), f"-L{torch_dir() / 'lib'}",
        "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,-rpath,$ORIGIN/../torch/lib", *further_flags, "-o", str(partial),
    ]  # fmt: skip
    try:
        run(command)
        partial.replace(output)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: pathlib.Path) -> Iterator[None]:
    """One build at a time; the second finds the first one's objects."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def progress(total: int, title: str = "CPU kernels") -> Iterator[Callable[[str], None]]:
    """Gives a function to call after each finished unit: a tqdm bar, or lines where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        done = 0

        def line(name: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {name}", flush=True)

        yield line
        return
    with tqdm(total=total, desc=title, unit="file", mininterval=0.5, dynamic_ncols=True) as bar:

        def advance(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        yield advance


def _compile(compiler: str, missing: dict[Unit, pathlib.Path], jobs: int | None) -> None:
    workers = jobs or len(os.sched_getaffinity(0))
    with progress(len(missing)) as advance, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        running = {pool.submit(compile_unit, compiler, unit, path): unit for unit, path in missing.items()}
        try:
            for future in concurrent.futures.as_completed(running):
                if warnings := future.result():
                    print(warnings, file=sys.stderr)
                advance(running[future].name)
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise


def _prune(keep: set[pathlib.Path]) -> None:
    """Drops objects that no build has used for two weeks."""
    for path in keep:
        path.touch()
    for path in CACHE.glob("*.o"):
        if path not in keep and time.time() - path.stat().st_mtime > CACHE_DAYS * 86400:
            path.unlink(missing_ok=True)


def _objects(compiler: str, wanted: list[Unit], jobs: int | None, force: bool) -> list[pathlib.Path]:
    """The objects of units, of which those that are not cached are compiled, or all."""
    compiler_id = run([compiler, "--version"])
    _included.cache_clear()
    targets = {unit: object_path(unit, compiler_id) for unit in wanted}
    missing = {unit: path for unit, path in targets.items() if force or not path.exists()}
    if missing:
        _compile(compiler, missing, jobs)
    return sorted(targets.values())


def build_library(
    output: pathlib.Path = DEFAULT_OUTPUT,
    jobs: int | None = None,
    force: bool = False,
    sanitizers: str | None = None,
) -> bool:
    """Compiles what changed and links ``output``.

    Args:
        output: the library.
        jobs: compilers at a time; None for one per core.
        force: whether to compile what is cached too.
        sanitizers: see `sanitizer_flags`.

    Returns:
        False, after a loud warning, if there is no compiler.

    Raises:
        BuildError: a unit does not compile.
    """
    compiler = find_compiler()
    if compiler is None:
        print(NO_COMPILER, file=sys.stderr, flush=True)
        return False
    further_flags = sanitizer_flags(sanitizers)
    with locked(CACHE):
        objects = _objects(compiler, units(further_flags), jobs, force)
        stamp = hashlib.sha256("\n".join(path.name for path in objects).encode()).hexdigest()
        stamp_path = CACHE / f"{output.name}-{hashlib.sha256(str(output).encode()).hexdigest()[:8]}.stamp"
        current = output.exists() and stamp_path.exists() and stamp_path.read_text() == stamp
        if force or not current:
            link(compiler, objects, output, further_flags)
            stamp_path.write_text(stamp)
        _prune(set(objects))
    return True


def build_check(output: pathlib.Path, machine: str, compiler: str, jobs: int | None = None) -> None:
    """Builds the program of cpu/check, which compares kernels with plain references, without torch.

    Args:
        output: the program; linked statically, so that an emulator needs no other files.
        machine: that it runs on.
        compiler: for that machine.
        jobs: compilers at a time; None for one per core.

    Raises:
        BuildError: a unit does not compile.
    """
    # inlined, or standard functions would be symbols that sets share
    light = ("-O1", "-finline-functions", "-finline-small-functions")
    checks = [
        Unit(f"check-{source.stem}", source, COMMON_FLAGS + light)
        for source in sorted((SOURCE_ROOT / "cpu" / "check").glob("*.cpp"))
    ]
    with locked(CACHE):
        objects = _objects(compiler, checks + kernel_units(machine, light), jobs, force=False)
        output.parent.mkdir(parents=True, exist_ok=True)
        run([compiler, "-static", "-fopenmp", *map(str, objects), "-o", str(output)])
        _prune(set(objects))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build the CPU kernels of ascend-vllm.")
    parser.add_argument("--output", type=pathlib.Path, default=DEFAULT_OUTPUT, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=None, help="parallel compilers; default: the cores at hand")
    parser.add_argument("--force", action="store_true", help="compile even what is cached")
    parser.add_argument(
        "--sanitize", metavar="NAMES", help="sanitizers to build with, as behind the compiler's -fsanitize="
    )
    parser.add_argument(
        "--check", metavar="MACHINE", help="build the program that checks kernels instead: x86_64 or aarch64"
    )
    args = parser.parse_args()
    if args.check not in (None, *VARIANTS_OF):
        parser.error(f"--check must be one of {', '.join(VARIANTS_OF)}")
    if args.check and args.output == DEFAULT_OUTPUT:
        args.output = CACHE.parent / f"check-{args.check}"
    if args.sanitize and args.output == DEFAULT_OUTPUT:
        parser.error("--sanitize needs another --output: such a library is loaded with the sanitizer's own only")
    try:
        if args.check:
            compiler = find_compiler(args.check)
            if compiler is None:
                raise BuildError(
                    f"no compiler for {args.check} found; Debian: apt-get install g++-{args.check}-linux-gnu"
                )
            build_check(args.output.resolve(), args.check, compiler, args.jobs)
            print(args.output)
            return 0
        built = build_library(args.output.resolve(), args.jobs, args.force, args.sanitize)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    if built:
        print(f"CPU kernels: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
