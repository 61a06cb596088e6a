"""The fractal layout of weights, and the older way to run operators, which has no other operator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
import torch_npu

from tests.npu import acl
from tests.npu.launches import takes

ND, FRACTAL_NZ = 2, 29


@pytest.fixture(autouse=True)
def _internal_formats() -> Iterator[None]:
    torch.npu.set_device(0)
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@pytest.mark.parametrize(
    ("dtype", "block"), [(torch.float16, 16), (torch.bfloat16, 16), (torch.float32, 16), (torch.int8, 32)]
)
@takes("aclnnNpuFormatCast")
def test_fractal_layout(dtype: torch.dtype, block: int) -> None:
    rows, columns, count = 33, 40, 2
    plain = torch.arange(count * rows * columns).remainder(113).to(dtype).reshape(count, rows, columns)
    fractal = torch_npu.npu_format_cast(plain.to("npu"), FRACTAL_NZ)
    assert torch_npu.get_npu_format(fractal) == FRACTAL_NZ
    padded = torch.zeros(count, 48, -(-columns // block) * block, dtype=dtype)
    padded[:, :rows, :columns] = plain
    wanted = padded.reshape(count, 3, 16, -1, block).permute(0, 3, 1, 2, 4).contiguous()
    size = wanted.numel() * wanted.element_size()
    torch.npu.synchronize()  # operators are launched by a thread of torch_npu's
    there = acl.read(acl.Handle(fractal.untyped_storage().data_ptr()), size)
    assert there == bytes(wanted.view(torch.uint8).flatten().tolist())
    assert torch.equal(torch_npu.npu_format_cast(fractal, ND).cpu(), plain)


def test_other_operators_are_refused_by_name() -> None:
    answer = acl.LIBRARY.aclopCompileAndExecute(
        b"MadeUpOperator", 0, None, None, 0, None, None, None, 0, 0, None, ctypes.c_void_p()
    )
    assert answer == 100024 and "MadeUpOperator is not simulated" in acl.message()
