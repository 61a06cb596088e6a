"""Packed linear layers: layout, independence of rows, agreement with plain torch."""

from __future__ import annotations

import resource

import psutil
import pytest
import torch

from ascend_vllm.ops import gemm, native
from ascend_vllm.ops.gemm import PackedLinear, pack_weight, unpack_weight
from ascend_vllm.ops.registry import FLOAT_DTYPES


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 8), (17, 7), (40, 33), (2050, 1025)])
def test_packing_loses_nothing(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = pack_weight(weight)
    assert packed.is_contiguous()
    assert torch.equal(unpack_weight(packed, inputs, outputs), weight)
    assert packed.count_nonzero() == weight.count_nonzero(), "padding must be zero"


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (1101, 300)])
def test_a_row_is_the_same_alone_and_in_any_batch(isa: str, dtype: torch.dtype, inputs: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    layer = PackedLinear.of(torch.randn(outputs, inputs, generator=generator).to(dtype))
    x = torch.randn(230, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    together = layer(x, bias)
    for rows in (*range(1, 17), 28, 33, 64, 65, 97):
        assert torch.equal(layer(x[-rows:], bias), together[-rows:]), rows
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    assert torch.equal(layer(x, bias), together)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_packed_linear_agrees_with_torch(isa: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(333, 777, generator=generator) / 777**0.5).to(dtype)
    bias = torch.randn(333, generator=generator).to(dtype)
    layer = PackedLinear.of(weight)
    assert (layer.in_features, layer.out_features) == (777, 333)
    x = torch.randn(20, 777, generator=generator).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    # one rounding of the result; in float32 those of 777 additions as well
    rounding = torch.finfo(dtype).eps * expected.abs().max() * (20 if dtype == torch.float32 else 1)
    assert (layer(x, bias).double() - expected).abs().max() <= rounding


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("activation", gemm.GATED_ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gated_product_is_the_product_and_then_the_gate(
    isa: str, dtype: torch.dtype, activation: str, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    layer = PackedLinear.of((torch.randn(2 * 208, 777, generator=generator) / 777**0.5).to(dtype))
    bias = torch.randn(2 * 208, generator=generator).to(dtype) if with_bias else None
    x = 3 * torch.randn(130, 777, generator=generator).to(dtype)
    for rows in (1, 2, 3, 5, 8, 11, 48, 49, 130):
        expected = gemm.GATED_ACTIVATIONS[activation](layer(x[:rows], bias))
        assert torch.equal(layer.gated(x[:rows], bias, activation), expected), rows
        fused = gemm.packed_gated_linear(x[:rows], layer._weight, bias, 2 * 208, activation)
        assert torch.equal(fused, expected), rows


def test_a_width_of_no_whole_panels_takes_two_steps() -> None:
    layer = PackedLinear.of(torch.randn(2 * 20, 8))
    x = torch.randn(3, 8)
    assert torch.equal(layer.gated(x, None, "silu"), gemm.GATED_ACTIVATIONS["silu"](layer(x, None)))
    with pytest.raises(RuntimeError, match="must be a multiple of 32, got 40"):
        gemm.packed_gated_linear(x, pack_weight(torch.zeros(40, 8)), None, 40, "silu")
    with pytest.raises(ValueError, match="activation must be 'silu', 'gelu' or 'gelu_tanh', got 'relu'"):
        gemm.packed_gated_linear(x, pack_weight(torch.zeros(32, 8)), None, 32, "relu")


def test_a_packed_weight_of_another_shape_is_refused() -> None:
    packed = pack_weight(torch.zeros(32, 8))
    with pytest.raises(RuntimeError, match="not that of a Float weight of 9 inputs and 32 outputs"):
        gemm.packed_linear(torch.zeros(1, 9), packed, None, 32)
    with pytest.raises(RuntimeError, match="bias must be"):
        gemm.packed_linear(torch.zeros(1, 8), packed, torch.zeros(31), 32)
    with pytest.raises(RuntimeError, match="packed must be"):
        gemm.packed_linear(torch.zeros(1, 8, dtype=torch.bfloat16), packed, None, 32)


def test_without_a_kernel_the_layer_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "has_kernel", lambda *_: False)
    weight = torch.randn(5, 7)
    x = torch.randn(3, 7)
    assert torch.equal(PackedLinear.of(weight)(x, None), torch.nn.functional.linear(x, weight))


def test_large_results_take_the_memory_of_those_that_are_gone() -> None:
    """But not that of living ones. Faulting in new pages took longer than the product that filled them."""
    outputs, rows = 100_000, 180
    layer = PackedLinear.of(torch.randn(outputs, 8, generator=torch.Generator().manual_seed(0)).bfloat16())
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight = unpack_weight(layer._weight, 8, outputs)
    expected = torch.nn.functional.linear(x[:2].float(), weight.float()).bfloat16()

    def check(result: torch.Tensor) -> None:
        assert result.shape == (rows, outputs) and result.is_contiguous()
        torch.testing.assert_close(result[:2], expected)

    # 34 MiB each: the first one may grow the cached block
    check(layer(x, None))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        layer(x, None)
    pages = rows * outputs * 2 // resource.getpagesize()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < pages
    held = layer(x, None)
    row = held[1]
    second = layer(2 * x, None)
    check(held)
    assert second.data_ptr() != held.data_ptr()
    del held
    # a view keeps it in use
    copy = row.clone()
    third = layer(4 * x, None)
    assert torch.equal(row, copy)
    assert torch.equal(third, 2 * second)
    # made in inference mode and used outside of it
    with torch.inference_mode():
        del row, second, third
        layer(x, None)
    check(layer(x, None).add_(0))
    # released on request, unless a tensor uses it
    layer(x, None)
    resident = psutil.Process().memory_info().rss
    native.release_memory()
    assert resident - psutil.Process().memory_info().rss > 30 << 20
    held = layer(x, None)
    native.release_memory()
    check(held)


def test_results_of_prompts_share_memory_whatever_the_lengths() -> None:
    up = PackedLinear.of(torch.randn(2048, 64, generator=torch.Generator().manual_seed(0)))
    down = PackedLinear.of(torch.randn(512, 2048, generator=torch.Generator().manual_seed(1)))
    pages: set[int] = set()

    def seen(result: torch.Tensor) -> torch.Tensor:
        size = resource.getpagesize()
        pages.update(range(result.data_ptr() // size, (result.data_ptr() + result.nbytes - 1) // size + 1))
        return result

    def prompt(rows: int) -> None:
        x = torch.zeros(rows, 64)
        for _ in range(5):
            first = seen(down(seen(up(x, None)), None))
            second = seen(down(seen(up(x, None)), None))
            assert first.data_ptr() != second.data_ptr()
            del first, second

    native.release_memory()
    for rows in (2000, 600, 1000):
        prompt(rows)
    # of 2,000 rows those of 2,048 and twice those of 512 numbers, each with a page more
    assert len(pages) <= 2000 * 4 * (2048 + 2 * 512) // resource.getpagesize() + 3
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    prompt(2000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2000


@pytest.mark.parametrize(
    ("rows", "inputs", "width"),
    [
        pytest.param(600, 1000, 512, id="copied once, inputs of no whole tile, results past the caches"),
        pytest.param(300, 5000, 48, id="copied slice by slice, an odd number of panels"),
        pytest.param(65, 20, 96, id="less than a tile of inputs"),
        pytest.param(33_000, 40, 16, id="more tasks of rows than a queue of tasks counts"),
    ],
)
def test_a_row_among_many_is_the_same_as_alone(isa: str, rows: int, inputs: int, width: int) -> None:
    generator = torch.Generator().manual_seed(4)
    layer = PackedLinear.of((torch.randn(2 * width, inputs, generator=generator) / inputs**0.5).bfloat16())
    bias = torch.randn(2 * width, generator=generator).bfloat16()
    x = torch.randn(rows, 2 * inputs, generator=generator).bfloat16()[:, inputs:]
    together = layer(x, bias)
    gated = gemm.packed_gated_linear(x, layer._weight, bias, 2 * width, "silu")
    wide = torch.nn.functional.linear(
        x.double(), unpack_weight(layer._weight, inputs, 2 * width).double(), bias.double()
    )
    torch.testing.assert_close(together.double(), wide, rtol=2**-8, atol=1e-4)
    for row in (0, 15, 31, 32, rows // 2, rows - 17, rows - 1):
        alone = x[row : row + 1]
        assert torch.equal(layer(alone, bias)[0], together[row]), row
        expected = gemm.packed_gated_linear(alone, layer._weight, bias, 2 * width, "silu")
        assert torch.equal(expected[0], gated[row]), row
