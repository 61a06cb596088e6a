"""Gathering, scattering, joining, repeating and filling on the device against the same on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.npu.launches import Case, Values, costs_of, ids

pytestmark = [
    # torch_npu adds through the deprecated form
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
    # torch_npu's own, once a process
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
]

_values = Values(4)
A = _values.normal(4, 6)
B = _values.normal(4, 6)
J = _values.integers(1, 5, 4, 6)
ROWS = torch.tensor([2, 0, 1])
PLACES = torch.tensor([[0, 2, 1]] * 4)
COUNTS = torch.tensor([1, 0, 2, 3])
M = A > 0


def _set(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x = x.clone()
    x[index] = value
    return x


CASES = [
    Case("aclnnIndex", lambda x, i: x[i], A, ROWS),
    Case("aclnnIndex", lambda x, i: x[:, i], A, ROWS),
    Case("aclnnIndex", lambda x, i: x[i, i], A, ROWS.int()),
    Case("aclnnIndex", lambda x, i: x[i - 3], A, ROWS),
    Case("aclnnIndexPutImpl", _set, A, ROWS, B[:3]),
    Case("aclnnIndexPutImpl", lambda x, i, v: x.clone().index_put_((i,), v, accumulate=True), A, ROWS, B[:3]),
    Case("aclnnIndexSelect", lambda x, i: x.index_select(0, i), A, ROWS),
    Case("aclnnIndexSelect", lambda x, i: x.index_select(1, i), A, ROWS.int()),
    Case("aclnnEmbedding", lambda w, i: functional.embedding(i, w), A, ROWS),
    Case("aclnnGather", lambda x, i: x.gather(1, i), A, J),
    Case("aclnnTake", torch.take, A, J),
    Case("aclnnScatter", lambda x, i, s: x.scatter(1, i, s), A, PLACES, B[:, :3].contiguous()),
    Case("aclnnInplaceScatter", lambda x, i, s: x.clone().scatter_(1, i, s), A, PLACES, B[:, :3].contiguous()),
    Case("aclnnScatterValue", lambda x, i: x.scatter(1, i, 2.0), A, J),
    Case("aclnnInplaceScatterValue", lambda x, i: x.clone().scatter_(1, i, 2.0), A, J),
    Case("aclnnScatterAdd", lambda x, i, s: x.scatter_add(1, i, s), A, J, B),
    Case("aclnnScatterAdd", lambda x, i, s: x.clone().scatter_add_(1, i, s), A, J, B),
    Case("aclnnIndexAdd", lambda x, i, s: x.index_add(0, i, s), A, ROWS, B[:3]),
    Case("aclnnIndexAdd", lambda x, i, s: x.clone().index_add_(0, i, s, alpha=2), A, ROWS, B[:3]),
    Case("aclnnIndexCopy", lambda x, i, s: x.index_copy(0, i, s), A, ROWS, B[:3]),
    Case("aclnnInplaceIndexCopy", lambda x, i, s: x.clone().index_copy_(0, i, s), A, ROWS, B[:3]),
    Case("aclnnIndexFillTensor", lambda x, i: x.index_fill(0, i, 7.0), A, ROWS),
    Case("aclnnInplaceIndexFillTensor", lambda x, i: x.clone().index_fill_(0, i, 7.0), A, ROWS),
    Case("aclnnOneHot", lambda i: functional.one_hot(i, 8), J),
    Case("aclnnNonzero", torch.nonzero, M),
    Case("aclnnUnique2", lambda x: torch.unique(x, return_inverse=True, return_counts=True), J),
    Case("aclnnIsInTensorScalar", lambda x: torch.isin(x, 3), J),
    Case("aclnnIsInScalarTensor", lambda x: torch.isin(3, x), J),
    Case("aclnnSearchSorted", torch.searchsorted, A.sort(1)[0], B),
    Case("aclnnCat", lambda x, y: torch.cat([x, y], 1), A, B),
    Case("aclnnStack", lambda x, y: torch.stack([x, y], 1), A, B),
    Case("aclnnRepeat", lambda x: x.repeat(2, 3), A),
    Case("aclnnRepeatInterleaveInt", lambda x: x.repeat_interleave(3), A),
    Case("aclnnRepeatInterleaveIntWithDim", lambda x: x.repeat_interleave(3, 1), A),
    Case("aclnnRepeatInterleaveWithDim", lambda x, r: x.repeat_interleave(r, 0), A, COUNTS),
    Case("aclnnRepeatInterleave", lambda x, r: x.repeat_interleave(r), A[:, 0].contiguous(), COUNTS),
    Case("aclnnRepeatInterleaveTensor", torch.repeat_interleave, COUNTS),
    Case("aclnnFlip", lambda x: x.flip(0, 1), A),
    Case("aclnnRoll", lambda x: x.roll((1, 2), (0, 1)), A),
    Case("aclnnRoll", lambda x: x.roll(3), A),
    Case("aclnnTriu", lambda x: x.triu(1), A),
    Case("aclnnTril", lambda x: x.tril(-1), A),
    Case("aclnnInplaceTriu", lambda x: x.clone().triu_(), A),
    Case("aclnnInplaceTril", lambda x: x.clone().tril_(), A),
    Case("aclnnConstantPadNd", lambda x: functional.pad(x, (1, 2), value=3.0), A),
    Case("aclnnInplaceFillScalar", lambda x: x.clone().fill_(3.0), A),
    Case("aclnnInplaceFillTensor", lambda x, v: x.clone().fill_(v), A, torch.tensor(2.0)),
    Case("aclnnInplaceZero", lambda x: x.clone().zero_(), A),
    Case("aclnnInplaceOne", lambda x: torch.ones(3, 2, dtype=x.dtype, device=x.device), A),
    Case("aclnnInplaceFillDiagonal", lambda x: x.clone().fill_diagonal_(2.0), A),
    Case("aclnnEye", lambda x: torch.eye(3, 4, dtype=x.dtype, device=x.device), A),
    Case("aclnnArange", lambda x: torch.arange(3, 17, 2, device=x.device), A),
    Case("aclnnArange", lambda x: torch.arange(0.0, 5.0, dtype=x.dtype, device=x.device), A),
    Case("aclnnLinspace", lambda x: torch.linspace(0, 1, 5, dtype=x.dtype, device=x.device), A),
    Case("aclnnRange", lambda x: torch.arange(0, 4, device=x.device) if x.device.type == "cpu" else _range(x), A),
]


def _range(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(4, dtype=torch.int64, device=x.device)
    return torch.ops.aten.range.out(0, 3, 1, out=out)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_device_agrees_with_the_cpu(case: Case) -> None:
    case.check()


@pytest.mark.parametrize(("dim", "moves", "workspace"), [(0, 1, 0), (1, 3, 2)])
def test_index_copies_along_other_dimensions_cost_the_whole_tensor(dim: int, moves: int, workspace: int) -> None:
    target, source, index = A.npu(), A.narrow(dim, 0, 1).npu(), torch.tensor([1]).npu()
    _, costs = costs_of(lambda: target.index_copy_(dim, index, source))
    whole, placed = moves * target.nbytes if dim else 0, source.nbytes
    cost = costs["aclnnInplaceIndexCopy"]
    assert (cost.launches, cost.runs, cost.written) == (1, 1, whole + placed)
    assert cost.read == cost.written + (0 if dim else index.nbytes)
    assert cost.workspace == workspace * target.nbytes


def test_operators_that_pick_rows_read_those() -> None:
    table, index = A.npu(), torch.tensor([2, 0]).npu()
    row = A[0].nbytes
    for operator, pick in (
        ("aclnnIndexSelect", lambda: table.index_select(0, index)),
        ("aclnnEmbedding", lambda: functional.embedding(index, table)),
        ("aclnnIndex", lambda: table[index]),
    ):
        cost = costs_of(pick)[1][operator]
        assert (cost.read, cost.written) == (index.nbytes + 2 * row, 2 * row), operator


def test_what_is_computed_in_place_is_read_and_written() -> None:
    x, y = A.npu(), A.npu()
    cost = costs_of(lambda: x.mul_(y))[1]["aclnnInplaceMul"]
    assert (cost.read, cost.written) == (2 * A.nbytes, A.nbytes)
    assert costs_of(x.zero_)[1]["aclnnInplaceZero"][2:4] == (0, A.nbytes)
