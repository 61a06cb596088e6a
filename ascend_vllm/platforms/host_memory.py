"""Large buffers in CPU memory whose pages are allocated when they are first written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from ascend_vllm.platforms.weight_reserve import ask_for_huge_pages, take_reserved

# below this a mapping of its own wastes too much of its last page
_LEAST_MAPPED_BYTES = 64 << 10
_CPU = torch.device("cpu")


def allocate_on_first_use(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 of zeros, in pages that are allocated when first written, huge ones if possible.

    Raises:
        OSError: there is not so much memory.
    """
    # private: the kernel has a setting of its own for huge pages of shared memory, which is off by default
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(memory)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


def weight_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> torch.Tensor:
    """Memory for a weight. On CPU it is in huge pages if possible, since decoding reads all of it in every step.

    CPU memory of all but small weights is taken from the reserve in use (`weight_reserve.py`), or allocated when it
    is first written, and returned to the system as soon as the tensor is freed, which malloc may not do.

    Returns:
        Zeros on CPU; uninitialised on other devices.
    """
    if device.type != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_MAPPED_BYTES:
        return torch.zeros(*shape, dtype=dtype)
    if (piece := take_reserved(num_bytes)) is not None:
        return torch.frombuffer(piece, dtype=dtype).view(*shape)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(pages)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)  # keeps the mapping alive
