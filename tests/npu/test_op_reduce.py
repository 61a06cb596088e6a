"""Reductions, running sums, softmax and ordering on the device against the same on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.npu.launches import Case, Values, ids

_values = Values(3)
A = _values.normal(4, 6)
BRAIN = _values.normal(4, 64, dtype=torch.bfloat16)
J = _values.integers(1, 5, 4, 6)
M = A > 0


def _over(name: str, **options: Any) -> Any:
    return lambda x: getattr(torch, name)(x, **options)


def _reductions() -> list[Case]:
    cases = []
    for name, operator in (("sum", "ReduceSum"), ("mean", "Mean"), ("amax", "Amax"), ("amin", "Amin")):
        ways: tuple[dict[str, Any], ...] = ({}, {"dim": 1}, {"dim": (0, 1), "keepdim": True})
        cases += [Case("aclnn" + operator, _over(name, **options), A) for options in ways]
    for name, whole, along in (
        ("max", "Max", "MaxDim"),
        ("min", "Min", "MinDim"),
        ("argmax", "ArgMax", "ArgMax"),
        ("argmin", "ArgMin", "ArgMin"),
        ("prod", "Prod", "ProdDim"),
    ):
        cases += [Case("aclnn" + whole, _over(name), A), Case("aclnn" + along, _over(name, dim=1), A)]
    for name in ("any", "all"):
        operator = "aclnn" + name.capitalize()
        cases += [Case(operator, _over(name), M), Case(operator, _over(name, dim=1, keepdim=True), M)]
    for name, operator in (
        ("cumsum", "Cumsum"),
        ("cumprod", "Cumprod"),
        ("cummax", "Cummax"),
        ("cummin", "Cummin"),
        ("logsumexp", "LogSumExp"),
        ("softmax", "Softmax"),
        ("log_softmax", "LogSoftmax"),
        ("std", "Std"),
        ("var", "VarCorrection"),
        ("var_mean", "VarMean"),
        ("median", "MedianDim"),
    ):
        cases += [Case("aclnn" + operator, _over(name, dim=dim), A) for dim in (0, 1)]
    return cases


CASES = [
    *_reductions(),
    Case("aclnnLinalgVectorNorm", lambda x: torch.linalg.vector_norm(x, 2, dim=1), A),
    Case("aclnnLinalgVectorNorm", lambda x: torch.linalg.vector_norm(x, 1, dim=(0, 1), keepdim=True), A),
    Case("aclnnReduceSum", lambda x: x.sum(1), M),
    Case("aclnnReduceSum", lambda x: x.sum(1), J.int()),
    Case("aclnnReduceSum", lambda x: x.sum(-1), BRAIN),
    Case("aclnnSoftmax", lambda x: torch.softmax(x, -1, dtype=torch.float32), BRAIN),
    Case("aclnnCumsum", lambda x: x.cumsum(0), J.int()),
    Case("aclnnSort", lambda x: torch.sort(x, dim=1, descending=True), A),
    Case("aclnnSort", lambda x: torch.sort(x, stable=True), J),
    Case("aclnnSort", torch.argsort, A),
    Case("aclnnTopk", lambda x: torch.topk(x, 3), A),
    Case("aclnnTopk", lambda x: torch.topk(x, 2, dim=0, largest=False), A),
    Case("aclnnKthvalue", lambda x: torch.kthvalue(x, 2), A),
    Case("aclnnLayerNorm", lambda x: functional.layer_norm(x, (6,), x[0], x[1]), A),
    Case("aclnnBincount", lambda x: torch.bincount(x, minlength=9), J.flatten()),
    Case("aclnnBincount", torch.bincount, J.flatten(), A.abs().flatten()),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_device_agrees_with_the_cpu(case: Case) -> None:
    case.check()
