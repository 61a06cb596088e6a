"""Quantisation and products of quantised matrices on the device against plain formulas."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch_npu

from tests.npu.launches import Values, launched_by, takes

FRACTAL_NZ = 29

_values = Values(6)
X = _values.normal(5, 64, dtype=torch.bfloat16)
X_HALF = X.half()
W = _values.integers(-127, 128, 64, 48, dtype=torch.int8)
SCALE = _values.positive(48) / 100
TOKENS = _values.integers(-127, 128, 5, 64, dtype=torch.int8)
TOKEN_SCALE = _values.positive(5)


def _close(actual: torch.Tensor, exact: torch.Tensor, part: float = 1e-2) -> bool:
    return bool((actual.cpu().double() - exact.double()).abs().max() <= part * exact.double().abs().max())


@pytest.fixture
def fractal_weights() -> Iterator[None]:
    """Lets torch_npu make tensors in layouts of the matrix unit."""
    torch_npu.npu.config.allow_internal_format = True
    yield
    torch_npu.npu.config.allow_internal_format = False


@pytest.mark.parametrize("smooth", [None, _values.positive(64, dtype=torch.bfloat16)], ids=["plain", "smooth"])
def test_dynamic_quantisation_per_token(smooth: torch.Tensor | None) -> None:
    on_device = None if smooth is None else smooth.npu()
    (values, scale), launched = launched_by(lambda: torch_npu.npu_dynamic_quant(X.npu(), smooth_scales=on_device))
    assert "aclnnDynamicQuantV2" in launched
    scaled = X.float() if smooth is None else X.float() * smooth.float()
    expected = scaled.abs().amax(-1) / 127
    assert torch.allclose(scale.cpu(), expected)
    assert torch.equal(values.cpu(), torch.round(scaled / expected[:, None]).to(torch.int8))


@takes("aclnnDynamicQuantV3")
def test_dynamic_quantisation_of_the_whole_tensor() -> None:
    values, scale = torch_npu.npu_dynamic_quant(X.npu(), quant_mode="pertensor")
    expected = X.float().abs().max() / 127
    assert torch.allclose(scale.cpu(), expected)
    assert torch.equal(values.cpu(), torch.round(X.float() / expected).to(torch.int8))


def test_dynamic_quantisation_with_an_offset_fills_the_range() -> None:
    values, scale, offset = torch_npu.npu_dynamic_quant_asymmetric(X.npu())
    restored = (values.cpu().float() - offset.cpu()[:, None]) * scale.cpu()[:, None]
    assert (restored - X.float()).abs().max() <= scale.max().cpu()
    assert values.cpu().max() == 127


@takes("aclnnAscendQuantV3")
def test_static_quantisation() -> None:
    factor, offset = _values.positive(64, dtype=torch.bfloat16) * 40, _values.normal(64, dtype=torch.bfloat16).round()
    values = torch_npu.npu_quantize(X.npu(), factor.npu(), offset.npu(), torch.qint8, -1, False)
    expected = torch.round(X.float() * factor.float() + offset.float()).clamp(-128, 127)
    assert torch.equal(values.cpu(), expected.to(torch.int8))


@takes("aclnnQuantize")
def test_quantisation_by_division() -> None:
    scale, zero = torch.tensor([0.02]), torch.tensor([3], dtype=torch.int32)
    values = torch_npu.npu_quantize(X.float().npu(), scale.npu(), zero.npu(), torch.qint8, 0)
    assert torch.equal(values.cpu(), (torch.round(X.float() / 0.02) + 3).clamp(-128, 127).to(torch.int8))


@takes("aclnnQuantMatmulV5")
def test_product_with_a_scale_per_token() -> None:
    result = torch_npu.npu_quant_matmul(
        TOKENS.npu(), W.npu(), SCALE.npu(), pertoken_scale=TOKEN_SCALE.npu(), output_dtype=torch.bfloat16
    )
    assert _close(result, (TOKENS.double() @ W.double()) * SCALE.double() * TOKEN_SCALE.double()[:, None])


@takes("aclnnTransQuantParamV3", "aclnnQuantMatmulV5")
def test_product_with_static_scales_and_an_integer_bias() -> None:
    bias = _values.integers(-5000, 5000, 48, dtype=torch.int32)
    result = torch_npu.npu_quant_matmul(
        TOKENS.npu(), W.npu(), SCALE.npu(), bias=bias.npu(), output_dtype=torch.float16
    )
    exact = (TOKENS.double() @ W.double() + bias.double()) * SCALE.double()
    assert _close(result, exact)


def test_parameters_of_the_matrix_unit_hold_the_upper_bits_of_the_scale() -> None:
    parameters = torch_npu.npu_trans_quant_param(SCALE.npu()).cpu()
    kept = (parameters & 0xFFFFFFFF).to(torch.int64).to(torch.int32).view(torch.float32)
    assert torch.allclose(kept, SCALE, rtol=2**-10)
    assert ((parameters >> 46) & 1).all()


@takes("aclnnQuantMatmulWeightNz")
@pytest.mark.usefixtures("fractal_weights")
def test_product_with_a_fractal_weight() -> None:
    fractal = torch_npu.npu_format_cast(W.npu(), FRACTAL_NZ)
    result = torch_npu.npu_quant_matmul(
        TOKENS.npu(), fractal, SCALE.npu(), pertoken_scale=TOKEN_SCALE.npu(), output_dtype=torch.bfloat16
    )
    assert _close(result, (TOKENS.double() @ W.double()) * SCALE.double() * TOKEN_SCALE.double()[:, None])


@pytest.mark.parametrize("inner_precise", [0, 1])
def test_product_of_plain_rows_with_an_int8_weight(inner_precise: int) -> None:
    scale, offset = SCALE.half()[None], _values.normal(1, 48, dtype=torch.float16)
    result, launched = launched_by(
        lambda: torch_npu.npu_weight_quant_batchmatmul(
            X_HALF.npu(), W.npu(), scale.npu(), antiquant_offset=offset.npu(), inner_precise=inner_precise
        )
    )
    assert ("aclnnWeightQuantBatchMatmulV3" if inner_precise else "aclnnWeightQuantBatchMatmulV2") in launched
    assert _close(result, X_HALF.double() @ ((W.double() + offset.double()) * scale.double()))


def test_product_of_plain_rows_with_a_packed_int4_weight_in_groups() -> None:
    weight = _values.integers(-8, 8, 64, 48, dtype=torch.int32)
    scale = _values.positive(2, 48, dtype=torch.float16)
    packed = torch_npu.npu_convert_weight_to_int4pack(weight.npu())
    assert tuple(packed.shape) == (64, 6)
    result = torch_npu.npu_weight_quant_batchmatmul(X_HALF.npu(), packed, scale.npu(), antiquant_group_size=32)
    assert _close(result, X_HALF.double() @ (weight.double() * scale.double().repeat_interleave(32, 0)))
