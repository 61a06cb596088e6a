"""Fixtures that every room's tests may use."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import logging
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

ROOT = pathlib.Path(__file__).resolve().parent.parent
# `from tests.tiny_models import …` works from any room, whatever directory pytest was started in
sys.path.insert(0, str(ROOT))
# how long each file took, written by scripts/record_test_seconds.py
SECONDS = pathlib.Path(__file__).resolve().parent / "seconds.json"
SECONDS_OF_NEW_FILES = 5.0
# directory → what its tests call the servers that a session's tests share, and clients of them
SHARED_SERVERS = {
    "clients": re.compile(r"\bclients_server\b"),
    "fuzz": re.compile(r"\bfuzzed_servers\b"),
    "e2e": re.compile(r"\bdemo_server\b"),
    "entrypoints": re.compile(
        r"\b(?:openai|patient|compact|developer|guarded|keyed|generate)_server\b|\b(?:http: httpx|client: openai)\b"
    ),
}
# tests that run side by side share the cores; threads that wait for one another's would only be in the way
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes or is drawn says something of the machine, not of what is tested. A test that lists what
# it suppresses must list this again.
hypothesis.settings.register_profile(
    "any machine", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session")
def demo_model_dir() -> str:
    """Directory of the demo model, trained once per machine and version (a minute or two on two cores)."""
    from ascend_vllm.entrypoints.demo_model import ensure_demo_model

    with pytest.MonkeyPatch.context() as patch:
        # it takes longest of all: it may have every core
        patch.delenv("OMP_NUM_THREADS", raising=False)
        return ensure_demo_model()


@pytest.fixture
def package_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The package's log from INFO on, which does not reach the root logger by itself."""
    monkeypatch.setattr(logging.getLogger("ascend_vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "ascend_vllm")
    return caplog


@functools.cache
def _seconds() -> dict[str, float]:
    found: dict[str, float] = json.loads(SECONDS.read_text())
    return found


def _seconds_of_file(nodeid: str) -> float:
    return _seconds().get(nodeid.partition("::")[0], SECONDS_OF_NEW_FILES)


def _leave_npu_tests_alone(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A process on simulated NPUs runs tests/npu and nothing else, whatever was named on the command line."""
    if importlib.util.find_spec("torch_npu") is None:
        return
    others = [item for item in items if not item.path.is_relative_to(ROOT / "tests" / "npu")]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def _leave_exhaustive_tests_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive") is not None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.get_closest_marker("exhaustive") is None]


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    most = config.getoption("--file-seconds")
    if most is None or not collection_path.name.startswith("test_") or collection_path.is_dir():
        return None
    name = collection_path.relative_to(ROOT).as_posix()
    # whoever names a file wants it
    return True if _seconds_of_file(name) > most and name not in config.args else None


def pytest_collection() -> None:
    # nothing of the thousands of modules and tests that are collected is ever garbage
    gc.disable()


def pytest_collection_finish() -> None:
    # and no collection of garbage needs to look through them again, which takes longer than most tests
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first: one that begins last would keep one worker busy while the others are done."""
    _leave_npu_tests_alone(config, items)
    _leave_exhaustive_tests_out(config, items)
    items.sort(key=lambda item: -_seconds_of_file(item.nodeid))


@functools.cache
def _shares_servers(file: str) -> bool:
    path = ROOT / file
    names = SHARED_SERVERS.get(path.parent.name)
    return names is not None and path.is_file() and names.search(path.read_text()) is not None


class _SharingServers(LoadFileScheduling):
    """All tests of a file go to one worker, and so do all files that share servers: each is started once."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return file.rpartition("/")[0] if _shares_servers(file) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return _SharingServers(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="exhaustive tests too, and more of everything that is drawn or repeated"
    )
    parser.addoption(
        "--file-seconds", type=float, metavar="N", help="leave out files that take longer, by tests/seconds.json"
    )
    parser.addoption(
        "--fuzzed-requests", type=int, help="hostile requests to send to the servers: 2000, 10000 with --all"
    )
    parser.addoption("--all-shapes", action="store_true", help="every costly value in every field, which takes hours")
    parser.addoption(
        "--soak-seconds", type=float, help="how long servers are kept under all kinds of load: 12, or 30 with --all"
    )
    parser.addoption("--all-kills", action="store_true", help="every process is killed once, in every layout")
    parser.addoption(
        "--server-flags",
        default="",
        metavar="FLAGS",
        help='more flags of every server that tests start, such as "--tensor-parallel-size 2"',
    )


def pytest_configure(config: pytest.Config) -> None:
    from tests.server import set_further_flags

    set_further_flags(config.getoption("--server-flags"))
    # what was not given
    is_all = config.getoption("--all")
    for name, ordinary, whole in (("fuzzed_requests", 2000, 10_000), ("soak_seconds", 12.0, 30.0)):
        if getattr(config.option, name) is None:
            setattr(config.option, name, whole if is_all else ordinary)


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--all"):
        return "everything runs (--all)"
    return "exhaustive tests are left out, and less is drawn and repeated; --all runs everything"


@pytest.fixture(scope="session")
def ray_environment() -> Iterator[dict[str, str]]:
    """The environment of servers whose workers are Ray's: they share a cluster, which takes long to start."""
    from tests.ray_cluster import environment_of_cluster

    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'ascend-vllm[ray]'")
    with environment_of_cluster() as environment:
        yield environment


@pytest.fixture(scope="session", autouse=True)
def _environment_for_server_flags(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where --server-flags asks for Ray, every server that is started is in that environment."""
    from tests.server import further_flags

    with pytest.MonkeyPatch.context() as patch:
        if "ray" in " ".join(further_flags()):
            for name, value in request.getfixturevalue("ray_environment").items():
                patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def runs_all(request: pytest.FixtureRequest) -> bool:
    """Whether everything runs (--all)."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(scope="session")
def num_fuzzed_requests(request: pytest.FixtureRequest) -> int:
    """How many hostile requests the servers get; 100,000 is for a run by hand."""
    return int(request.config.getoption("--fuzzed-requests"))


@pytest.fixture(scope="session")
def whole_product(request: pytest.FixtureRequest) -> bool:
    """Whether every field gets every costly value, instead of one."""
    return bool(request.config.getoption("--all-shapes"))


@pytest.fixture(scope="session")
def soak_seconds(request: pytest.FixtureRequest) -> float:
    """How long the soak lasts; 1200 is for a run by hand."""
    return float(request.config.getoption("--soak-seconds"))
