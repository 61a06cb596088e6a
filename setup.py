"""Everything about the package is in pyproject.toml; this adds the native build to it."""

from __future__ import annotations

import importlib.util
import pathlib
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

_SPEC = importlib.util.spec_from_file_location(
    "ascend_vllm_native_build", pathlib.Path(__file__).resolve().parent / "csrc_ascend" / "build.py"
)
assert _SPEC is not None and _SPEC.loader is not None
native_build = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = native_build  # dataclasses look their module up
_SPEC.loader.exec_module(native_build)


class BuildNative(build_ext):
    """Hands the one extension to csrc_ascend/build.py."""

    def get_ext_filename(self, fullname: str) -> str:
        # A plain shared library that torch loads, not a Python module: no interpreter tag in its name.
        return str(pathlib.Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Builds ``ascend_vllm/_C.so``; without a compiler the package is installed without it."""
        native_build.build_library(pathlib.Path(self.get_ext_fullpath(ext.name)).resolve())


setup(
    ext_modules=[Extension("ascend_vllm._C", sources=[], optional=True)],
    cmdclass={"build_ext": BuildNative},
)
