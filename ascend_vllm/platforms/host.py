"""What this process may use of its machine: cores and memory, as scheduling and cgroup limits leave them.

A container sees all of its host's cores and memory; what it may use stands in the control groups (versions 1
and 2 are read, every level from the process's own group up to the root, since each level limits).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
from collections.abc import Iterator

import psutil

# address at which nobody but this machine itself reaches it
LOOPBACK = "127.0.0.1"

_CGROUP_MOUNT = pathlib.Path("/sys/fs/cgroup")
_CGROUP_OF_PROCESS = pathlib.Path("/proc/self/cgroup")
_CPU_TOPOLOGY = pathlib.Path("/sys/devices/system/cpu")
# cgroup v1 writes "no limit" as a number near 2**63
_V1_UNLIMITED = 1 << 60


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _levels(controller: str, mount: pathlib.Path, membership: pathlib.Path) -> Iterator[pathlib.Path]:
    """Directories of the process's group for a controller and of all its parents, innermost first."""
    for line in (_read(membership) or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        relative = pathlib.PurePosixPath(group.lstrip("/"))
        # inside a container the group's path may be the host's, of which only the mount's root is visible
        yield from (root / level for level in (relative, *relative.parents) if (root / level).is_dir())


def _cpu_quota(mount: pathlib.Path, membership: pathlib.Path) -> float | None:
    """Smallest CPU quota of all levels in cores; None without one."""
    quotas = []
    for level in _levels("cpu", mount, membership):
        v2 = _read(level / "cpu.max")
        quota, period = v2.split() if v2 else (_read(level / "cpu.cfs_quota_us"), _read(level / "cpu.cfs_period_us"))
        if quota and period and quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _physical_cores(cpus: set[int], topology: pathlib.Path) -> int:
    """Distinct cores among logical CPUs: threads of one core share its vector units."""
    siblings = {_read(topology / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in cpus}
    return len(siblings)


def usable_cores(
    mount: pathlib.Path = _CGROUP_MOUNT,
    membership: pathlib.Path = _CGROUP_OF_PROCESS,
    topology: pathlib.Path = _CPU_TOPOLOGY,
) -> int:
    """Physical cores this process may compute on: its scheduling affinity, cut by a cgroup quota; at least 1."""
    cores = _physical_cores(os.sched_getaffinity(0), topology)
    quota = _cpu_quota(mount, membership)
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def _inactive_file_bytes(level: pathlib.Path, key: str) -> int:
    for line in (_read(level / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _cgroup_available_bytes(mount: pathlib.Path, membership: pathlib.Path) -> int | None:
    """Least memory left in any level; None without a limit. Cached file pages count as free: they can go."""
    left = []
    for level in _levels("memory", mount, membership):
        limit, used, cached = _read(level / "memory.max"), _read(level / "memory.current"), "inactive_file"
        if limit is None:
            limit, used = _read(level / "memory.limit_in_bytes"), _read(level / "memory.usage_in_bytes")
            cached = "total_inactive_file"
        if limit is None or used is None or limit == "max" or int(limit) >= _V1_UNLIMITED:
            continue
        left.append(max(0, int(limit) - int(used) + _inactive_file_bytes(level, cached)))
    return min(left, default=None)


def available_memory_bytes(mount: pathlib.Path = _CGROUP_MOUNT, membership: pathlib.Path = _CGROUP_OF_PROCESS) -> int:
    """Bytes this process can still take without swapping or being killed for its cgroup's limit."""
    machine = int(psutil.virtual_memory().available)
    limited = _cgroup_available_bytes(mount, membership)
    return machine if limited is None else min(machine, limited)


def lower_priority(niceness: int) -> None:
    """Adds to the niceness of the calling thread, where the system has one for threads (Linux)."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
