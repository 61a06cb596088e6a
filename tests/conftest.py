"""Fixtures that every room's tests may use."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# `from tests.tiny_models import …` works from any room, whatever directory pytest was started in
sys.path.insert(0, str(ROOT))
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


def _leave_npu_tests_alone(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A process on simulated NPUs runs tests/npu and nothing else, whatever was named on the command line."""
    if importlib.util.find_spec("torch_npu") is None:
        return
    others = [item for item in items if not item.path.is_relative_to(ROOT / "tests" / "npu")]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with slow tests first: one that begins last would keep one worker busy while the others are done."""
    _leave_npu_tests_alone(config, items)
    slow_files = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow_files)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzzed-requests", type=int, default=10_000, help="hostile requests to send to the servers")
    parser.addoption("--all-shapes", action="store_true", help="every costly value in every field, which takes hours")
    parser.addoption(
        "--soak-seconds", type=float, default=30, help="how long servers are kept under all kinds of load"
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
