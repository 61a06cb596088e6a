"""Builds the simulated Ascend runtime into ``ascend_vllm/_sim``; needs g++, torch and the torch_npu wheel.

    python csrc_ascend/sim/build.py [--torch-npu DIR] [--output DIR] [--jobs N]

The libraries have the names under which CANN installs them, so that the unmodified torch_npu wheel loads them.
Objects are cached under ``build/sim`` by the content of the source, of the headers of the simulator, of the flags,
of the compiler and of the versions of torch and torch_npu.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Iterable

HERE = pathlib.Path(__file__).resolve().parent
PROJECT_ROOT = HERE.parents[1]
CACHE = PROJECT_ROOT / "build" / "sim"
DEFAULT_OUTPUT = PROJECT_ROOT / "ascend_vllm" / "_sim"
# outside of the environment, so that ordinary processes do not import the package
DEFAULT_TORCH_NPU = pathlib.Path(sys.prefix) / "npu"

_SPEC = importlib.util.spec_from_file_location("ascend_vllm_native_build", HERE.parent / "build.py")
assert _SPEC is not None and _SPEC.loader is not None
native = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = native  # dataclasses look their module up
_SPEC.loader.exec_module(native)

# light optimisation, for a short build: run time is spent in ATen's kernels
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter")
# Libraries that the wheel's are linked to, beside those with a directory of their own.
EMPTY_LIBRARIES = ("libgraph", "libacl_op_compiler", "libacl_tdt_channel", "libfmk_parser", "libascend_protobuf")
GE_LIBRARY = "libge_runner"
PRECOMPILED = HERE / "opapi" / "aten.h"


@dataclasses.dataclass(frozen=True)
class Library:
    """A library with sources of its own.

    Attributes:
        name: its file's name without the suffix.
        sources: its directory.
        aten: whether it computes with torch.
        needs: libraries of this build that it calls.
        also: other names under which it is looked up.
        reads: directories of what its sources include, beside their own headers.
        torch_npu: whether it calls the wheel.
    """

    name: str
    sources: pathlib.Path
    aten: bool = False
    needs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    reads: tuple[pathlib.Path, ...] = ()
    torch_npu: bool = False


LIBRARIES = (
    Library("libascendcl", HERE / "ascendcl"),
    Library("libopapi", HERE / "opapi", aten=True, needs=("libascendcl",), also=("libnnopbase",)),
    Library("libhccl", HERE / "hccl", aten=True, needs=("libascendcl",), also=("libhcomm",)),
    # the project's own operators, whose name is that of the library which CMake builds with CANN
    Library(
        "libascend_vllm_npu",
        HERE / "custom",
        aten=True,
        needs=("libascendcl",),
        reads=(HERE / "ascendc", HERE.parent / "npu"),
        torch_npu=True,
    ),
)


class Builder:
    """One run of the build: where things are, and the compiler."""

    def __init__(self, compiler: str, torch_npu: pathlib.Path, output: pathlib.Path) -> None:
        self.compiler = compiler
        self.output = output
        self.wheel = torch_npu / "torch_npu"
        if not (self.wheel / "include").is_dir():
            raise native.BuildError(
                f"there is no torch_npu in {torch_npu}: make npu installs it, --torch-npu DIR names another place"
            )
        third_party = self.wheel / "include" / "third_party"
        torch_include = native.torch_dir() / "include"
        self.includes = (
            f"-I{HERE.parent}",
            f"-I{HERE / 'ascendc'}",
            *(
                f"-isystem{path}"
                for path in (
                    third_party / "acl" / "inc",
                    third_party / "hccl" / "inc",
                    self.wheel / "include",
                    torch_include,
                    torch_include / "torch" / "csrc" / "api" / "include",
                )
            ),
        )
        versions = (importlib.metadata.version("torch"), (self.wheel / "version.py").read_text())
        self.base_key = "\0".join((native.run([compiler, "--version"]), *FLAGS, *versions))

    def key(self, source: pathlib.Path, reads: Iterable[pathlib.Path] = ()) -> str:
        """Cache key of an object: digest of its source and of the files that it may include."""
        digest = hashlib.sha256(self.base_key.encode())
        headers = [] if source == PRECOMPILED else [HERE / "runtime.h", *sorted(source.parent.glob("*.h"))]
        included = (path for directory in reads for path in sorted(directory.rglob("*")) if path.is_file())
        for path in (source, *headers, *included):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]

    def compile(self, source: pathlib.Path, target: pathlib.Path, *flags: str) -> str:
        """Compiles a file into ``target`` atomically; returns the compiler's warnings."""
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        command = [self.compiler, *FLAGS, *flags, *self.includes, "-c", str(source), "-o", str(partial)]
        try:
            warnings: str = native.run(command)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
        return warnings

    def precompiled(self) -> pathlib.Path:
        """Path of ATen's precompiled header; parsing the headers takes a quarter of a minute."""
        directory = CACHE / f"aten-{self.key(PRECOMPILED)}"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / "aten.h.gch"

    def link(self, name: str, objects: Iterable[pathlib.Path], *flags: str) -> None:
        """Links a library into the output directory."""
        target = self.output / f"{name}.so"
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        # each file gets its own soname: the loader loads libraries with the same soname once
        command = [self.compiler, "-shared", *map(str, objects), f"-Wl,-soname,{name}.so", "-Wl,-rpath,$ORIGIN"]
        try:
            native.run([*command, f"-L{self.output}", *flags, "-o", str(partial)])
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def link_all(self, objects: dict[Library, list[pathlib.Path]]) -> None:
        """Links the libraries with sources, then the one with stubs of all missing symbols, then the empty ones."""
        torch_lib = native.torch_dir() / "lib"
        for library, files in objects.items():
            needs = [f"-l{name.removeprefix('lib')}" for name in library.needs]
            if library.aten:
                needs += [f"-L{torch_lib}", "-ltorch_cpu", "-lc10", "-lrt"]
            if library.torch_npu:
                needs += [f"-L{self.wheel / 'lib'}", "-ltorch_npu"]
            # missing symbols fail the build, not the tests
            self.link(library.name, files, *needs, "-Wl,--no-undefined")
            for name in library.also:
                self.link(name, [], "-Wl,--no-as-needed", f"-l{library.name.removeprefix('lib')}")
        refusals = CACHE / "refusals.cpp"
        refusals.write_text(self.refusals())
        compiled = CACHE / "refusals.o"
        self.compile(refusals, compiled)
        self.link(GE_LIBRARY, [compiled], "-lascendcl")
        for name in EMPTY_LIBRARIES:
            # torch_npu looks the functions of an operator compiler up in this library by its handle
            self.link(name, [], "-Wl,--no-as-needed", "-lascendcl")

    def refusals(self) -> str:
        """C++ source that defines every symbol that the wheel's libraries need and no library provides."""
        torchair = self.wheel / "dynamo" / "torchair" / "core"
        # its operators come with a library of their own, without which it is not loaded
        wheel = [path for path in (self.wheel / "lib").glob("*.so") if path.name != "libop_plugin_atb.so"]
        wheel += torchair.glob("*.so")
        provided = {
            name
            for path in (*wheel, *self.output.glob("*.so"), *(native.torch_dir() / "lib").glob("*.so*"))
            if path.stem != GE_LIBRARY
            for name in _symbols(path, "--defined-only")
        }
        # this process has the C library and Python; a symbol with a version is of a library that the wheel knows
        process = ctypes.CDLL(None)
        missing = {
            name
            for path in wheel
            for name in _symbols(path, "--undefined-only")
            if "@" not in name and name not in provided and not hasattr(process, name)
        }
        lines = ['#include "sim/ge/refusals.h"', ""]
        for name in sorted(missing):
            if re.match(r"_ZT[VIS]", name):
                lines.append(f"EMPTY_DATA({name})")
            elif name.startswith("_Z"):
                lines.append(f"REFUSE_GRAPH_ENGINE({name})")
            else:
                lines.append(f"REFUSE_CALL({name})")
        return "\n".join(lines) + "\n"


