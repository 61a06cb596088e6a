"""Quantisation and products of quantised matrices on the device against plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu

from tests.npu.launches import Values, launched_by, takes
from tests.npu.test_refusals import refused

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


@takes("aclnnQuantMatmulV5")
def test_product_whose_sums_are_not_scaled() -> None:
    result = torch_npu.npu_quant_matmul(TOKENS.npu(), W.npu(), SCALE.npu(), output_dtype=torch.int32)
    assert torch.equal(result.cpu(), (TOKENS.double() @ W.double()).int())


def test_products_of_groups_of_rows_with_int4_weights_in_groups_of_inputs() -> None:
    weights, offsets = _values.integers(-8, 8, 2, 64, 48, dtype=torch.int32), _values.integers(-3, 4, 2, 2, 48).half()
    scales = _values.positive(2, 2, 48, dtype=torch.float16)
    words = torch_npu.npu_convert_weight_to_int4pack(weights.flatten(0, 1).npu()).view(2, 64, 6)
    result = _grouped(X_HALF, words, None, antiquant_scale=scales, antiquant_offset=offsets)
    wide = [values.double().repeat_interleave(32, 1) for values in (offsets, scales)]
    matrices = (weights.double() + wide[0]) * wide[1]
    assert _close(result, torch.cat([X_HALF[:2].double() @ matrices[0], X_HALF[2:].double() @ matrices[1]]))


# ---- what CANN refuses ---------------------------------------------------------------------------------------------


def _int8(out: torch.dtype, **changes: Any) -> torch.Tensor:
    """A product of TOKENS and W that is right, but for the changes."""
    given: dict[str, Any] = {"x1": TOKENS, "x2": W, "scale": SCALE, "output_dtype": out} | changes
    on_device = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    result: torch.Tensor = torch_npu.npu_quant_matmul(**on_device)
    return result


def _weight_only(x: torch.Tensor = X_HALF, **changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {"weight": W, "antiquant_scale": SCALE.to(x.dtype)} | changes
    on_device = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    result: torch.Tensor = torch_npu.npu_weight_quant_batchmatmul(x.npu(), **on_device)
    return result


def _quantize(factor: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch_npu.npu_quantize(X.npu(), factor.npu(), offset.npu(), torch.qint8, -1, False)
    return result


def _grouped(x: torch.Tensor, weight: torch.Tensor, out: torch.dtype | None, **lists: torch.Tensor) -> torch.Tensor:
    parts = {name: [value.npu()] for name, value in lists.items()}
    options: dict[str, Any] = {"split_item": 2, "group_type": 0, "group_list": torch.tensor([2, 5]).npu()}
    (result,) = torch_npu.npu_grouped_matmul([x.npu()], [weight.npu()], output_dtype=out, **options, **parts)
    return result  # type: ignore[no-any-return]


HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
_ROW = torch.ones(48)
_STACK = W.expand(2, 64, 48).contiguous()
_WORDS = torch.ones(2, 64, 6, dtype=torch.int32)
_SCALES = torch.ones(2, 48)
PARAMETERS = torch.ones(48, dtype=torch.int64)
WIDE = torch.ones(64, 65536, dtype=torch.int8)
MATMUL, WEIGHT_ONLY, GROUPED = "aclnnQuantMatmulV5", "aclnnWeightQuantBatchMatmulV2", "aclnnGroupedMatmulV5"
# what the refused calls differ from
TAKEN: list[Callable[[], torch.Tensor]] = [
    lambda: _int8(HALF, scale=PARAMETERS, bias=_ROW.int()),
    lambda: _int8(torch.int8, offset=torch.ones(1)),
    lambda: _int8(BRAIN, bias=_ROW.bfloat16()),
    lambda: _int8(BRAIN, bias=_ROW, pertoken_scale=TOKEN_SCALE, scale=SCALE.bfloat16()),
    lambda: _int8(HALF, bias=_ROW.half(), pertoken_scale=TOKEN_SCALE),
    lambda: _int8(torch.int32, bias=_ROW.int()),
    lambda: _int8(BRAIN, scale=SCALE[:1]),
    lambda: _int8(BRAIN, x2=WIDE[:, :65535], scale=SCALE[:1]),
    lambda: _weight_only(bias=_ROW.half()),
    lambda: _weight_only(X, bias=_ROW),
    lambda: _quantize(torch.ones(64).bfloat16(), torch.ones(64).bfloat16()),
    lambda: _weight_only(antiquant_scale=torch.ones(2, 48).half(), antiquant_group_size=32),
    lambda: _grouped(TOKENS, _STACK, BRAIN, scale=_SCALES.bfloat16(), per_token_scale=TOKEN_SCALE),
    lambda: _grouped(TOKENS, _STACK, HALF, scale=_SCALES, per_token_scale=TOKEN_SCALE),
    lambda: _grouped(X, _STACK, None, antiquant_scale=_SCALES.bfloat16()),
    lambda: _grouped(
        X_HALF,
        _WORDS,
        None,
        antiquant_scale=torch.ones(2, 2, 48).half(),
        antiquant_offset=torch.zeros(2, 2, 48).half(),
    ),
]
# operator, argument, call
REFUSED: list[tuple[str, str, Callable[[], torch.Tensor]]] = [
    (MATMUL, "bias", lambda: _int8(HALF, scale=PARAMETERS, bias=_ROW.half())),
    (MATMUL, "bias", lambda: _int8(torch.int8, bias=_ROW)),
    (MATMUL, "bias", lambda: _int8(BRAIN, bias=_ROW.half())),
    (MATMUL, "bias", lambda: _int8(HALF, bias=_ROW.bfloat16(), pertoken_scale=TOKEN_SCALE)),
    (MATMUL, "bias", lambda: _int8(torch.int32, bias=_ROW)),
    (MATMUL, "x2Scale", lambda: _int8(BRAIN, scale=PARAMETERS)),
    (MATMUL, "x2Scale", lambda: _int8(HALF, scale=SCALE.bfloat16(), pertoken_scale=TOKEN_SCALE)),
    (MATMUL, "x2Scale", lambda: _int8(torch.int8, scale=SCALE.bfloat16())),
    (MATMUL, "x2Scale", lambda: _int8(BRAIN, scale=SCALE[:7])),
    (MATMUL, "out", lambda: _int8(torch.int8, pertoken_scale=TOKEN_SCALE)),
    (MATMUL, "x2", lambda: _int8(BRAIN, x2=WIDE, scale=SCALE[:1])),
    (MATMUL, "x1", lambda: _int8(BRAIN, x1=WIDE[:5], x2=WIDE.npu().T, scale=SCALE[:1])),
    (WEIGHT_ONLY, "biasOptional", lambda: _weight_only(X, bias=_ROW.half())),
    (WEIGHT_ONLY, "biasOptional", lambda: _weight_only(bias=_ROW)),
    (WEIGHT_ONLY, "antiquantScale", lambda: _weight_only(antiquant_scale=SCALE[:7].half())),
    (WEIGHT_ONLY, "antiquantScale", lambda: _weight_only(antiquant_scale=torch.ones(2, 48).half())),
    (WEIGHT_ONLY, "antiquantScale", lambda: _weight_only(antiquant_group_size=32)),
    (WEIGHT_ONLY, "weight", lambda: _weight_only(weight=WIDE, antiquant_scale=SCALE[:1].half())),
    (WEIGHT_ONLY, "weight", lambda: _weight_only(torch.ones(1, 65536).half(), weight=torch.ones(65536, 48).char())),
    (WEIGHT_ONLY, "x", lambda: _weight_only(X_HALF[:0])),
    (GROUPED, "scale[0]", lambda: _grouped(TOKENS, _STACK, BRAIN, scale=_SCALES, per_token_scale=TOKEN_SCALE)),
    (
        GROUPED,
        "perTokenScale[0]",
        lambda: _grouped(TOKENS, _STACK, HALF, scale=_SCALES, per_token_scale=TOKEN_SCALE.half()),
    ),
    (GROUPED, "antiquantScale[0]", lambda: _grouped(X, _STACK, None, antiquant_scale=_SCALES)),
    # groups of inputs are for weights of 4 bits, which have offsets
    (
        GROUPED,
        "antiquantScale[0]",
        lambda: _grouped(X_HALF, _STACK, None, antiquant_scale=torch.ones(2, 2, 48).half()),
    ),
    # reciprocals of scales, and offsets, are in the dtype of what is rounded
    ("aclnnAscendQuantV3", "scale", lambda: _quantize(torch.ones(64), torch.ones(64).bfloat16())),
    ("aclnnAscendQuantV3", "offset", lambda: _quantize(torch.ones(64).bfloat16(), torch.ones(64).half())),
    ("aclnnAscendQuantV3", "scale", lambda: _quantize(torch.ones(63).bfloat16(), torch.ones(63).bfloat16())),
    (GROUPED, "antiquantOffset", lambda: _grouped(X_HALF, _WORDS, None, antiquant_scale=torch.ones(2, 2, 48).half())),
]


@pytest.mark.parametrize("call", TAKEN)
def test_calls_that_are_right(call: Callable[[], torch.Tensor]) -> None:
    call()
    torch.npu.synchronize()


@pytest.mark.parametrize(("operator", "argument", "call"), REFUSED)
def test_what_the_documentation_rules_out_is_refused(
    operator: str, argument: str, call: Callable[[], torch.Tensor]
) -> None:
    refused(call, operator, argument)


@pytest.mark.parametrize("size", [48, 64])
def test_torch_npu_itself_refuses_sizes_of_groups(size: int) -> None:
    with pytest.raises(RuntimeError, match="a multiple of 32 within the range 32 to weight_k_dim - 1"):
        _weight_only(antiquant_group_size=size)


@pytest.mark.usefixtures("fractal_weights")
def test_tiles_of_weights_whose_inputs_are_not_rounded_are_refused() -> None:
    fractal = torch_npu.npu_format_cast(W.npu(), FRACTAL_NZ)
    refused(lambda: _weight_only(weight=fractal), WEIGHT_ONLY, "weight")
