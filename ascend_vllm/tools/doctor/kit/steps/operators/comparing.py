"""Compares what the device computes with the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm.tools.doctor.kit.session import Result, Session
from ascend_vllm.tools.doctor.kit.steps.operators.watching import watched_operators

DTYPES = (torch.float16, torch.bfloat16)


def dtype_name(dtype: torch.dtype) -> str:
    """Such as "float16"."""
    return str(dtype).removeprefix("torch.")


def error_of(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest difference; infinite where one is not finite and the other is not the same."""
    if got.numel() == 0:
        return 0.0
    got, truth = got.cpu().double(), truth.double()
    same = (got == truth) | (got.isnan() & truth.isnan())
    difference = torch.where(same, 0.0, (got - truth).abs())
    return float(difference.nan_to_num(math.inf).max())


def compare(
    session: Session,
    call: Callable[[], torch.Tensor],
    truth: torch.Tensor,
    plain: torch.Tensor,
    tolerance: float = 1e-5,
    changes: dict[str, object] | None = None,
) -> Result:
    """Runs a call on the device.

    Args:
        session: of the step.
        call: returns what it computes; may be called several times.
        truth: the right result, in float32 or wider.
        plain: of a plain implementation in the dtype of the call: errors up to twice its are allowed.
        tolerance: beside that.
        changes: arguments of the operators that are replaced.
    """
    session.begin()
    with watched_operators(changes) as calls:
        got, numbers = session.measure(call)
    result = Result.compared(error_of(got, truth), 2 * error_of(plain, truth) + tolerance, numbers)
    return Result(result.status, result.numbers, {"calls": ", ".join(calls)}, result.message)


def to_device(value: Any) -> Any:
    """A tensor on the device, anything else as it is."""
    return value.to("npu") if isinstance(value, torch.Tensor) else value
