"""What the start of a process leaves behind."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# many small blocks behind others that stay in use, so that malloc keeps their memory, and a cycle of garbage
_PROGRAM = """
import gc, weakref, psutil
from ascend_vllm.process_memory import settle

class Node:
    pass

gc.disable()
node = Node()
node.itself, alive = node, weakref.ref(node)
del node
blocks = [bytes(2000) for _ in range(50_000)]
kept = blocks[::50]
full = psutil.Process().memory_info().rss
del blocks
freed = psutil.Process().memory_info().rss
settle()
settled = psutil.Process().memory_info().rss
assert alive() is None
assert gc.get_freeze_count() > 1000
assert full - settled > 60e6, (full, freed, settled)
assert len(kept) == 1000
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc of another C library")
def test_memory_that_the_start_has_freed_goes_back_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True, timeout=60)
