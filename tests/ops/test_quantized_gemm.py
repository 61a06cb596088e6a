"""Quantized linear layers: layout, independence of rows, agreement with plain torch."""

from __future__ import annotations

import pytest
import torch

from ascend_vllm.ops import native
from ascend_vllm.ops.elementwise import silu_and_mul
from ascend_vllm.ops.quantized_gemm import (
    CODES,
    Int8Panels,
    QuantizedPanels,
    quantize_static,
    quantize_tokens,
    quantized_linear,
    unpack_codes,
)
from ascend_vllm.ops.registry import FLOAT_DTYPES


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


def _panels(outputs: int, inputs: int, group_size: int, code: str) -> QuantizedPanels:
    generator = torch.Generator().manual_seed(1)
    panels = QuantizedPanels(outputs, inputs, group_size, code, has_zeros=code == "uint4")
    top = 120 if code == "float8_e4m3" else 2 ** CODES[code]
    groups = panels.scales.shape[1]
    values = torch.randint(top, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = (0.5 + torch.rand(outputs, groups, generator=generator)) / (top * inputs**0.5)
    panels.pack_rows(0, values, scales, torch.randint(top, (outputs, groups), generator=generator))
    return panels


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("inputs", "outputs", "group_size"), [(64, 48, 32), (1100, 300, 1100), (704, 64, 160)])
def test_a_row_is_the_same_alone_and_in_any_batch(
    isa: str, dtype: torch.dtype, code: str, inputs: int, outputs: int, group_size: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    panels = _panels(outputs, inputs, group_size, code)
    x = torch.randn(270, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator)
    together = panels(x, bias)
    for rows in (*range(1, 17), 33, 64, 65, 97):
        assert torch.equal(panels(x[-rows:], bias), together[-rows:]), rows
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    assert torch.equal(panels(x, bias), together)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_whole_numbers_are_multiplied_alike_by_all_instruction_sets(dtype: torch.dtype) -> None:
    """Sums of blocks are exact, and added in the same order. AMX multiplies bfloat16 numbers as they are."""
    panels = _panels(40, 300, 128, "uint4")
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = native.cpu_isa()
    results = []
    for isa in native.available_cpu_isas():
        native.set_cpu_isa(isa)
        # the scalar set has no fused multiply-add
        if isa != "scalar" and (isa, dtype) != ("amx_bf16", torch.bfloat16):
            results.append(panels(x, None))
    if before is not None:
        native.set_cpu_isa(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("code", CODES)
def test_a_gated_product_is_the_product_and_then_the_gate(isa: str, dtype: torch.dtype, code: str) -> None:
    panels = _panels(96, 160, 32, code)
    x = torch.randn(100, 160, generator=torch.Generator().manual_seed(3)).to(dtype)
    bias = torch.randn(96, generator=torch.Generator().manual_seed(4))
    for rows in (1, 5, 100):
        wanted = silu_and_mul(panels(x[:rows], bias))
        torch.testing.assert_close(panels.gated(x[:rows], bias, "silu"), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("code", ["uint4", "uint8"])
@pytest.mark.parametrize(("inputs", "group_size"), [(64, 32), (300, 128), (1100, 1100), (336, 48)])
def test_inputs_are_rounded_to_8_bits_in_blocks(
    isa: str, dtype: torch.dtype, code: str, inputs: int, group_size: int
) -> None:
    """Each by itself at most by half of a 127th of the largest of its block; and alike in every batch."""
    panels = _panels(80, inputs, group_size, code)
    x = torch.randn(270, inputs, generator=torch.Generator().manual_seed(8))
    x = (x * 10 ** (torch.arange(inputs) // 32 % 5)).to(dtype)
    exact = x.double() @ panels.dequantized().double().T
    panels.rounds_inputs = True
    together = panels(x, None)
    # blocks begin anew with each group
    groups = torch.split(x.double(), group_size, dim=1)
    parts = [part for group in groups for part in torch.split(group, 32, dim=1)]
    steps = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in parts], dim=1) / 254
    allowed = steps @ panels.dequantized().double().abs().T
    error = (together.double() - exact).abs()
    assert (error <= allowed + 2 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all()
    assert error.mean() > 0.01 * allowed.mean()
    for rows in (*range(1, 17), 33, 64, 65, 97):
        assert torch.equal(panels(x[-rows:], None), together[-rows:])


def test_rounded_inputs_are_multiplied_alike_by_all_instruction_sets() -> None:
    panels = _panels(40, 300, 128, "uint4")
    panels.rounds_inputs = True
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(2)).bfloat16()
    before = native.cpu_isa()
    results = []
    for isa in native.available_cpu_isas():
        native.set_cpu_isa(isa)
        # the scalar set has no fused multiply-add
        if isa != "scalar":
            results.append(panels(x, None))
    if before is not None:
        native.set_cpu_isa(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_16_bit_inputs_keep_their_accuracy_beside_outliers(isa: str) -> None:
    """Another input of the same block is a thousand times as large."""
    panels = _panels(32, 256, 128, "uint8")
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(5)).half()
    x[:, 17] = 1000.0
    exact = x.double() @ panels.dequantized().double().T
    error = (panels(x, None).double() - exact).abs().max()
    assert error <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_show_in_their_row_only(
    isa: str, dtype: torch.dtype, code: str, value: float
) -> None:
    panels = _panels(32, 300, 128, code)
    x = torch.ones(3, 300).to(dtype)
    alone = panels(x, None)
    x[1, 200] = value
    result = panels(x, None)
    assert not result[1].isfinite().any()
    assert torch.equal(result[[0, 2]], alone[[0, 2]])


def test_zeros_give_the_bias(isa: str) -> None:
    panels = _panels(32, 64, 32, "uint4")
    bias = torch.arange(32.0)
    assert torch.equal(panels(torch.zeros(9, 64).half(), bias), bias.half().expand(9, 32))


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 40, 97])
def test_sums_of_8_bit_numbers_are_exact(isa: str, rows: int, has_offset: bool) -> None:
    """All numbers are -128, the worst case of instructions that saturate."""
    inputs, outputs = 4100, 33
    panels = Int8Panels(outputs, inputs)
    panels.pack_int8_rows(0, torch.full((outputs, inputs), -128, dtype=torch.int8), torch.ones(outputs))
    q = torch.full((rows, inputs), -128, dtype=torch.int8)
    offsets = torch.full((rows,), 100, dtype=torch.int32) if has_offset else None
    result = panels.product(q, torch.ones(rows), offsets, None, torch.float32)
    assert torch.equal(result, torch.full((rows, outputs), float(128 * (228 if has_offset else 128) * inputs)))


@pytest.mark.parametrize("has_offset", [False, True])
def test_8_bit_numbers_are_multiplied_alike_by_all_instruction_sets(has_offset: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    panels = Int8Panels(150, 1100)
    weight = torch.randint(-128, 128, (150, 1100), generator=generator).to(torch.int8)
    panels.pack_int8_rows(0, weight, torch.rand(150, generator=generator))
    q, scales, offsets = quantize_tokens(torch.randn(300, 1100, generator=generator) + 1, has_offset)
    before = native.cpu_isa()
    results = []
    for isa in native.available_cpu_isas():
        native.set_cpu_isa(isa)
        results.append(panels.product(q, scales, offsets if has_offset else None, None, torch.bfloat16))
    if before is not None:
        native.set_cpu_isa(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("has_offset", [False, True])
def test_an_8_bit_row_is_the_same_alone_and_in_any_batch(isa: str, has_offset: bool) -> None:
    generator = torch.Generator().manual_seed(6)
    panels = Int8Panels(96, 200)
    weight = torch.randint(-128, 128, (96, 200), generator=generator).to(torch.int8)
    panels.pack_int8_rows(0, weight, torch.rand(96, generator=generator))
    q, scales, offsets = quantize_tokens(torch.randn(270, 200, generator=generator).bfloat16() + 1, has_offset)
    given = offsets if has_offset else None
    together = panels.product(q, scales, given, None, torch.bfloat16)
    gated = panels.gated_product(q, scales, given, None, torch.bfloat16, "silu")
    for rows in (*range(1, 18), 28, 33, 60):
        last = None if given is None else given[-rows:]
        assert torch.equal(panels.product(q[-rows:], scales[-rows:], last, None, torch.bfloat16), together[-rows:])
        alone = panels.gated_product(q[-rows:], scales[-rows:], last, None, torch.bfloat16, "silu")
        assert torch.equal(alone, gated[-rows:])
    assert torch.equal(gated, silu_and_mul(together))


def test_tokens_are_rounded_to_their_own_scale(isa: str) -> None:
    x = torch.tensor([[127.0, -63.5, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0], [-1.0, 0.25, 0.0, 1.55]])
    q, scales, offsets = quantize_tokens(x, False)
    assert q[:2].tolist() == [[127, -64, 0, 2], [0, 0, 0, 0]]
    assert scales[:2].tolist() == [1.0, 0.0] and offsets.tolist() == [0, 0, 0]
    q, scales, offsets = quantize_tokens(x, True)
    assert scales[2].item() == pytest.approx(0.01)
    assert q[2].tolist() == [-128, -3, -28, 127] and offsets[2] == -28
    q, scales, offsets = quantize_static(x, 0.5, 3)
    assert q[0].tolist() == [127, -124, 4, 6] and scales.tolist() == [0.5] * 3 and offsets.tolist() == [3] * 3


def test_wrong_arguments_are_refused() -> None:
    panels = _panels(32, 64, 32, "uint4")
    arguments = (panels.codes, panels.scales, panels.zeros, None, None, 32, 32, "uint4")
    with pytest.raises(RuntimeError, match=r"codes must be .* shape \[2, 7, 16\]"):
        quantized_linear(torch.randn(2, 56), *arguments)
    with pytest.raises(RuntimeError, match="multiple of 16 inputs or all of them, got 24 of 64"):
        quantized_linear(torch.randn(2, 64), *arguments[:6], 24, "uint4")
    with pytest.raises(ValueError, match="code must be"):
        quantized_linear(torch.randn(2, 64), *arguments[:7], "uint3")
    fp8 = _panels(32, 64, 32, "float8_e4m3")
    fp8.rounds_inputs = True
    with pytest.raises(RuntimeError, match="inputs of float8_e4m3 are not rounded"):
        fp8(torch.randn(2, 64), None)
    with pytest.raises(RuntimeError, match="bias must be"):
        quantized_linear(torch.randn(2, 64), *arguments[:3], torch.randn(31), *arguments[4:])
