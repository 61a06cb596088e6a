"""Comparisons, logic, bits, clamping and selection on the device against the same on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.npu.launches import Case, Values, ids

_values = Values(2)
A = _values.normal(4, 6)
B = _values.normal(4, 6)
I = _values.integers(0, 64, 4, 6)  # noqa: E741 - integers
J = _values.integers(0, 64, 4, 6)
M = A > 0


def _named(name: str) -> tuple[Any, Any]:
    return getattr(torch, name), lambda x, y: getattr(x.clone(), name + "_")(y)


def _pairs() -> list[Case]:
    cases = []
    for name in ("gt", "ge", "lt", "le", "eq", "ne"):
        function, changed = _named(name)
        word = name.capitalize()
        cases += [
            Case(f"aclnn{word}Tensor", function, A.round(), B.round()),
            Case(f"aclnn{word}Scalar", function, A.round(), 1.0),
            Case(f"aclnnInplace{word}Tensor", changed, A.round(), B.round()),
            Case(f"aclnnInplace{word}Scalar", changed, A.round(), 1.0),
        ]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        function, changed = _named(name)
        word = "".join(part.capitalize() for part in name.split("_"))
        cases += [Case(f"aclnn{word}Tensor", function, I, J), Case(f"aclnn{word}Scalar", function, I, 5)]
        if word != "BitwiseOr":
            cases += [
                Case(f"aclnnInplace{word}Tensor", changed, I, J),
                Case(f"aclnnInplace{word}Scalar", changed, I, 5),
            ]
    for name in ("logical_and", "logical_or", "logical_xor"):
        function, changed = _named(name)
        word = "".join(part.capitalize() for part in name.split("_"))
        cases.append(Case(f"aclnn{word}", function, M, B > 0))
        if word != "LogicalXor":
            cases.append(Case(f"aclnnInplace{word}", changed, M, B > 0))
    return cases


def _with_mask(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[mask] = 2.0
    return x


CASES = [
    *_pairs(),
    Case("aclnnIsClose", torch.isclose, A, A + 1e-7),
    Case("aclnnEqual", torch.equal, A, A.clone()),
    Case("aclnnEqual", torch.equal, A, B),
    Case("aclnnClamp", lambda x: x.clamp(-0.5, 0.5), A),
    Case("aclnnClamp", lambda x: x.clamp(min=-0.5), A),
    Case("aclnnClampMin", lambda x: torch.clamp_min(x, -0.5), A),
    Case("aclnnClampMax", lambda x: torch.clamp_max(x, 0.5), A),
    Case("aclnnInplaceClampMax", lambda x: x.clone().clamp_max_(0.5), A),
    Case("aclnnClampTensor", lambda x, y: torch.clamp(x, -y, y), A, B.abs()),
    Case("aclnnClampTensor", lambda x, y: torch.clamp(x, min=y), A, B),
    Case("aclnnClampMinTensor", torch.clamp_min, A, B),
    Case("aclnnClampMaxTensor", torch.clamp_max, A, B),
    Case("aclnnInplaceClampMinTensor", lambda x, y: x.clone().clamp_min_(y), A, B),
    Case("aclnnInplaceClampMaxTensor", lambda x, y: x.clone().clamp_max_(y), A, B),
    Case("aclnnThreshold", lambda x: functional.threshold(x, 0.1, 9.0), A),
    Case("aclnnSWhere", torch.where, M, A, B),
    Case("aclnnSWhere", lambda m, x: torch.where(m, x, 0.0), M, A),
    Case("aclnnInplaceMaskedFillScalar", lambda x, m: x.masked_fill(m, -float("inf")), A, M),
    Case("aclnnInplaceMaskedFillScalar", lambda x, m: x.masked_fill(m, 1.0), A, M[0]),
    Case("aclnnInplaceMaskedFillTensor", torch.masked_fill, A, M, torch.tensor(3.0)),
    Case("aclnnInplaceMaskedScatter", torch.masked_scatter, A, M, B),
    Case("aclnnMaskedSelect", torch.masked_select, A, M),
    Case("aclnnNonzeroV2", lambda x, m: x[m], A, M),
    Case("aclnnInplaceMaskedFillScalar", _with_mask, A, M),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_device_agrees_with_the_cpu(case: Case) -> None:
    case.check()
