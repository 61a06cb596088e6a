"""Products of matrices on the device, plain and with fractal weights, against the same on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch_npu
from torch.nn import functional

from tests.npu.launches import Case, Values, ids, launched_by

FRACTAL_NZ = 29

_values = Values(5)
A = _values.normal(4, 6)
W = _values.normal(5, 6)
C = _values.normal(4, 5)
H = _values.normal(2, 4, 6, dtype=torch.bfloat16)
K = _values.normal(2, 6, 5, dtype=torch.bfloat16)
BIAS = _values.normal(5)

CASES = [
    Case("aclnnMm", torch.mm, A, W.t()),
    Case("aclnnMm", torch.mm, H[0], K[1]),
    Case("aclnnMatmul", torch.matmul, H[:, None], K[None]),
    Case("aclnnBatchMatMul", torch.bmm, H, K),
    Case("aclnnMatmul", functional.linear, A.half(), W.half()),
    Case("aclnnAddmm", lambda a, w, b: functional.linear(a, w, b), A, W, BIAS),
    Case("aclnnAddmm", lambda c, a, w: torch.addmm(c, a, w.t(), beta=0.5, alpha=2), C, A, W),
    Case("aclnnInplaceAddmm", lambda c, a, w: c.clone().addmm_(a, w.t()), C, A, W),
    Case("aclnnBaddbmm", lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5), torch.ones(2, 4, 5).bfloat16(), H, K),
    Case("aclnnMv", torch.mv, A, W[0]),
    Case("aclnnDot", torch.dot, A[0], W[0]),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_the_device_agrees_with_the_cpu(case: Case) -> None:
    case.check()


@pytest.fixture
def fractal_weights() -> Iterator[None]:
    """Lets torch_npu make tensors in layouts of the matrix unit."""
    torch_npu.npu.config.allow_internal_format = True
    yield
    torch_npu.npu.config.allow_internal_format = False


@pytest.mark.usefixtures("fractal_weights")
@pytest.mark.parametrize(
    ("operator", "rows", "columns"), [("aclnnMatmulWeightNz", 33, 20), ("aclnnAddmmWeightNz", 48, 64)]
)
def test_fractal_weight_of_a_linear_layer(operator: str, rows: int, columns: int) -> None:
    x, weight = _values.normal(3, columns, dtype=torch.float16), _values.normal(rows, columns, dtype=torch.float16)
    bias = _values.normal(rows, dtype=torch.float16) if operator == "aclnnAddmmWeightNz" else None
    fractal = torch_npu.npu_format_cast(weight.npu(), FRACTAL_NZ)
    assert torch_npu.get_npu_format(fractal) == FRACTAL_NZ
    on_device = None if bias is None else bias.npu()
    result, launched = launched_by(lambda: functional.linear(x.npu(), fractal, on_device))
    assert operator in launched
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert (result.cpu().double() - exact).abs().max() <= 2e-3 * exact.abs().max()


def test_product_per_head_with_a_transposed_result() -> None:
    x, weight = _values.normal(3, 4, 16, dtype=torch.float16), _values.normal(4, 16, 32, dtype=torch.float16)
    result, launched = launched_by(
        lambda: torch_npu.npu_transpose_batchmatmul(
            x.npu(), weight.npu(), perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        )
    )
    assert "aclnnTransposeBatchMatMul" in launched
    exact = torch.einsum("bhk,hkn->bhn", x.double(), weight.double())
    assert (result.cpu().double() - exact).abs().max() <= 2e-3 * exact.abs().max()