def _symbols(path: pathlib.Path, which: str) -> set[str]:
    """Names of a library's dynamic symbols; weak ones may stay undefined."""
    output = native.run(["nm", "-D", which, str(path)])
    rows = [line.split() for line in output.splitlines()]
    found = {row[-1] for row in rows if row[-2] not in ("w", "v")}
    return {name.split("@")[0] for name in found} if which == "--defined-only" else found


def build(torch_npu: pathlib.Path, output: pathlib.Path, jobs: int | None) -> None:
    """Compiles what changed and links the libraries.

    Raises:
        BuildError: there is no compiler, no torch_npu, or something does not compile.
    """
    compiler = native.find_compiler()
    if compiler is None or shutil.which("nm") is None:
        raise native.BuildError("the simulator needs g++ and nm; install them: apt-get install g++")
    output.mkdir(parents=True, exist_ok=True)
    with native.locked(CACHE):
        builder = Builder(compiler, torch_npu, output)
        objects: dict[Library, list[pathlib.Path]] = {}
        todo: dict[pathlib.Path, tuple[pathlib.Path, Library]] = {}
        for library in LIBRARIES:
            objects[library] = []
            for source in sorted(library.sources.glob("*.cpp")):
                target = CACHE / f"{library.name}-{source.stem}-{builder.key(source, library.reads)}.o"
                objects[library].append(target)
                if not target.exists():
                    todo[target] = (source, library)
        _compile(builder, todo, jobs or len(os.sched_getaffinity(0)))
        built = [path for paths in objects.values() for path in paths]
        stamp = hashlib.sha256("\n".join(path.name for path in built).encode()).hexdigest()
        stamp_path = output / ".stamp"
        if not stamp_path.exists() or stamp_path.read_text() != stamp:
            builder.link_all(objects)
            stamp_path.write_text(stamp)
        for path in CACHE.glob("lib*.o"):
            if path not in built:
                path.unlink()
        for path in CACHE.glob("aten-*"):
            if path != builder.precompiled().parent:
                shutil.rmtree(path)


