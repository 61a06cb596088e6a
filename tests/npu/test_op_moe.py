"""The operators of mixtures of experts on the device against plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

from tests.npu.launches import Values, launched_by, takes
from tests.npu.test_refusals import refused

TOKENS, EXPERTS, TOP, HIDDEN, INNER = 7, 8, 2, 32, 16

_values = Values(7)
X = _values.normal(TOKENS, HIDDEN, dtype=torch.bfloat16)
LOGITS = _values.normal(TOKENS, EXPERTS)
CHOSEN = torch.stack(
    [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:TOP] for i in range(TOKENS)]
)
IDS = CHOSEN.to(torch.int32)
WEIGHTS = _values.positive(TOKENS, TOP, dtype=torch.bfloat16)
MATRICES = _values.normal(EXPERTS, HIDDEN, INNER, dtype=torch.bfloat16)
ORDER = torch.sort(CHOSEN.flatten(), stable=True)[1]
COUNTS = torch.bincount(CHOSEN.flatten(), minlength=EXPERTS)


def _close(actual: torch.Tensor, exact: torch.Tensor, part: float = 1e-2) -> bool:
    return bool((actual.cpu().double() - exact.double()).abs().max() <= part * exact.double().abs().max())


@takes("aclnnMoeGatingTopKSoftmax")
def test_gating_by_softmax() -> None:
    weights, chosen, rows = torch_npu.npu_moe_gating_top_k_softmax(LOGITS.npu(), k=TOP)
    expected, indices = torch.softmax(LOGITS, -1).topk(TOP, -1)
    assert torch.allclose(weights.cpu(), expected)
    assert torch.equal(chosen.cpu().long(), indices)
    assert torch.equal(rows.cpu().long(), torch.arange(TOKENS * TOP).view(TOP, TOKENS).t())


@takes("aclnnMoeGatingTopKSoftmaxV2")
def test_gating_with_weights_that_sum_up_to_one() -> None:
    weights, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(LOGITS.npu(), k=TOP, renorm=1)
    best, indices = LOGITS.topk(TOP, -1)
    assert torch.allclose(weights.cpu(), torch.softmax(best, -1))
    assert torch.equal(chosen.cpu().long(), indices)


@takes("aclnnMoeGatingTopK")
@pytest.mark.parametrize("norm_type", [0, 1], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("best_two", [0, 1])
def test_gating_within_the_best_groups(norm_type: int, best_two: int) -> None:
    experts, size = 16, 4
    logits, bias = _values.normal(TOKENS, experts), _values.normal(experts)
    weights, chosen, _ = torch_npu.npu_moe_gating_top_k(
        logits.npu(),
        TOP,
        bias=bias.npu(),
        k_group=2,
        group_count=experts // size,
        group_select_mode=best_two,
        norm_type=norm_type,
        routed_scaling_factor=2.5,
        eps=1e-20,
    )
    scores = torch.softmax(logits, -1) if norm_type == 0 else torch.sigmoid(logits)
    biased = (scores + bias).view(TOKENS, -1, size)
    strength = biased.topk(1 + best_two)[0].sum(-1)
    for token in range(TOKENS):
        groups = strength[token].topk(2)[1].tolist()
        allowed = [size * group + i for group in groups for i in range(size)]
        best = sorted(allowed, key=lambda expert: -float((scores + bias)[token, expert]))[:TOP]
        assert chosen[token].tolist() == best
        expected = scores[token, best]
        if norm_type == 1:
            expected = expected / expected.sum()
        assert torch.allclose(weights[token].cpu(), expected * 2.5)


def _route(ids: torch.Tensor = IDS, **options: Any) -> list[torch.Tensor]:
    routing: dict[str, Any] = {
        "active_num": TOKENS * TOP,
        "expert_num": EXPERTS,
        "expert_tokens_num_flag": True,
        "expert_tokens_num_type": 1,
        "active_expert_range": [0, EXPERTS],
        "quant_mode": -1,
        "row_idx_type": 0,
    }
    return [tensor.cpu() for tensor in torch_npu.npu_moe_init_routing_v2(X.npu(), ids.npu(), **(routing | options))]


@takes("aclnnMoeInitRoutingV3")
def test_rows_are_sorted_by_expert() -> None:
    rows, places, counts, _ = _route()
    assert torch.equal(rows, X[ORDER // TOP])
    assert torch.equal(places.long(), torch.argsort(ORDER))
    assert torch.equal(counts, COUNTS)


def test_rows_of_experts_elsewhere_are_left_out() -> None:
    rows, places, counts, _ = _route(active_expert_range=[2, 5], expert_tokens_num_type=0)
    own = [int(place) for place in ORDER if 2 <= int(CHOSEN.flatten()[place]) < 5]
    assert torch.equal(rows[: len(own)], X[torch.tensor(own) // TOP])
    assert bool(rows[len(own) :].isnan().all())
    assert torch.equal(counts, COUNTS[2:5].cumsum(0))
    assert (places >= 0).sum() == len(own)


def test_rows_are_quantised_on_the_way() -> None:
    rows, _, _, scale = _route(quant_mode=1)
    sorted_rows = X[ORDER // TOP].float()
    expected = sorted_rows.abs().amax(-1) / 127
    assert torch.allclose(scale, expected)
    assert torch.equal(rows, torch.round(sorted_rows / expected[:, None]).to(torch.int8))


def _grouped(rows: torch.Tensor, ends: list[int]) -> torch.Tensor:
    starts = [0, *ends[:-1]]
    parts = zip(starts, ends, MATRICES, strict=True)
    return torch.cat([rows[start:end].double() @ matrix.double() for start, end, matrix in parts])


@pytest.mark.parametrize(("listed", "fractal"), [("counts", False), ("ends", False), ("counts", True)])
def test_products_per_expert(listed: str, fractal: bool) -> None:
    torch_npu.npu.config.allow_internal_format = fractal
    weight = torch_npu.npu_format_cast(MATRICES.npu(), 29) if fractal else MATRICES.npu()
    rows = X[ORDER // TOP]
    groups = COUNTS if listed == "counts" else COUNTS.cumsum(0)
    (result,), launched = launched_by(
        lambda: torch_npu.npu_grouped_matmul(
            [rows.npu()],
            [weight],
            group_list=groups.npu(),
            split_item=2,
            group_type=0,
            group_list_type=1 if listed == "counts" else 0,
        )
    )
    assert ("aclnnGroupedMatmulWeightNz" if fractal else "aclnnGroupedMatmulV5") in launched
    torch_npu.npu.config.allow_internal_format = False
    assert _close(result, _grouped(rows, COUNTS.cumsum(0).tolist()))


def test_rows_of_no_expert_are_undefined() -> None:
    """Weights may be transposed views, which torch_npu passes on as they are."""
    rows, ends = X[:7], [2, 5, 5, 6, 6, 6, 6, 6]
    weights = MATRICES.npu()
    for weight in (weights, weights.transpose(1, 2).contiguous().transpose(1, 2)):
        (result,) = torch_npu.npu_grouped_matmul(
            [rows.npu()], [weight], group_list=torch.tensor(ends).npu(), split_item=2, group_type=0
        )
        assert _close(result[:6], _grouped(rows, ends))
        assert bool(result[6:].isnan().all())


def test_quantised_products_per_expert() -> None:
    rows = _values.integers(-127, 128, TOKENS * TOP, HIDDEN, dtype=torch.int8)
    matrices = _values.integers(-127, 128, EXPERTS, HIDDEN, INNER, dtype=torch.int8)
    scale, token_scale = _values.positive(EXPERTS, INNER, dtype=torch.bfloat16), _values.positive(TOKENS * TOP)
    (result,) = torch_npu.npu_grouped_matmul(
        [rows.npu()],
        [matrices.npu()],
        scale=[scale.npu()],
        per_token_scale=[token_scale.npu()],
        group_list=COUNTS.npu(),
        split_item=2,
        group_type=0,
        group_list_type=1,
        output_dtype=torch.bfloat16,
    )
    expert = CHOSEN.flatten()[ORDER]
    exact = torch.einsum("tk,tkn->tn", rows.double(), matrices[expert].double())
    assert _close(result, exact * scale[expert].double() * token_scale.double()[:, None])


@takes("aclnnMoeTokenPermute", "aclnnMoeTokenUnpermute")
def test_tokens_go_out_and_come_back() -> None:
    rows, places = torch_npu.npu_moe_token_permute(X.npu(), IDS.npu())
    assert torch.equal(rows.cpu(), X[ORDER // TOP])
    back = torch_npu.npu_moe_token_unpermute(rows, places, probs=WEIGHTS.npu())
    assert _close(back, X.double() * WEIGHTS.double().sum(1, keepdim=True))


@takes("aclnnMoeFinalizeRoutingV2")
def test_finalising_adds_the_skip_connection() -> None:
    rows, places, _, _ = _route()
    result = torch_npu.npu_moe_finalize_routing(
        rows.npu(), X.npu(), None, None, WEIGHTS.npu(), places.npu(), IDS.npu(), drop_pad_mode=2
    )
    assert _close(result, X.double() * (1 + WEIGHTS.double().sum(1, keepdim=True)))


def _gate(experts: int = 64, k: int = 4, **options: Any) -> None:
    groups = {"k_group": 2, "group_count": 4} | options
    torch_npu.npu_moe_gating_top_k(torch.zeros(3, experts).npu(), k, **groups)


def _multiply(rows: torch.Tensor, weights: torch.Tensor, groups: list[int], kind: int = 0, **options: Any) -> None:
    parts = {"split_item": 2, "group_type": 0, "group_list_type": kind, "group_list": torch.tensor(groups).npu()}
    torch_npu.npu_grouped_matmul([rows.npu()], [weights], **(parts | options))


def _multiply_int8(scale: torch.dtype, result: torch.dtype) -> None:
    rows, weights = torch.ones(4, 32, dtype=torch.int8), torch.ones(2, 32, 16, dtype=torch.int8)
    _multiply(rows, weights.npu(), [2, 4], scale=[torch.ones(2, 16, dtype=scale).npu()], output_dtype=result)


def _unpermute(indices: list[int], weights: torch.Tensor) -> None:
    torch_npu.npu_moe_token_unpermute(X[:4].npu(), torch.tensor(indices, dtype=torch.int32).npu(), weights.npu())


def _finalize(places: list[int], scales: torch.Tensor) -> None:
    rows = torch.tensor(places, dtype=torch.int32).npu()
    torch_npu.npu_moe_finalize_routing(X[:4].npu(), None, None, None, scales.npu(), rows, None, drop_pad_mode=2)


HALVES = torch.ones(4, 32, dtype=torch.float16)
STACK = torch.ones(2, 32, 16, dtype=torch.float16)
# operator, argument, call
REFUSED: list[tuple[str, str, Callable[[], object]]] = [
    (
        "aclnnMoeGatingTopKSoftmax",
        "k",
        lambda: torch_npu.npu_moe_gating_top_k_softmax(torch.zeros(1, 2000).npu(), k=1025),
    ),
    ("aclnnMoeGatingTopK", "x", lambda: _gate(2052)),
    ("aclnnMoeGatingTopK", "groupCount", lambda: _gate(64, group_count=3)),
    ("aclnnMoeGatingTopK", "groupCount", lambda: _gate(64, group_count=32)),
    ("aclnnMoeGatingTopK", "groupCount", lambda: _gate(2046, group_count=66)),
    ("aclnnMoeGatingTopK", "kGroup", lambda: _gate(k_group=5)),
    ("aclnnMoeGatingTopK", "k", lambda: _gate(k=33)),
    ("aclnnMoeGatingTopK", "renorm", lambda: _gate(renorm=1)),
    ("aclnnMoeGatingTopK", "normType", lambda: _gate(norm_type=2)),
    ("aclnnMoeInitRoutingV3", "expertNum", lambda: _route(expert_num=10241)),
    ("aclnnMoeInitRoutingV3", "expertIdx", lambda: _route(IDS + 1)),
    ("aclnnMoeInitRoutingV3", "expertIdx", lambda: _route(IDS - EXPERTS)),
    ("aclnnGroupedMatmulV5", "groupList", lambda: _multiply(HALVES, STACK.npu(), [2, 3, 4])),
    ("aclnnGroupedMatmulV5", "groupList", lambda: _multiply(HALVES, STACK.npu(), [2, 5])),
    ("aclnnGroupedMatmulV5", "weight", lambda: _multiply(HALVES[:, :31].contiguous(), STACK.npu(), [2, 4])),
    ("aclnnGroupedMatmulV5", "weight[0]", lambda: _multiply(HALVES.bfloat16(), STACK.npu(), [2, 4])),
    (
        "aclnnGroupedMatmulV5",
        "weight",
        lambda: _multiply(HALVES[:, :1].contiguous(), torch.ones(2, 1, 65536).half().npu(), [2, 4]),
    ),
    (
        "aclnnGroupedMatmulV5",
        "x",
        lambda: _multiply(torch.ones(1, 65536).half(), torch.ones(1, 65536, 1).half().npu(), [1]),
    ),
    ("aclnnGroupedMatmulV5", "scale[0]", lambda: _multiply_int8(torch.float32, torch.bfloat16)),
    ("aclnnGroupedMatmulV5", "scale[0]", lambda: _multiply_int8(torch.bfloat16, torch.float16)),
    ("aclnnMoeTokenUnpermute", "sortedIndices", lambda: _unpermute([0, 1, 2, -1], torch.ones(2, 2))),
    ("aclnnMoeTokenUnpermute", "sortedIndices", lambda: _unpermute([0, 1, 2, 2], torch.ones(2, 2))),
    ("aclnnMoeTokenUnpermute", "sortedIndices", lambda: _unpermute([0, 1, 2, 4], torch.ones(2, 2))),
    ("aclnnMoeFinalizeRoutingV2", "expandedRowIdx", lambda: _finalize([0, 1, 2, -1], torch.ones(2, 2).bfloat16())),
    ("aclnnMoeFinalizeRoutingV2", "scales", lambda: _finalize([0, 1, 2, 3], torch.ones(2, 2))),
]


@pytest.mark.parametrize(("operator", "argument", "call"), REFUSED)
def test_what_the_documentation_rules_out_is_refused(
    operator: str, argument: str, call: Callable[[], object]
) -> None:
    refused(call, operator, argument)


@pytest.mark.parametrize("bias", [torch.ones(64).half(), torch.ones(63)])
def test_torch_npu_itself_refuses_corrections_of_another_dtype_or_length(bias: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"dtype of x and bias should be same|bias first dim should be same as x"):
        _gate(bias=bias.npu())


def test_counts_of_a_single_group_in_tiles_are_refused() -> None:
    torch_npu.npu.config.allow_internal_format = True
    tiles = torch_npu.npu_format_cast(STACK[:1].npu(), 29)
    torch_npu.npu.config.allow_internal_format = False
    _multiply(HALVES, tiles, [4])
    refused(lambda: _multiply(HALVES, tiles, [4], 1), "aclnnGroupedMatmulWeightNz", "groupList")
