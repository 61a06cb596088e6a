"""Limits of the machine as seen through cgroup trees laid out as the kernel does."""

from __future__ import annotations

import os
import pathlib

import psutil
import pytest

from ascend_vllm.platforms import host

GIB = 1 << 30


def _tree(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def many_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Eight logical CPUs that are four cores with two threads each."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    siblings = {f"cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}\n" for i in range(8)}
    return _tree(tmp_path / "topology", siblings)


def _membership(tmp_path: pathlib.Path, text: str) -> pathlib.Path:
    path = tmp_path / "cgroup"
    path.write_text(text)
    return path


def test_threads_of_a_core_count_once(many_cpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    nothing = tmp_path / "none"
    assert host.usable_cores(nothing, nothing, many_cpus) == 4


def test_without_topology_every_cpu_is_a_core(many_cpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    nothing = tmp_path / "none"
    assert host.usable_cores(nothing, nothing, nothing) == 8


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 4)])
def test_v2_quota_of_a_parent_limits_cores(
    many_cpus: pathlib.Path, tmp_path: pathlib.Path, quota: str, cores: int
) -> None:
    mount = _tree(tmp_path / "fs", {"pod/cpu.max": quota, "pod/app/cpu.max": "max 100000"})
    assert host.usable_cores(mount, _membership(tmp_path, "0::/pod/app\n"), many_cpus) == cores


def test_v1_quota_limits_cores(many_cpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    mount = _tree(tmp_path / "fs", {"cpu/app/cpu.cfs_quota_us": "300000", "cpu/app/cpu.cfs_period_us": "100000"})
    membership = _membership(tmp_path, "4:memory:/app\n3:cpu,cpuacct:/app\n0::/\n")
    assert host.usable_cores(mount, membership, many_cpus) == 3


def test_v1_without_quota(many_cpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    mount = _tree(tmp_path / "fs", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"})
    assert host.usable_cores(mount, _membership(tmp_path, "3:cpu:/hidden/by/the/container\n"), many_cpus) == 4


def test_v2_memory_is_the_tightest_level_with_cached_files_free(tmp_path: pathlib.Path) -> None:
    mount = _tree(
        tmp_path / "fs",
        {
            "pod/memory.max": str(1 * GIB),
            "pod/memory.current": str(GIB // 2),
            "pod/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
            "pod/app/memory.max": "max",
            "pod/app/memory.current": "0",
        },
    )
    assert host.available_memory_bytes(mount, _membership(tmp_path, "0::/pod/app\n")) == GIB * 3 // 4


def test_v1_memory_limit(tmp_path: pathlib.Path) -> None:
    mount = _tree(
        tmp_path / "fs",
        {
            "memory/app/memory.limit_in_bytes": str(GIB),
            "memory/app/memory.usage_in_bytes": str(GIB // 2),
            "memory/app/memory.stat": "total_inactive_file 4096\n",
            "memory/memory.limit_in_bytes": "9223372036854771712",
            "memory/memory.usage_in_bytes": "0",
        },
    )
    assert host.available_memory_bytes(mount, _membership(tmp_path, "4:memory:/app\n")) == GIB // 2 + 4096


def test_over_its_limit_nothing_is_left(tmp_path: pathlib.Path) -> None:
    mount = _tree(tmp_path / "fs", {"memory.max": "100", "memory.current": "200"})
    assert host.available_memory_bytes(mount, _membership(tmp_path, "0::/\n")) == 0


def test_without_limits_it_is_the_machines(tmp_path: pathlib.Path) -> None:
    nothing = tmp_path / "none"
    available = host.available_memory_bytes(nothing, nothing)
    assert 0 < available <= psutil.virtual_memory().total


def test_this_machine_can_be_read() -> None:
    assert 1 <= host.usable_cores() <= (os.cpu_count() or 1)
    assert host.available_memory_bytes() > 0
