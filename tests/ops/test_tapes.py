"""Recorded kernel calls: a replay computes what the ops would compute from the current contents of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_vllm.ops import native, registry
from ascend_vllm.ops.elementwise import rms_norm, silu_and_mul
from ascend_vllm.ops.embedding import gather_rows
from ascend_vllm.ops.gemm import PackedLinear
from ascend_vllm.ops.tape import Tapes, UnrecordableError
from tests.op_checks import is_unchanged
from tests.toy_quantization import toy_restore, toy_round

native.import_op_modules()


def _with_memory_of_its_own(arguments: tuple[Any, ...]) -> list[Any]:
    return [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments]


@pytest.mark.parametrize("name", [name for name, spec in registry.OPS.items() if spec.recordable])
def test_a_replay_reads_anew(name: str) -> None:
    """Recorded with all floats zero, replayed with those of the case."""
    spec = registry.OPS[name]
    kernel = getattr(torch.ops.ascend_vllm, name).default
    mutated = [list(spec.reference.__annotations__).index(argument) for argument in spec.mutates]
    tapes = Tapes()
    for key, arguments in enumerate(spec.inputs(torch.bfloat16)):
        given = _with_memory_of_its_own(arguments)
        floats = [value for value in given if isinstance(value, torch.Tensor) and value.is_floating_point()]
        values = [value.clone() for value in floats]
        for value in floats:
            value.zero_()
        try:
            recorded = tapes.record(key, lambda given=given: kernel(*given))  # type: ignore[misc]
        except RuntimeError as error:
            assert name == "rms_norm" and "rows that are copied" in str(error)
            continue
        assert tapes.length(key) == 1
        for value, contents in zip(floats, values, strict=True):
            value.copy_(contents)
        tapes.replay(key)
        wanted = _with_memory_of_its_own(arguments)
        returned = kernel(*wanted)
        if returned is not None:
            torch.testing.assert_close(recorded, returned, rtol=0, atol=0)
        for index in mutated:
            # optional arguments may be missing
            if index < len(given) and given[index] is not None:
                assert is_unchanged(given[index], wanted[index])


def test_calls_are_replayed_in_order_and_share_memory() -> None:
    layer = PackedLinear.of(torch.randn(64, 32))
    x = torch.zeros(3, 32)
    ones = torch.ones(32)
    tapes = Tapes()

    def compute() -> torch.Tensor:
        y = x
        for _ in range(4):
            y = silu_and_mul(layer(rms_norm(y, ones, 1e-6), None))
        return y

    first = tapes.record(1, compute)
    assert tapes.length(1) == 12
    x.copy_(torch.randn(3, 32))
    tapes.replay(1)
    assert torch.equal(first, compute())
    # a second one reuses free memory of the first, but not what is still in use
    kept = first.clone()
    second = tapes.record(2, compute)
    assert second.data_ptr() != first.data_ptr()
    assert torch.equal(second, kept)
    assert torch.equal(first, kept)


def test_references_are_called_between_kernels() -> None:
    x, ones = torch.zeros(3, 32), torch.ones(32)
    tapes = Tapes()

    def compute() -> torch.Tensor:
        y = x
        for _ in range(3):
            y = rms_norm(toy_restore(*toy_round(rms_norm(y, ones, 1e-6)), torch.float32), ones, 1e-6)
        return y

    result = tapes.record(1, compute)
    other = tapes.record(2, compute)
    assert tapes.length(1) == 12
    x.copy_(torch.randn(3, 32))
    for key, recorded in ((1, result), (2, other), (1, result)):
        tapes.replay(key)
        assert torch.equal(recorded, compute())
        x.mul_(-0.5)


def test_what_is_no_kernel_is_refused() -> None:
    tapes = Tapes()
    x = torch.randn(2, 8)
    with pytest.raises(UnrecordableError, match=r"aten\.sin\.default is no kernel that can be recorded"):
        tapes.record(0, lambda: toy_restore(*toy_round(silu_and_mul(x)), torch.float32).sin())
    assert tapes.length(0) == 0
    # rows that need a copy
    wide, ones = torch.randn(3, 4, 5, 8).transpose(0, 2), torch.ones(8)
    with pytest.raises(RuntimeError, match="a norm of rows that are copied cannot be recorded"):
        tapes.record(0, lambda: rms_norm(wide, ones, 1e-6))
    # views launch nothing
    assert tapes.record(0, lambda: silu_and_mul(x.view(2, 8)[:1])).shape == (1, 4)
    assert torch.equal(silu_and_mul(x) + 1, silu_and_mul(x) + 1), "nothing is recorded any more"


def test_a_replay_checks_what_it_reads() -> None:
    table, indices = torch.randn(5, 4), torch.tensor([4, 0])
    tapes = Tapes()
    rows = tapes.record(7, lambda: gather_rows(table, indices))
    indices[0] = 5
    with pytest.raises(RuntimeError, match="indices holds 5, the table has 5 rows"):
        tapes.replay(7)
    indices[0] = 1
    tapes.replay(7)
    assert torch.equal(rows, table[[1, 0]])
    with pytest.raises(RuntimeError):
        tapes.replay(8)


def test_memory_has_room_for_recordings_of_more_rows() -> None:
    """Steps of one row more each would otherwise leave a block of each size."""
    tapes, x = Tapes(), torch.randn(8, 64)
    places = set()
    for rows in (1, 3, 8):
        result = tapes.record(rows, lambda rows=rows: silu_and_mul(x[:rows]), growth=-(-8 // rows))  # type: ignore[misc]
        torch.testing.assert_close(result, silu_and_mul(x[:rows]))
        places.add(result.data_ptr())
        del result
    assert len(places) == 1
    # what somebody has is not given away
    kept = tapes.record(9, lambda: silu_and_mul(x))
    other = tapes.record(10, lambda: silu_and_mul(x))
    assert kept.data_ptr() != other.data_ptr()