def _compile(builder: Builder, todo: dict[pathlib.Path, tuple[pathlib.Path, Library]], jobs: int) -> None:
    """Compiles several files concurrently; those that need ATen wait for its precompiled headers."""
    if not todo:
        return
    header = builder.precompiled() if any(library.aten for _, library in todo.values()) else None
    fresh = header is not None and not header.exists()
    with (
        native.progress(len(todo) + fresh, "simulator") as advance,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):

        def run(source: pathlib.Path, target: pathlib.Path, *flags: str) -> str:
            if warnings := builder.compile(source, target, *flags):
                print(warnings, file=sys.stderr)
            return source.stem

        plain = [pool.submit(run, source, path) for path, (source, library) in todo.items() if not library.aten]
        try:
            if header is not None and fresh:
                advance(run(PRECOMPILED, header, "-x", "c++-header"))
            flags = () if header is None else ("-include", str(header.with_suffix("")), "-Winvalid-pch")
            aten = [
                pool.submit(run, source, path, *flags) for path, (source, library) in todo.items() if library.aten
            ]
            for future in concurrent.futures.as_completed([*plain, *aten]):
                advance(future.result())
        except native.BuildError:
            pool.shutdown(cancel_futures=True)
            raise


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Build the simulated Ascend runtime.")
    parser.add_argument("--torch-npu", type=pathlib.Path, default=DEFAULT_TORCH_NPU, help="default: %(default)s")
    parser.add_argument("--output", type=pathlib.Path, default=DEFAULT_OUTPUT, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=None, help="parallel compilers; default: the cores at hand")
    args = parser.parse_args()
    try:
        build(args.torch_npu.resolve(), args.output.resolve(), args.jobs)
    except native.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"simulator: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
