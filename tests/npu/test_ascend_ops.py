"""The ops on an Ascend device against their definitions in float64, and the operators that they launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_vllm.ops import elementwise, registry
from ascend_vllm.ops.ascend import IMPLEMENTATIONS
from ascend_vllm.ops.ascend_formats import format_weight, wants_fractal
from ascend_vllm.ops.gemm import PackedLinear
from ascend_vllm.ops.sampling import largest_top_k
from tests.npu.recorder import Recorder
from tests.op_checks import copies, error_of, results

NPU = torch.device("npu:0")
OPS = {name: spec for name, spec in registry.OPS.items() if "npu" in spec.devices}
# their results are indices: see the tests of draws and of log-probabilities below
INDICES = {"draw_tokens", "token_logprobs"}
CASES = [
    (name, dtype)
    for name, spec in sorted(OPS.items())
    if name not in INDICES
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    if dtype in spec.dtypes
]


def plain_rotary(arguments: list[Any]) -> list[torch.Tensor]:
    """Rotation with cosines and sines in the dtype of the query, as models' own code does it."""
    positions, query, key, head_size, table, is_neox = arguments
    elementwise.rotary_embedding(positions, query, key, head_size, table.to(query.dtype).float(), is_neox)
    return [query, key]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_as_accurate_as_the_definition(name: str, dtype: torch.dtype) -> None:
    spec = OPS[name]
    for case, arguments in enumerate(spec.inputs(dtype)):
        truth = results(spec.reference, spec, copies(arguments, torch.float64))
        plain = results(spec.reference, spec, copies(arguments))
        if name == "rotary_embedding":
            plain = plain_rotary(copies(arguments))
        got = results(getattr(torch.ops.ascend_vllm, name), spec, copies(arguments, device=NPU))
        for result, reference, exact in zip(got, plain, truth, strict=True):
            assert result.device == NPU
            assert result.dtype == reference.dtype
            allowed = 2 * error_of(reference, exact) + spec.tolerance
            error = error_of(result.cpu(), exact)
            assert error <= allowed, f"input {case}: error {error}, allowed {allowed}"


def test_every_op_that_npus_use_and_have_an_operator_for_has_a_kernel() -> None:
    """The other ops use torch's operators."""
    assert registry.ops_on_reference("npu") == ["apply_penalties"]
    assert set(IMPLEMENTATIONS) | {"apply_penalties"} == set(OPS)


def launched_by(name: str, *arguments: Any) -> list[str]:
    """Operators that an op launches; what is recorded does not show the inside of what is dispatched."""
    with Recorder() as recorder:
        IMPLEMENTATIONS[name](*arguments)
    return recorder.launched()


def test_what_a_layer_launches() -> None:
    """One operator for each op, and a step's angles are gathered once for all layers."""
    x, residual = torch.randn(2, 5, 256, dtype=torch.float16).to(NPU).unbind(0)
    weight = torch.ones(256, dtype=torch.float16, device=NPU)
    assert launched_by("rms_norm", x, weight, 1e-6) == ["npu::npu_rms_norm"]
    assert launched_by("fused_add_rms_norm", x, residual, weight, 1e-6) == ["npu::npu_add_rms_norm_v2"]
    assert launched_by("silu_and_mul", x) == ["npu::npu_swiglu"]
    table = torch.randn(50, 64, device=NPU)
    qkv = torch.randn(5, 6 * 64, dtype=torch.float16).to(NPU)
    query, key, _ = qkv.split_with_sizes([256, 64, 64], dim=1)
    positions = torch.arange(5, device=NPU)
    rotary = ("rotary_embedding", positions, query, key, 64, table, True)
    assert launched_by(*rotary)[-1:] == ["npu::npu_apply_rotary_pos_emb"]
    assert launched_by(*rotary) == ["npu::npu_apply_rotary_pos_emb"]


def test_each_step_has_angles_of_its_own() -> None:
    """Also with positions in the same memory, and with a second table, as with several models."""
    buffer = torch.zeros(3, dtype=torch.int64, device=NPU)
    one = torch.randn(3, 2 * 64, dtype=torch.float16)
    for table in torch.randn(2, 50, 64).unbind(0):
        for start in (0, 7):
            buffer.copy_(torch.arange(start, start + 3))
            query, key = one.to(NPU).split(64, dim=1)
            elementwise.rotary_embedding(buffer.view(-1), query, key, 64, table.to(NPU), True)
            expected_query, expected_key = one.clone().split(64, dim=1)
            elementwise.rotary_embedding(
                torch.arange(start, start + 3), expected_query, expected_key, 64, table.half().float(), True
            )
            torch.testing.assert_close(query.cpu(), expected_query, rtol=2e-3, atol=4e-3)
            torch.testing.assert_close(key.cpu(), expected_key, rtol=2e-3, atol=4e-3)


def test_rotations_beyond_the_fused_operator() -> None:
    """Too many heads for a core's memory are rotated by the other operator."""
    qkv = torch.randn(2, 130 * 128, dtype=torch.bfloat16).to(NPU)
    query, key = qkv.split_with_sizes([65 * 128, 65 * 128], dim=1)
    names = launched_by(
        "rotary_embedding", torch.arange(2, device=NPU), query, key, 128, torch.randn(9, 128).to(NPU), True
    )
    assert names.count("npu::npu_rotary_mul") == 2
    assert "npu::npu_apply_rotary_pos_emb" not in names


