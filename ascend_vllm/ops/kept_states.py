"""Keeping hidden states for EAGLE heads by one native call; it happens in every step without drafts.

Letters: M slots, R rows of a step, W states that are kept of a slot, F their width.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.ops.native import LIBRARY_PATH, load_native_library

Int64Array = npt.NDArray[np.int64]


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


class _Arguments(ctypes.Structure):
    """The struct of csrc_ascend/cpu/bind/kept_states.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("slots", "kept", "counts", "positions")),
        *((name, ctypes.c_int64) for name in ("bytes", "keeping", "most", "lapsed")),
    )


class StateKeeper:
    """Copies hidden states of rows behind those that are kept of their slots.

    Where there is no room, the slot's entry of `positions` becomes `lapsed`; slots with this entry keep nothing.

    Args:
        kept: [M'*W, F], of the first M' slots; written, as all that follow, which must stay where they are.
        counts: [M] states that are kept.
        positions: [M].
        most: W.
        lapsed: see above.
    """

    def __init__(self, kept: torch.Tensor, counts: Int64Array, positions: Int64Array, most: int, lapsed: int) -> None:
        self._keep: Any = None
        # of contiguous tensors in host memory; it needs the library
        if kept.is_cpu and kept.is_contiguous() and load_native_library():
            # releases no GIL, unlike CDLL
            self._keep = ctypes.PyDLL(str(LIBRARY_PATH)).ascend_vllm_keep_states
            self._keep.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
            self._keep.restype = None
        self._dtype, self._width = kept.dtype, kept.shape[1]
        self._slots = np.zeros_like(counts)
        # kept, since addresses do not keep arrays alive
        self._memory = (kept, counts, positions)
        addresses = (self._slots.ctypes.data, kept.data_ptr(), counts.ctypes.data, positions.ctypes.data)
        sizes = (kept.shape[1] * kept.element_size(), kept.shape[0] // most, most, lapsed)
        self._arguments = _Arguments(*addresses, *sizes)
        self._address = ctypes.addressof(self._arguments)

    def keep(self, slots: Int64Array, states: torch.Tensor) -> bool:
        """Keeps one state of each row.

        Args:
            slots: [R], each at most once.
            states: [R, F].

        Returns:
            Whether it was done: `states` must be like `kept`, and contiguous.
        """
        is_like = states.is_cpu and states.is_contiguous() and states.dtype == self._dtype
        if self._keep is None or not is_like or states.shape[1] != self._width:
            return False
        self._slots[: len(slots)] = slots
        self._keep(self._address, len(slots), states.data_ptr())
        return True
