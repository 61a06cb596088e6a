"""Quantized linear layers: layout, independence of rows, agreement with plain torch."""

from __future__ import annotations

import pytest
import torch

from ascend_vllm.ops.quantized_gemm import CODES, QuantizedPanels, unpack_codes


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 8), (17, 7), (40, 33), (2050, 1025)])
def test_packing_loses_nothing(bits: int, outputs: int, inputs: int) -> None:
    values = torch.randint(2**bits, (outputs, inputs), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    panels = QuantizedPanels(outputs, inputs, inputs, {4: "uint4", 8: "uint8"}[bits])
    for first in range(0, outputs, 700):
        rows = values[first : first + 700]
        panels.pack_rows(first, rows, torch.ones(len(rows), 1))
    assert torch.equal(unpack_codes(panels.codes, inputs, outputs, bits), values)
    assert (panels.dequantized() + 2 ** (bits - 1)).equal(values.float())


@pytest.mark.parametrize("code", CODES)
def test_weights_are_codes_minus_zeros_times_scales(code: str) -> None:
    generator = torch.Generator().manual_seed(0)
    has_zeros = code != "float8_e4m3"
    panels = QuantizedPanels(33, 72, 32, code, has_zeros=has_zeros, scale_dtype=torch.float16)
    values = torch.randint(120 if code == "float8_e4m3" else 2 ** CODES[code], (33, 72), generator=generator)
    scales = torch.rand(33, 3, generator=generator).half()
    zeros = torch.randint(2 ** CODES[code], (33, 3), generator=generator) if has_zeros else None
    panels.pack_rows(0, values.to(torch.uint8), scales, zeros)
    numbers = values.to(torch.uint8).view(torch.float8_e4m3fn).double() if zeros is None else values.double()
    for n, k in [(0, 0), (5, 31), (5, 32), (32, 63), (32, 71)]:
        zero = 0 if zeros is None else zeros[n, k // 32]
        assert panels.dequantized()[n, k] == (numbers[n, k] - zero) * scales[n, k // 32].double()


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16 inputs, got 40"):
        QuantizedPanels(16, 80, 40, "uint4")
    assert QuantizedPanels(16, 40, 128, "uint4").scales.shape == (1, 1, 16)