def check_draws(arguments: tuple[Any, ...]) -> None:
    """Each row's random number lies in the interval of the token that was drawn, within float32 rounding."""
    logits, temperature, top_k, top_p, min_p, uniforms, _, _ = arguments
    got = torch.ops.ascend_vllm.draw_tokens(*copies(arguments, device=NPU)).cpu()
    expected = OPS["draw_tokens"].reference(*copies(arguments, torch.float64))
    assert got.dtype == torch.int64
    for row in (got != expected).nonzero()[:, 0].tolist():
        # a token's interval begins and ends where the definition's result changes
        near = []
        for shift in (-2e-5, 2e-5):
            one = [argument[row : row + 1] for argument in (logits, temperature, top_k, top_p, min_p)]
            moved_uniform = (uniforms[row : row + 1].double() + shift).clamp(0, 1 - 2**-53)
            near.append(int(OPS["draw_tokens"].reference(*copies(tuple(one), torch.float64), moved_uniform, 0, True)))
        assert min(near) <= int(got[row]) <= max(near), f"row {row}: {int(got[row])}, not of {near}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_draws(dtype: torch.dtype) -> None:
    for arguments in OPS["draw_tokens"].inputs(dtype):
        check_draws(arguments)


@pytest.mark.parametrize(
    ("top_k", "top_p", "operators"),
    [
        ([0, -1], [1.0, 1.0], set()),
        ([0, 0], [0.9, 1.0], {"npu::npu_top_k_top_p"}),
        ([5, 1024], [1.0, 1.0], {"npu::npu_top_k_top_p"}),
        ([5, 1025], [1.0, 1.0], {"aten::sort"}),
        ([5, 0], [1.0, 0.5], {"aten::sort", "npu::npu_top_k_top_p"}),
    ],
)
def test_only_filters_that_are_on_are_computed(top_k: list[int], top_p: list[float], operators: set[str]) -> None:
    """The fused operator takes k up to 1024; beyond it, or where some rows have no limit, there is a sort."""
    vocab_size = 3000
    generator = torch.Generator().manual_seed(0)
    k, p = torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p)
    arguments = (
        torch.randn(2, vocab_size, generator=generator) * 3,
        torch.tensor([0.7, 1.3]),
        k,
        p,
        torch.zeros(2),
        torch.tensor([0.3, 0.999]),
        largest_top_k(k.numpy(), vocab_size),
        bool((p < 1).any()),
    )
    names = set(launched_by("draw_tokens", *copies(arguments, device=NPU)))
    assert names & {"aten::sort", "npu::npu_top_k_top_p"} == operators
    check_draws(arguments)


def test_equally_likely_tokens_stay_together() -> None:
    """The fused operator keeps one of them; the definition keeps all that equal the last one kept."""
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -5.0]]).repeat(3, 1)
    ids = torch.ops.ascend_vllm.draw_tokens(
        *(
            argument.to(NPU)
            for argument in (logits, torch.ones(3), torch.full((3,), 2).int(), torch.full((3,), 0.4), torch.zeros(3))
        ),
        torch.tensor([0.1, 0.5, 0.9], device=NPU),
        2,
        True,
    )
    assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_log_probabilities(dtype: torch.dtype) -> None:
    """As the definition says but for the order of equally likely tokens, within float32 rounding."""
    spec = OPS["token_logprobs"]
    for arguments in spec.inputs(dtype):
        ids, logprobs, ranks = (
            part.cpu() for part in torch.ops.ascend_vllm.token_logprobs(*copies(arguments, device=NPU))
        )
        _, exact, exact_ranks = spec.reference(*copies(arguments, torch.float64))
        assert (ids.dtype, logprobs.dtype, ranks.dtype) == (torch.int64, torch.float32, torch.int64)
        assert torch.equal(ids[:, 0], arguments[1])
        torch.testing.assert_close(logprobs.double(), exact, rtol=0, atol=1e-4, equal_nan=True)
        # the ids are those of the log-probabilities, and none is reported twice
        everywhere = arguments[0].double().log_softmax(-1)
        torch.testing.assert_close(everywhere.gather(-1, ids), exact, rtol=0, atol=1e-4, equal_nan=True)
        assert all(len(set(row)) == len(row) for row in ids[:, 1:].tolist())
        # different logits may have equal log-probabilities in float32
        assert (ranks <= exact_ranks).all() and (ranks >= exact_ranks - everywhere.shape[1] // 100).all()


@pytest.mark.parametrize(
    ("dtype", "enable_nz", "quantized", "wanted"),
    [
        (torch.float16, 1, False, False),
        (torch.float16, 2, False, True),
        (torch.bfloat16, 2, False, True),
        (torch.int8, 1, True, True),
        (torch.int8, 0, True, False),
        (torch.float32, 2, False, False),
    ],
)
def test_which_weights_have_the_fractal_format(
    dtype: torch.dtype, enable_nz: int, quantized: bool, wanted: bool
) -> None:
    assert wants_fractal(dtype, enable_nz, quantized=quantized) == wanted


@pytest.mark.parametrize(("enable_nz", "weight_format"), [(None, 2), ("0", 2), ("1", 2), ("2", 29)])
@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.float16, True), (torch.bfloat16, False)])
def test_linear_layers(
    enable_nz: str | None, weight_format: int, dtype: torch.dtype, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)
    if enable_nz is not None:
        monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", enable_nz)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(70, 50, generator=generator) / 7).to(dtype)
    x = torch.randn(9, 150, generator=generator).to(dtype)[:, 50:100]
    bias = torch.randn(70, generator=generator).to(dtype) if with_bias else None
    arranged = format_weight(weight.to(NPU))
    assert torch.ops.npu.get_npu_format(arranged) == weight_format
    result = PackedLinear.of(weight.to(NPU))(x.to(NPU), None if bias is None else bias.to(NPU))
    truth = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    plain = torch.nn.functional.linear(x, weight, bias)
    assert error_of(result.cpu(), truth) <= 2 * error_of(plain, truth)
