"""Implements the ops of `registry.OPS` with torch_npu's fused operators.

Importing this module registers them; the NPU platform lists it among the modules that its workers import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm import envs
from ascend_vllm.ops import ascend_elementwise, ascend_sampling
from ascend_vllm.ops.gemm import set_weight_format
from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.registry import NAMESPACE

_FRACTAL_NZ = 29
_FORMAT_DTYPES = (torch.float16, torch.bfloat16, torch.int8)

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    **ascend_elementwise.IMPLEMENTATIONS,
    **ascend_sampling.IMPLEMENTATIONS,
}


def wants_fractal(dtype: torch.dtype, enable_nz: int, *, quantized: bool) -> bool:
    """Whether a weight is stored in the format FRACTAL_NZ, the 16x16 tiles that the matrix units read.

    Args:
        dtype: of the weight.
        enable_nz: VLLM_ASCEND_ENABLE_NZ.
        quantized: whether it is a quantised weight.
    """
    if dtype not in _FORMAT_DTYPES:
        return False
    return enable_nz == 2 or (enable_nz == 1 and quantized)


def format_weight(weight: torch.Tensor, *, quantized: bool = False) -> torch.Tensor:
    """A weight [N, K] in the format that matrix products read; the same tensor if that is the plain format."""
    if not wants_fractal(weight.dtype, envs.ascend_enable_nz(), quantized=quantized):
        return weight
    npu: Any = torch.npu  # type: ignore[attr-defined]  # defined by torch_npu
    # otherwise torch_npu silently ignores the requested format
    npu.config.allow_internal_format = True
    result: torch.Tensor = torch.ops.npu.npu_format_cast(weight.contiguous(), _FRACTAL_NZ)
    return result


def _register() -> Any:
    """Registers `IMPLEMENTATIONS` for NPUs; the returned library must be kept alive."""
    # Any: torch leaves this class without annotations
    library: Any = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name, implementation in IMPLEMENTATIONS.items():
        library.impl(name, implementation, "PrivateUse1")
    set_weight_format("npu", format_weight)
    return library


import_op_modules()
_library = _register()
