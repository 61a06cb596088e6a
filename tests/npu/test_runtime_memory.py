"""Device memory, copies and their accounts, through torch_npu."""

from __future__ import annotations

import torch
import torch_npu  # noqa: F401 - makes the device known


def test_fresh_memory_holds_no_usable_number() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert torch.empty(1000, dtype=dtype, device="npu").cpu().isnan().all()
    assert (torch.empty(1000, dtype=torch.int32, device="npu").cpu().abs() > 1 << 30).all()
