"""lora_shrink and lora_expand against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from tests.npu_kernels.conftest import Kernels

DTYPES = (torch.float16, torch.bfloat16)

# tokens, hidden size (or outputs), rank, adapters, cores
SHRINK_CASES = [
    (1, 16, 8, 1, 1),
    (3, 48, 16, 2, 4),
    (5, 256, 64, 3, 2),
    (7, 272, 32, 2, 3),
    (2, 1040, 128, 2, 40),
    (9, 528, 72, 4, 5),
    (70, 48, 16, 3, 3),
]
EXPAND_CASES = [
    (1, 1, 8, 1, 1),
    (3, 127, 16, 2, 4),
    (5, 129, 64, 3, 2),
    (4, 300, 72, 2, 40),
    (2, 200, 256, 2, 3),
    (2, 70, 512, 2, 3),
    (70, 40, 16, 3, 3),
]


def adapters_of(tokens: int, adapters: int, generator: torch.Generator) -> torch.Tensor:
    """[T] int64: an adapter of each token, or none."""
    return torch.randint(-1, adapters, (tokens,), generator=generator)


def order_of(adapters: torch.Tensor) -> torch.Tensor:
    """[T]: the tokens, by adapter."""
    return adapters.argsort(stable=True)


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("case", SHRINK_CASES)
def test_shrink(kernels: Kernels, case: tuple[int, int, int, int, int], dtype: int) -> None:
    tokens, hidden, rank, num_adapters, cores = case
    generator = torch.Generator().manual_seed(rank)
    # tokens lie apart, as in a slice
    x = torch.randn(tokens, hidden + 16, generator=generator).to(DTYPES[dtype])
    weights = torch.randn(num_adapters, rank, hidden, generator=generator).to(DTYPES[dtype])
    adapters = adapters_of(tokens, num_adapters, generator)
    before = torch.randn(tokens, rank, generator=generator)
    y = before.clone()
    numbers = (dtype, tokens, hidden, rank, x.stride(0))
    kernels.run("lora_shrink", (x, weights, adapters, order_of(adapters)), (y,), numbers, reals=(0.5,), cores=cores)
    exact = 0.5 * torch.einsum("th,trh->tr", x[:, :hidden].double(), weights[adapters.clamp(0)].double())
    none = adapters < 0
    assert torch.equal(y[none], before[none])
    plain = 0.5 * torch.einsum("th,trh->tr", x[:, :hidden].float(), weights[adapters.clamp(0)].float())
    bound = 2 * (plain - exact).abs().max() + 1e-6
    assert bool((((y - exact).abs() <= bound) | none[:, None]).all())


@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("case", EXPAND_CASES)
def test_expand(kernels: Kernels, case: tuple[int, int, int, int, int], dtype: int) -> None:
    tokens, outputs, rank, num_adapters, cores = case
    generator = torch.Generator().manual_seed(rank)
    offset = 5
    x = torch.randn(tokens, rank, generator=generator)
    weights = torch.randn(num_adapters, outputs, rank, generator=generator).to(DTYPES[dtype])
    adapters = adapters_of(tokens, num_adapters, generator)
    before = torch.randn(tokens, outputs + offset + 3, generator=generator).to(DTYPES[dtype])
    y = before.clone()
    numbers = (dtype, tokens, rank, outputs, y.stride(0), offset)
    kernels.run("lora_expand", (x, weights, adapters, order_of(adapters)), (y,), numbers, cores=cores)
    exact = before.double()
    added = torch.einsum("tr,tor->to", x.double(), weights[adapters.clamp(0)].double())
    exact[:, offset : offset + outputs] += added * (adapters >= 0)[:, None]
    # columns beside the adapter's, and tokens without one, are not touched
    columns = torch.arange(y.shape[1])
    is_added = ((columns >= offset) & (columns < offset + outputs))[None, :] & (adapters >= 0)[:, None]
    assert torch.equal(y[~is_added], before[~is_added])
    bound = 2 * (exact.to(DTYPES[dtype]).double() - exact).abs().max()
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("lora_shrink", (0, 1, 24, 8, 24), "hidden: 24 is not a multiple of 16"),
        ("lora_shrink", (0, 1, 16, 12, 16), "rank: 12 is not a multiple of 8"),
        ("lora_shrink", (0, 1, 16, 8, 8), "x_stride: tokens overlap"),
        ("lora_expand", (0, 1, 4, 16, 16, 0), "rank: 4 is not a multiple of 8"),
        ("lora_expand", (0, 1, 8, 16, 16, 1), "y_stride: tokens overlap"),
    ],
)
def test_arguments_are_checked(kernels: Kernels, name: str, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.run(name, (torch.zeros(1),) * 4, (torch.zeros(1),), numbers, reals=(1.0,))


@pytest.mark.parametrize("cores", [1, 40])
def test_an_adapter_is_read_once_for_all_its_tokens(kernels: Kernels, cores: int) -> None:
    """And a token's result depends neither on the order nor on other tokens."""
    tokens, hidden, rank, outputs = 32, 2048, 16, 1000
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(tokens, hidden, generator=generator).half()
    a, b = (torch.randn(4, *shape, generator=generator).half() for shape in ((rank, hidden), (outputs, rank)))
    adapters = torch.arange(tokens) % 4
    results = []
    for order in (order_of(adapters), torch.arange(tokens)):
        shrunk, y = torch.zeros(tokens, rank), torch.zeros(tokens, outputs).half()
        numbers = (0, tokens, hidden, rank, hidden)
        first = kernels.run("lora_shrink", (x, a, adapters, order), (shrunk,), numbers, reals=(1.0,), cores=cores)
        numbers = (0, tokens, rank, outputs, outputs, 0)
        second = kernels.run("lora_expand", (shrunk, b, adapters, order), (y,), numbers, cores=cores)
        results.append((shrunk, y, first.bytes_in, second.bytes_in))
    (shrunk, y, *once), (other, other_y, *often) = results
    assert torch.equal(shrunk, other)
    assert torch.equal(y, other_y)
    # x is read for every tile of ranks, x and y for every tile of outputs
    assert once[0] <= a.nbytes + x.nbytes * (rank // 2 if cores > 1 else rank // 8)
    assert once[1] <= b.nbytes + y.nbytes + shrunk.nbytes * 8
    assert all(few < many / 2 for few, many in zip(once, often, strict=True))
