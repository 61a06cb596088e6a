"""Memory formats of weights on Ascend NPUs.

Letters: E experts, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_vllm import envs

_FRACTAL_NZ = 29
_FORMAT_DTYPES = (torch.float16, torch.bfloat16, torch.int8)


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


def format_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] in the format that matrix products read; the same tensor if that is the plain format."""
    return _formatted(weight, quantized=False)


def format_inputs_first(weight: torch.Tensor) -> torch.Tensor:
    """A quantised weight [N, K] as [K, N], contiguous, in the format that products of int8 read.

    The tiles must be those of [K, N]: of a transposed view they would be the wrong ones.
    """
    turned = weight.T.contiguous()
    return _formatted(turned, quantized=True)


def format_stack(weights: torch.Tensor, *, quantized: bool = False) -> torch.Tensor:
    """Experts' weights [E, N, K] as [E, K, N], in the format that grouped products read.

    A view, unless the format is FRACTAL_NZ: CANN rules out transposed views of that.
    """
    turned = weights.transpose(1, 2)
    return _formatted(turned, quantized=quantized)


def is_fractal(weight: torch.Tensor) -> bool:
    """Whether a weight is in the format FRACTAL_NZ."""
    return bool(torch.ops.npu.get_npu_format(weight) == _FRACTAL_NZ)


def _formatted(weight: torch.Tensor, *, quantized: bool) -> torch.Tensor:
    """A weight in FRACTAL_NZ if VLLM_ASCEND_ENABLE_NZ asks for that; otherwise the same tensor."""
    if not wants_fractal(weight.dtype, envs.ascend_enable_nz(), quantized=quantized):
        return weight
    npu: Any = torch.npu  # type: ignore[attr-defined]  # defined by torch_npu
    # otherwise torch_npu silently ignores the requested format
    npu.config.allow_internal_format = True
    result: torch.Tensor = torch.ops.npu.npu_format_cast(weight.contiguous(), _FRACTAL_NZ)
    return result
