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

from tests.npu import simulator

HERE = pathlib.Path(__file__).resolve().parent
ON_SIMULATOR = importlib.util.find_spec("torch_npu") is not None

collect_ignore_glob = [] if ON_SIMULATOR else ["*.py"]


class _Elsewhere(pytest.Module):
    """A test module that is run by another process."""

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


def _skips_own_tests(config: pytest.Config) -> bool:
    """Whether the simulator's own tests are left out: what they depend on is as it was when they last passed."""
    return not config.getoption("--all") and not simulator.has_changed()


def pytest_report_header(config: pytest.Config) -> list[str]:
    if not ON_SIMULATOR or not _skips_own_tests(config):
        return []
    return [
        "simulator operator tests skipped: csrc_ascend/sim and torch_npu unchanged since they last passed;"
        " --all runs them"
    ]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    if collection_path.parent != HERE or collection_path.name not in simulator.OWN_TESTS:
        return None
    # whoever names a file wants it
    is_named = any(collection_path.name in argument for argument in config.args)
    return True if _skips_own_tests(config) and not is_named else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.npu)
