"""The host shim of Ascend C notices what would hang, race or read rubbish on the chip."""

from __future__ import annotations

import ctypes
import pathlib

import pytest

from tests.npu_kernels.conftest import compile_library

# kernel of violations.cpp → what the shim says of it
MESSAGES = {
    "correct": "",
    "neighbours_in_global_memory": "",
    "race": "core 1: DataCopy: core 1 touches global memory that core 0 wrote in the same launch",
    "second_alloc": "TQue.AllocTensor: all 1 buffers are in use: the core hangs",
    "dequeue_of_nothing": "TQue.DeQue: nothing was queued: the core hangs",
    "enqueue_of_a_stranger": "TQue.EnQue: the tensor is not one that this queue has allocated",
    "free_before_dequeue": "TQue.FreeTensor: the tensor is not one that this queue has dequeued",
    "budget": "TPipe.InitBuffer: the unified buffer is full: 768 bytes are taken, 196608 more wanted, 196352 there",
    "no_barrier": "Add: pipe V reads what pipe V may still be writing: PipeBarrier<PIPE_V> is due",
    "no_event_mte2_v": "Adds: pipe V reads what pipe MTE2 may still be writing: an event MTE2_V or a queue is due",
    "no_event_v_mte3": "DataCopy: pipe MTE3 reads what pipe V may still be writing: an event V_MTE3",
    "no_event_v_s": "LocalTensor.GetValue: pipe S reads what pipe V may still be writing: an event V_S",
    "no_event_s_v": "Adds: pipe V reads what pipe S may still be writing: an event S_V",
    "no_event_mte3_mte2": "DataCopy: pipe MTE2 reads what pipe MTE3 may still be writing: an event MTE3_MTE2",
    "overwritten_while_read": "DataCopy: pipe MTE2 overwrites what pipe V may still be reading: an event V_MTE2",
    "wait_without_set": "WaitFlag: event MTE2_V 0 was never set: the core hangs",
    "set_twice": "SetFlag: event MTE2_V 0 is set already and nobody waited for it",
    "set_and_left": "end of kernel: event V_MTE3 3 is set and nobody waited for it",
    "event_id": "SetFlag: event id 8 is not in [0, 8)",
    "unwritten": "Adds: reads a part of the unified buffer that nobody has written",
    "part_of_a_block": "DataCopy: 36 bytes are no whole 32-byte blocks: DataCopyPad copies parts",
    "unaligned": "Duplicate: the unified buffer's address is not a multiple of 32 bytes",
    "more_than_the_tensor": "Duplicate: more elements (72) than the tensor has (64)",
    "count_of_zero": "Duplicate: a count of 0",
    "partial_overlap": "Adds: destination and source overlap in part",
    "beyond_global_memory": "DataCopy: 256 bytes outside of the global memory that the kernel was given",
    "write_to_an_input": "DataCopy: this global memory is an input of the kernel",
    "narrowing_half": "Cast: this shim rounds to half and bfloat16 with CAST_NONE and CAST_RINT only",
    "integer_without_a_mode": "Cast: float to integer needs a rounding mode",
    "gather_outside": "Gather: an offset outside of the source",
    "too_many_repeats": "Add: 256 repeats, not 1 to 255",
    "too_many_lanes": "Add: a mask of 65 lanes",
    "stride_wraps_around": "BinaryRepeatParams: 256 does not fit into eight bits",
    "repeats_beyond_the_tensor": "Add: repeats reach beyond the tensor of 64 elements",
    "repeats_on_one_place": "Add: the destination's stride is 0: it would be written several times",
    "accumulate_onto_nothing": "MulAddDst: reads a part of the unified buffer that nobody has written",
    "reduction_of_the_unwritten": "WholeReduceSum: reads a part of the unified buffer that nobody has written",
    "broadcast_onto_itself": "Brcb: destination and source are the same",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What the shim says of each kernel."""
    library = compile_library(pathlib.Path(__file__).with_name("violations.cpp"))
    library.name_of_case.restype = library.message_of.restype = ctypes.c_char_p
    messages: dict[str, str] = {}
    while (name := library.name_of_case(len(messages))) is not None:
        messages[name.decode()] = library.message_of(len(messages)).decode()
    return messages


def test_every_kernel_is_expected(said: dict[str, str]) -> None:
    assert said.keys() == MESSAGES.keys()


@pytest.mark.parametrize("name", MESSAGES)
def test_violation(said: dict[str, str], name: str) -> None:
    if MESSAGES[name]:
        assert MESSAGES[name] in said[name]
    else:
        assert said[name] == ""
