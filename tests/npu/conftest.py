"""These tests run in a process of `ascend-vllm sim-run`, where torch_npu works on simulated devices.

`make test-npu` starts it. An ordinary run of pytest finds nothing here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pathlib
import warnings
from collections.abc import Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ON_SIMULATOR = importlib.util.find_spec("torch_npu") is not None

collect_ignore_glob = [] if ON_SIMULATOR else ["*.py"]


class _Elsewhere(pytest.Module):
    """A module of tests that another process runs."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


def _import_torch_npu() -> None:
    # it has warnings of its own while its modules are compiled and imported, and words on the standard output
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        import torch_npu  # noqa: F401


def pytest_pycollect_makemodule(module_path: pathlib.Path, parent: pytest.Collector) -> pytest.Module | None:
    # a file named on the command line comes here although the directory is ignored
    if not ON_SIMULATOR:
        return _Elsewhere.from_parent(parent, path=module_path)
    _import_torch_npu()
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.npu)
