"""Ascend NPUs' part in the ops: fused operators of torch_npu under the names of `registry.OPS`.

Importing this module registers them; the platform names it among what its workers import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm import envs
from ascend_vllm.ops import ascend_elementwise, ascend_sampling
from ascend_vllm.ops.gemm import set_weight_form
from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.registry import NAMESPACE

_FRACTAL_NZ = 29
_FORMAT_DTYPES = (torch.float16, torch.bfloat16, torch.int8)

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    **ascend_elementwise.IMPLEMENTATIONS,
    **ascend_sampling.IMPLEMENTATIONS,
}


def wants_fractal(dtype: torch.dtype, enable_nz: int, *, quantized: bool) -> bool:
    """Whether a weight is kept in the format FRACTAL_NZ, 16x16 tiles that the matrix units read as they are.

    Args:
        dtype: of the weight.
        enable_nz: VLLM_ASCEND_ENABLE_NZ.
        quantized: whether it is a quantised weight.
    """
    if dtype not in _FORMAT_DTYPES:
        return False
    return enable_nz == 2 or (enable_nz == 1 and quantized)


def arranged_weight(weight: torch.Tensor, *, quantized: bool = False) -> torch.Tensor:
    """A weight [N, K] in the format that its products are to read it in; itself if that is the plain one."""
    if not wants_fractal(weight.dtype, envs.ascend_enable_nz(), quantized=quantized):
        return weight
    npu: Any = torch.npu  # type: ignore[attr-defined]  # there once torch_npu is
    # without this, torch_npu takes the request for a format and does not follow it
    npu.config.allow_internal_format = True
    result: torch.Tensor = torch.ops.npu.npu_format_cast(weight.contiguous(), _FRACTAL_NZ)
    return result


def _register() -> Any:
    """Makes the ops compute with torch_npu's operators on NPUs; returns what keeps the registration alive."""
    # Any: torch leaves this class without annotations
    library: Any = torch.library.Library(NAMESPACE, "IMPL")  # type: ignore[no-untyped-call]
    for name, implementation in IMPLEMENTATIONS.items():
        library.impl(name, implementation, "PrivateUse1")
    set_weight_form("npu", arranged_weight)
    return library


import_op_modules()
_library = _register()
