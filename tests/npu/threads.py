"""Facts about another process's threads."""

from __future__ import annotations

import os
import pathlib

# torch_npu's name of the thread that launches operators
_LAUNCHER = "acl_thread"


def cores_of_launches(pid: int) -> list[int]:
    """The cores that the thread which launches a process's operators may run on."""
    threads = pathlib.Path(f"/proc/{pid}/task").iterdir()
    (launcher,) = [path for path in threads if (path / "comm").read_text().strip() == _LAUNCHER]
    return sorted(os.sched_getaffinity(int(launcher.name)))
