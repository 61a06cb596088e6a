"""Keeping hidden states for EAGLE heads by one native call; it happens in every step without drafts.

Letters: M slots, R rows of a step, W states that are kept of a slot, F their width.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.ops.native import LIBRARY_PATH, load_native_library

Int64Array = npt.NDArray[np.int64]


@functools.cache
def _native() -> Any:
    # releases no GIL, unlike CDLL
    call = ctypes.PyDLL(str(LIBRARY_PATH)).ascend_vllm_keep_states
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    call.argtypes = [pointer, number, pointer, number, pointer, pointer, pointer, number, number, number]
    call.restype = None
    return call


def copy_states(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies states [R, F] to the first rows of a tensor [R', F].

    In host memory without torch's copy, which releases the GIL and then waits until other threads give it back.
    """
    is_plain = target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous()
    fits = len(source) <= len(target) and source.shape[1] == target.shape[1]
    if is_plain and fits and target.device.type == source.device.type == "cpu":
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target[: len(source)] = source


def keep_states(
    slots: Int64Array,
    states: torch.Tensor,
    kept: torch.Tensor,
    counts: Int64Array,
    positions: Int64Array,
    most: int,
    lapsed: int,
) -> bool:
    """Copies one state of each row behind those that are kept of its slot.

    Where there is no room, the slot's entry of `positions` becomes `lapsed`; slots with this entry keep nothing.

    Args:
        slots: [R], each at most once.
        states: [R, F].
        kept: [M'*W, F] of the same dtype, of the first M' slots; written.
        counts: [M] states that are kept; written.
        positions: [M]; written.
        most: W.
        lapsed: see above.

    Returns:
        Whether it was done: it needs the library, and contiguous tensors in host memory.
    """
    is_plain = states.is_contiguous() and states.device.type == "cpu" and slots.flags.c_contiguous
    if not is_plain or not load_native_library():
        return False
    num_bytes = states.shape[1] * states.element_size()
    pointers = (kept.data_ptr(), counts.ctypes.data, positions.ctypes.data)
    sizes = (kept.shape[0] // most, most, lapsed)
    _native()(slots.ctypes.data, len(slots), states.data_ptr(), num_bytes, *pointers, *sizes)
    return True
