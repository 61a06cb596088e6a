"""Implements the ops of `registry.OPS` with torch_npu's fused operators.

Importing this module registers them; the NPU platform lists it among the modules that its workers import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ascend_vllm import envs
from ascend_vllm.ops import ascend_elementwise, ascend_experts, ascend_sampling
from ascend_vllm.ops.experts import STACK_FORMATS
from ascend_vllm.ops.gemm import WEIGHT_FORMATS
from ascend_vllm.ops.native import import_op_modules
from ascend_vllm.ops.registry import implement_on_npus

_FRACTAL_NZ = 29
_FORMAT_DTYPES = (torch.float16, torch.bfloat16, torch.int8)

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    implementation.__name__: implementation
    for implementation in (
        ascend_elementwise.rms_norm,
        ascend_elementwise.fused_add_rms_norm,
        ascend_elementwise.layer_norm,
        ascend_elementwise.rotary_embedding,
        ascend_elementwise.silu_and_mul,
        ascend_elementwise.gelu_and_mul,
        ascend_experts.route_tokens,
        ascend_experts.grouped_experts_mlp,
        ascend_sampling.apply_token_bitmask,
        ascend_sampling.draw_tokens,
        ascend_sampling.token_logprobs,
    )
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
    return _as_fractal(weight)


def format_stack(weights: torch.Tensor) -> torch.Tensor:
    """Experts' weights [E, N, K] as [E, K, N], in the format that grouped products read.

    A view, unless the format is FRACTAL_NZ: CANN rules out transposed views of that.
    """
    turned = weights.transpose(1, 2)
    wants = wants_fractal(weights.dtype, envs.ascend_enable_nz(), quantized=False)
    return _as_fractal(turned) if wants else turned


def _as_fractal(weight: torch.Tensor) -> torch.Tensor:
    npu: Any = torch.npu  # type: ignore[attr-defined]  # defined by torch_npu
    # otherwise torch_npu silently ignores the requested format
    npu.config.allow_internal_format = True
    result: torch.Tensor = torch.ops.npu.npu_format_cast(weight.contiguous(), _FRACTAL_NZ)
    return result


import_op_modules()
_library = implement_on_npus(IMPLEMENTATIONS)
WEIGHT_FORMATS["npu"] = format_weight
STACK_FORMATS["npu"] = format_stack
