"""Big buffers in CPU memory that cost nothing until they are used."""

from __future__ import annotations

import contextlib
import mmap

import torch


def allocate_on_first_use(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 of zeros straight from the kernel: pages are taken when first written, huge ones if it can.

    Raises:
        OSError: the kernel promises no such amount.
    """
    memory = mmap.mmap(-1, max(1, num_bytes))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # kernels without huge pages answer EINVAL; the memory is as good, only slower to walk
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
