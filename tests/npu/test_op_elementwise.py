"""Arithmetic, activations and conversions on the device against the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch.nn import functional

from tests.npu.launches import Case, Values, ids

# torch_npu's own, of some operators
pytestmark = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")

_values = Values(1)
A = _values.normal(4, 6)
HALF = _values.normal(4, 6, dtype=torch.float16)
BRAIN = _values.normal(4, 6, dtype=torch.bfloat16)
TURNED = _values.normal(6, 4).t()
P = _values.positive(4, 6)
Q = _values.positive(4, 6)
I = _values.integers(-20, 20, 4, 6)  # noqa: E741 - integers
J = _values.integers(1, 5, 4, 6)

_BOTH = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan atan tanh erf sigmoid ceil floor frac relu"
)
_ONLY = "round trunc abs neg sign signbit isfinite isposinf isneginf silu gelu hardsigmoid hardswish bitwise_not"


def _operator(name: str) -> str:
    special = {"isfinite": "IsFinite", "isposinf": "IsPosInf", "isneginf": "IsNegInf"}
    return "aclnn" + special.get(name, "".join(word.capitalize() for word in name.split("_")))


def _function(name: str) -> Callable[..., torch.Tensor]:
    found: Callable[..., torch.Tensor] = getattr(torch, name, None) or getattr(functional, name)
    return found


def _changed(name: str) -> Callable[..., torch.Tensor]:
    return lambda x, *rest: getattr(x.clone(), name + "_")(*rest)


def _unary() -> list[Case]:
    cases = []
    for name in _BOTH.split():
        cases += [Case(_operator(name), _function(name), x) for x in (P, TURNED.abs(), P.to(torch.bfloat16))]
        cases.append(Case(_operator(name).replace("aclnn", "aclnnInplace"), _changed(name), P))
    for name in _ONLY.split():
        inputs = (I,) if name == "bitwise_not" else (A, TURNED, HALF)
        cases += [Case(_operator(name), _function(name), x) for x in inputs]
    return cases


def _binary() -> list[Case]:
    cases = []
    for name, tensor, scalar in (
        ("mul", "Mul", "Muls"),
        ("div", "Div", "Divs"),
        ("floor_divide", "FloorDivide", "FloorDivides"),
        ("remainder", "RemainderTensorTensor", "RemainderTensorScalar"),
        ("fmod", "FmodTensor", "FmodScalar"),
        ("pow", "PowTensorTensor", "PowTensorScalar"),
    ):
        function, changed = _function(name), _changed(name)
        cases += [
            Case("aclnn" + tensor, function, P, Q),
            Case("aclnn" + tensor, function, P, Q[0]),
            Case("aclnn" + scalar, function, P, 2.0),
            Case("aclnnInplace" + tensor, changed, P, Q),
            Case("aclnnInplace" + scalar, changed, P, 2.0),
        ]
    cases += [
        Case("aclnn" + name, function, A, A.flip(1))
        for name, function in (
            ("Maximum", torch.maximum),
            ("Minimum", torch.minimum),
            ("Atan2", torch.atan2),
            ("LogAddExp", torch.logaddexp),
        )
    ]
    for name in ("Add", "Sub"):
        function, changed = _function(name.lower()), _changed(name.lower())
        scaled = lambda x, y, function=function: function(x, y, alpha=3)  # noqa: E731
        cases += [
            Case("aclnn" + name, scaled, A, P),
            Case("aclnn" + name, function, HALF, HALF.flip(0)),
            Case("aclnn" + name + "s", scaled, A, 2.0),
            Case("aclnnInplace" + name, changed, A, P),
            Case("aclnnInplace" + name + "s", changed, A, 2.0),
        ]
    for mode in ("trunc", "floor"):
        divide = lambda x, y, mode=mode: torch.div(x, y, rounding_mode=mode)  # noqa: E731
        divide_in_place = lambda x, y, mode=mode: x.clone().div_(y, rounding_mode=mode)  # noqa: E731
        cases += [
            Case("aclnnDivMod", divide, I, J),
            Case("aclnnDivMods", divide, I, 3),
            Case("aclnnInplaceDivMod", divide_in_place, I, J),
            Case("aclnnInplaceDivMods", divide_in_place, I, 3),
        ]
    return cases


def _cast_by_npu(x: torch.Tensor) -> torch.Tensor:
    return torch_npu.npu_dtype_cast(x, torch.float16) if x.device.type == "npu" else x.to(torch.float16)


def _gelu_by_npu(approximate: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def gelu(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "npu":
            result: torch.Tensor = torch_npu.npu_gelu(x, approximate=approximate)
            return result
        return functional.gelu(x, approximate=approximate)

    return gelu


def _others() -> list[Case]:
    return [
        Case("aclnnGeluV2", _gelu_by_npu("none"), A),
        Case("aclnnGeluV2", _gelu_by_npu("tanh"), BRAIN),
        Case("aclnnGelu", functional.gelu, BRAIN),
        Case("aclnnSoftplus", functional.softplus, A),
        Case("aclnnElu", functional.elu, A),
        Case("aclnnLeakyRelu", lambda x: functional.leaky_relu(x, 0.1), A),
        Case("aclnnHardtanh", functional.hardtanh, A),
        Case("aclnnGlu", functional.glu, A),
        Case("aclnnNanToNum", torch.nan_to_num, torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])),
        Case("aclnnInplaceNanToNum", _changed("nan_to_num"), torch.tensor([1.0, float("nan"), float("inf")])),
        Case("aclnnRoundDecimals", lambda x: torch.round(x, decimals=2), A),
        Case("aclnnPowScalarTensor", lambda y: 2.0**y, A),
        Case("aclnnPowScalarTensor", lambda y: 2**y, J),
        Case("aclnnRemainderScalarTensor", lambda y: torch.remainder(7, y), J),
        Case("aclnnLogicalNot", torch.logical_not, A.round()),
        Case("aclnnInplaceLogicalNot", _changed("logical_not"), A.round()),
        Case("aclnnLeftShift", torch.bitwise_left_shift, I, J),
        Case("aclnnLeftShifts", lambda x: x << 2, I),
        Case("aclnnRightShift", torch.bitwise_right_shift, I, J),
        Case("aclnnRsub", torch.rsub, A, P),
        Case("aclnnRsubs", lambda x: 1 - x, A),
        Case("aclnnAddV3", lambda x: torch.tensor(2.0, dtype=x.dtype) + x, A),
        Case("aclnnLerp", torch.lerp, A, P, Q),
        Case("aclnnLerps", lambda x, y: torch.lerp(x, y, 0.3), A, P),
        Case("aclnnAddcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), A, P, Q),
        Case("aclnnAddcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), A, P, Q),
        Case("aclnnInplaceCopy", lambda x: x.t().contiguous(), A),
        Case("aclnnInplaceCopy", lambda x: x.clone().copy_(x[0]), A),
        Case("aclnnInplaceCopy", lambda x: x.expand(3, 4, 6).contiguous(), A),
        Case("aclnnInplaceCopy", lambda x: x[1:, ::2].contiguous(), A),
        Case("aclnnCast", _cast_by_npu, I.float()),
    ]


CASES = [*_unary(), *_binary(), *_others()]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_device_agrees_with_the_cpu(case: Case) -> None:
    case.check()
