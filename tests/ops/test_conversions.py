"""Kernels read and round bfloat16 and float16 exactly as torch does, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from ascend_vllm.ops.elementwise import fused_add_rms_norm


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 37])
def test_sums_of_all_sixteen_bit_numbers_round_as_torch_rounds(dtype: torch.dtype, width: int) -> None:
    """Every bit pattern plus one of another size, through the residual sum of a norm."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    left = patterns.view(dtype)
    right = patterns[torch.randperm(2**16, generator=generator)].view(dtype) * 0.01
    rows = len(left) // width
    left, right = (side[: rows * width].view(rows, width) for side in (left, right))
    expected = (left.float() + right.float()).to(dtype)
    residual = left.clone()
    fused_add_rms_norm(right.clone(), residual, torch.ones(width, dtype=dtype), 1e-6)
    assert torch.equal(residual.isnan(), expected.isnan())
    if dtype == torch.bfloat16:
        # the BF16 instructions treat subnormal inputs and results as zero
        tiny = torch.finfo(dtype).tiny
        subnormal = torch.stack([side.abs() < tiny for side in (left, right, expected)]).any(0)
        residual, expected = residual.masked_fill(subnormal, 0), expected.masked_fill(subnormal, 0)
    assert torch.equal(
        residual.nan_to_num(posinf=torch.inf, neginf=-torch.inf),
        expected.nan_to_num(posinf=torch.inf, neginf=-torch.inf),
    )
