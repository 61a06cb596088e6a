"""The inputs of decoding steps, gathered from the slots by one native call.

What `worker.input_batch` computes for any step by two dozen operations of numpy. Between two steps of one row these
take longer than the sampler: their code is no longer in the processor's cache, and where they release the GIL, the
thread that handles the last step's outputs takes it.

Letters: M slots, L maximum tokens of a sequence, B maximum blocks of a sequence, R rows of a step.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from ascend_vllm.ops.native import LIBRARY_PATH, load_native_library

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class _Arguments(ctypes.Structure):
    """The struct of csrc_ascend/cpu/bind/decode_inputs.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("row_tokens", "row_blocks", "block_size")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "block_table", "num_blocks", "computed", "known")),
        *((name, ctypes.c_void_p) for name in ("slots", "input_ids", "positions", "slot_mapping", "seq_lens")),
        ("row_table", ctypes.c_void_p),
    )


class DecodeInputs:
    """Gathers the inputs of rows that compute one token each, the last one that they have. Needs the library.

    Args:
        token_ids: [M, L+1] int32, of all slots, as all that follow; they must stay where they are.
        block_table: [M, B] int32.
        num_blocks: [M] int64.
        computed: [M] int64, tokens whose KV is cached.
        known: [M] int64, all tokens.
        block_size: tokens of a block.

    Attributes:
        input_ids, positions, slot_mapping: [M] int64, the first R are written by `gather`.
        seq_lens: [M] int32, likewise.
        block_table: [M, B] int32, likewise; entries behind a row's blocks are those of earlier steps.
    """

    def __init__(
        self,
        token_ids: Int32Array,
        block_table: Int32Array,
        num_blocks: Int64Array,
        computed: Int64Array,
        known: Int64Array,
        block_size: int,
    ) -> None:
        # releases no GIL, unlike CDLL
        self._call: Any = ctypes.PyDLL(str(LIBRARY_PATH)).ascend_vllm_decode_inputs
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._call.restype = ctypes.c_int64
        num_slots = len(token_ids)
        self._slots, self.input_ids, self.positions, self.slot_mapping = np.zeros((4, num_slots), np.int64)
        self.seq_lens = np.zeros(num_slots, np.int32)
        self.block_table = np.zeros_like(block_table)
        columns = (token_ids, block_table, num_blocks, computed, known)
        results = (self.input_ids, self.positions, self.slot_mapping, self.seq_lens, self.block_table)
        # kept, since addresses do not keep arrays alive
        self._arrays: list[npt.NDArray[Any]] = [*columns, self._slots, *results]
        sizes = (token_ids.shape[1], block_table.shape[1], block_size)
        self._arguments = _Arguments(*sizes, *(array.ctypes.data for array in self._arrays))
        self._address = ctypes.addressof(self._arguments)

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library exists."""
        return load_native_library()

    def gather(self, slots: Int64Array) -> int:
        """Writes the inputs of a step.

        Args:
            slots: [R], each at most once.

        Returns:
            Length of the longest row; 0 if a row misses more or less than one token, or has no block for it.
        """
        self._slots[: len(slots)] = slots
        longest: int = self._call(self._address, len(slots))
        return longest
