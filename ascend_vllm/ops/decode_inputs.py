"""The inputs of decoding steps, gathered from the slots by one native call, and sampled tokens and accepted drafts.

What `worker.input_batch` computes for any step by two dozen operations of numpy. Between two steps of one row these
take longer than the sampler: their code is no longer in the processor's cache, and where they release the GIL, the
thread that handles the last step's outputs takes it.

Letters: M slots, L maximum tokens of a sequence, B maximum blocks of a sequence, R rows of a step, T tokens of them,
C most tokens of a row.
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
        *((name, ctypes.c_void_p) for name in ("slots", "starts", "counts", "sampled", "input_ids", "positions")),
        *((name, ctypes.c_void_p) for name in ("slot_mapping", "num_tokens", "last_tokens", "query_start")),
        *((name, ctypes.c_void_p) for name in ("seq_lens", "row_table")),
    )


class DecodeInputs:
    """Gathers the inputs of rows that compute one token each, the last one that they have, or a few of their tokens.

    It needs the library.

    Args:
        token_ids: [M, L+1] int32, of all slots, as all that follow; they must stay where they are.
        block_table: [M, B] int32.
        num_blocks: [M] int64.
        computed: [M] int64, tokens whose KV is cached.
        known: [M] int64, all tokens.
        block_size: tokens of a block.
        most_tokens: C.

    Attributes:
        input_ids, positions, slot_mapping: [M*C] int64, the first T are written.
        num_tokens: [M] int64, the first R are written by `gather`: the tokens of each row.
        last_tokens: [M] int64, the first R are written by `gather_several`: the last token of each row among these.
        query_start: [M+1] int32, likewise: where rows begin.
        seq_lens: [M] int32, the first R are written.
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
        most_tokens: int = 1,
    ) -> None:
        # releases no GIL, unlike CDLL
        library = ctypes.PyDLL(str(LIBRARY_PATH))
        self._call: Any = library.ascend_vllm_decode_inputs
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._call_several: Any = library.ascend_vllm_several_inputs
        self._call_several.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._call.restype = self._call_several.restype = ctypes.c_int64
        self._append: Any = library.ascend_vllm_append
        self._append.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self._append.restype = None
        self._accept: Any = library.ascend_vllm_accept
        self._accept.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 4]
        self._accept.restype = None
        num_slots = len(token_ids)
        self._slots, self._starts, self._counts = np.zeros((3, num_slots), np.int64)
        self.num_tokens, self.last_tokens = np.zeros((2, num_slots), np.int64)
        by_token = np.zeros((4, num_slots * most_tokens), np.int64)
        self._sampled, self.input_ids, self.positions, self.slot_mapping = by_token
        self.query_start = np.zeros(num_slots + 1, np.int32)
        self.seq_lens = np.zeros(num_slots, np.int32)
        self.block_table = np.zeros_like(block_table)
        columns = (token_ids, block_table, num_blocks, computed, known)
        asked = (self._slots, self._starts, self._counts)
        by_row = (self.num_tokens, self.last_tokens, self.query_start, self.seq_lens, self.block_table)
        # kept, since addresses do not keep arrays alive
        self._arrays: list[npt.NDArray[Any]] = [*columns, *asked, *by_token, *by_row]
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
            Length of the longest row; 0 if a row misses more or less than one token, or has no block for it, or no
            room for another one.
        """
        self._slots[: len(slots)] = slots
        longest: int = self._call(self._address, len(slots))
        return longest

    def gather_several(self, slots: Int64Array, starts: Int64Array, counts: Int64Array, shift: int = 0) -> int:
        """Writes the inputs of a step in which rows compute some of their tokens.

        Args:
            slots: [R], each at most once.
            starts: [R] first position of each.
            counts: [R] number of positions, 1 or more; M*C together at most.
            shift: the token of position p is p + shift of its row.

        Returns:
            Length of the longest row; 0 if a row has no blocks or no room for them.
        """
        num_rows = len(slots)
        self._slots[:num_rows], self._starts[:num_rows], self._counts[:num_rows] = slots, starts, counts
        longest: int = self._call_several(self._address, num_rows, shift)
        return longest

    def append(self, num_rows: int, sampled: int) -> None:
        """Adds a token to each row of the last `gather`, and counts the one that has been computed.

        Args:
            num_rows: R.
            sampled: address of the tokens, [R] int64.
        """
        self._append(self._address, num_rows, sampled)

    def accept(
        self, slots: Int64Array, num_places: Int64Array, sampled: Int64Array, rejected: int, padding: int
    ) -> Int64Array:
        """Adds what rows sampled to their tokens, up to the first one that differs from the draft in its place.

        `known` and `computed` follow; negative ids become 0 in the row.

        Args:
            slots: [R], whose last tokens and drafts have been computed.
            num_places: [R] number of positions at which each sampled, at most C.
            sampled: [T], in order of position.
            rejected: stands in the result for what was sampled behind that one.
            padding: stands in the result where a row has no position.

        Returns:
            [R, N] sampled ids, N the most positions of a row.
        """
        num_rows, width = len(slots), int(num_places.max())
        self._slots[:num_rows], self._counts[:num_rows], self._sampled[: len(sampled)] = slots, num_places, sampled
        self._accept(self._address, num_rows, width, rejected, padding)
        return self._sampled[: num_rows * width].reshape(num_rows, width).copy()
