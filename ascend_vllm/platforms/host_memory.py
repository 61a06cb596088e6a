"""Big buffers in CPU memory that cost nothing until they are used."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_HUGE_PAGE_BYTES = 2 << 20


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # kernels without huge pages answer EINVAL; the memory is as good, only slower to walk
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def allocate_on_first_use(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 of zeros straight from the kernel: pages are taken when first written, huge ones if it can.

    Raises:
        OSError: the kernel promises no such amount.
    """
    memory = mmap.mmap(-1, max(1, num_bytes))
    _ask_for_huge_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def weight_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros for a weight: in huge pages where the system has them, since decoding reads all of it every step.

    The system has the memory of a large one back as soon as the tensor is gone; malloc may keep what it gave.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _HUGE_PAGE_BYTES:
        return torch.zeros(*shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _ask_for_huge_pages(pages)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)  # keeps the mapping alive
