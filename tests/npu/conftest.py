"""These tests run in a process of `ascend-vllm sim-run`, where torch_npu works on simulated devices.

`make test-npu` starts it. An ordinary run of pytest finds nothing here.
"""

from __future__ import annotations

import importlib.util
import pathlib
import warnings
from collections.abc import Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ON_SIMULATOR = importlib.util.find_spec("torch_npu") is not None

collect_ignore_glob = [] if ON_SIMULATOR else ["*.py"]

if ON_SIMULATOR:
    with warnings.catch_warnings():
        # it has warnings of its own while its modules are compiled and imported, which are none of ours
        warnings.simplefilter("ignore")
        import torch_npu  # noqa: F401


class _Elsewhere(pytest.Module):
    """A module of tests that another process runs."""

    def collect(self) -> Iterator[pytest.Item]:
        return iter(())


def pytest_pycollect_makemodule(module_path: pathlib.Path, parent: pytest.Collector) -> pytest.Module | None:
    # a file named on the command line comes here although the directory is ignored
    return None if ON_SIMULATOR else _Elsewhere.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not ON_SIMULATOR:
        return
    here = [item for item in items if item.path.is_relative_to(HERE)]
    for item in here:
        item.add_marker(pytest.mark.npu)
    if len(here) != len(items):
        # files named on the command line for the other suite
        config.hook.pytest_deselected(items=[item for item in items if item not in here])
        items[:] = here
