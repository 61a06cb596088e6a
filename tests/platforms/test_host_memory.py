"""Large buffers in CPU memory."""

from __future__ import annotations

import pathlib
import re

import pytest

from ascend_vllm.platforms.host_memory import allocate_on_first_use

_SETTING = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _flags_of(address: int) -> list[str]:
    """The flags of the mapping that an address is in, see proc_pid_smaps(5)."""
    is_inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(bound, 16) for bound in mapping.groups())
            is_inside = first <= address < end
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has address {address:#x}")


@pytest.mark.skipif(not _SETTING.exists(), reason="this kernel has no huge pages that programs can ask for")
def test_a_buffer_asks_for_huge_pages_of_private_memory() -> None:
    buffer = allocate_on_first_use(8 << 20)
    flags = _flags_of(buffer.data_ptr())
    assert "hg" in flags
    assert "sh" not in flags
