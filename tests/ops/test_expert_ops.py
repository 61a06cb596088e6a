"""Mixtures of experts: routing of each family, and MLPs whose results do not depend on the other tokens."""

from __future__ import annotations

import math

import pytest
import torch

from ascend_vllm.ops import experts
from ascend_vllm.ops.tape import Tapes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _case(
    dtype: torch.dtype, tokens: int = 90, hidden: int = 77, inner: int = 40, num_experts: int = 6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    gate, up = (torch.randn(2, num_experts, inner, hidden, generator=generator) / math.sqrt(hidden)).to(dtype)
    down = (torch.randn(num_experts, hidden, inner, generator=generator) / math.sqrt(inner)).to(dtype)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    logits = torch.randn(tokens, num_experts, generator=generator)
    ids, weights = experts.route_tokens(logits, None, 2, "softmax", True, 1, 1, 1.0)
    return x, ids, weights, *experts.pack_experts(gate, up, down)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_token_does_not_depend_on_the_others(isa: str, dtype: torch.dtype) -> None:
    x, ids, weights, gate_up, down = _case(dtype, tokens=300)
    everything = experts.experts_mlp(x, ids, weights, gate_up, down, "silu")
    for first, last in [(0, 1), (7, 8), (0, 2), (5, 21), (100, 237)]:
        part = slice(first, last)
        alone = experts.experts_mlp(x[part], ids[part].clone(), weights[part].clone(), gate_up, down, "silu")
        assert torch.equal(alone, everything[part]), (first, last)


def test_more_tokens_than_the_workspace_holds_are_computed_in_parts() -> None:
    # 64 tokens of 8 choices of a very wide expert are more than 128 MiB
    generator = torch.Generator().manual_seed(0)
    inner, hidden = 40_000, 8
    gate, up = torch.randn(2, 8, inner, hidden, generator=generator) / 3
    packed = experts.pack_experts(gate, up, torch.randn(8, hidden, inner, generator=generator) / 200)
    x = torch.randn(130, hidden, generator=generator)
    ids, weights = experts.route_tokens(torch.randn(130, 8, generator=generator), None, 8, "softmax", True, 1, 1, 1.0)
    got = experts.experts_mlp(x, ids, weights, *packed, "silu")
    each = [
        experts.experts_mlp(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], *packed, "silu") for t in range(130)
    ]
    assert torch.equal(got, torch.cat(each))


def test_experts_of_two_ranks_add_up() -> None:
    x, ids, weights, gate_up, down = _case(torch.float32)
    parts = [
        experts.experts_mlp(x, ids, weights, gate_up[half].contiguous(), down[half].contiguous(), "silu", half.start)
        for half in (slice(0, 4), slice(4, 6))
    ]
    together = experts.experts_mlp(x, ids, weights, gate_up, down, "silu")
    torch.testing.assert_close(parts[0] + parts[1], together, atol=1e-6, rtol=1e-6)


def test_a_tape_computes_with_the_experts_of_the_moment() -> None:
    x, _, _, gate_up, down = _case(torch.float32, tokens=3)
    logits = torch.randn(3, 6)

    def step() -> torch.Tensor:
        ids, weights = experts.route_tokens(logits, None, 2, "softmax", True, 1, 1, 1.0)
        result: torch.Tensor = experts.experts_mlp(x, ids, weights, gate_up, down, "silu")
        return result

    tapes = Tapes()
    recorded = tapes.record(0, step)
    before = recorded.clone()
    logits.copy_(-logits)
    tapes.replay(0)
    assert torch.equal(recorded, step())
    assert not torch.equal(recorded, before)


def test_what_does_not_fit_is_refused() -> None:
    x, ids, weights, gate_up, down = _case(torch.float32, tokens=2)
    with pytest.raises(RuntimeError, match="not those of Float experts of 76 inputs"):
        experts.experts_mlp(x[:, :76], ids, weights, gate_up, down, "silu")
    with pytest.raises(RuntimeError, match="ids must be a contiguous int32 matrix of 2 rows"):
        experts.experts_mlp(x, ids.long(), weights, gate_up, down, "silu")
    with pytest.raises(ValueError, match="activation must be 'silu', 'gelu' or 'gelu_tanh', got 'relu'"):
        experts.experts_mlp(x, ids, weights, gate_up, down, "relu", 0)
    with pytest.raises(RuntimeError, match="3 of 8 experts cannot be chosen from 1 of 4 groups"):
        experts.route_tokens(torch.zeros(1, 8), None, 3, "softmax", True, 4, 1, 1.0)


# ---- routing, against formulas of the families --------------------------------------------------------------------


def test_of_equal_experts_the_first_is_chosen(isa: str) -> None:
    ids, weights = experts.route_tokens(torch.zeros(2, 5), None, 2, "softmax", False, 1, 1, 1.0)
    assert ids.tolist() == [[0, 1]] * 2
    torch.testing.assert_close(weights, torch.full((2, 2), 0.2))


def test_logits_that_are_no_numbers_choose_experts_that_exist(isa: str) -> None:
    for value in (math.nan, math.inf, -math.inf):
        ids, _ = experts.route_tokens(torch.full((3, 6), value), None, 2, "softmax", True, 3, 2, 1.0)
        assert bool(((ids >= 0) & (ids < 6)).all())


def test_mixtral_weights_are_the_softmax_of_the_chosen() -> None:
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    ids, weights = experts.route_tokens(logits, None, 2, "softmax", True, 1, 1, 1.0)
    best, chosen = logits.topk(2)
    assert torch.equal(ids.long(), chosen)
    torch.testing.assert_close(weights, best.softmax(dim=-1))


def test_deepseek_v2_chooses_within_groups() -> None:
    """Groups count as their best expert; the weights are not normalised, but scaled."""
    logits = torch.randn(40, 16, generator=torch.Generator().manual_seed(2))
    ids, weights = experts.route_tokens(logits, None, 3, "softmax", False, 4, 2, 16.0)
    scores = logits.softmax(dim=-1)
    for token in range(40):
        groups = scores[token].view(4, 4).amax(dim=-1).topk(2).indices.tolist()
        allowed = [expert for expert in range(16) if expert // 4 in groups]
        expected = sorted(allowed, key=lambda expert: -float(scores[token, expert]))[:3]
        assert ids[token].tolist() == expected
        torch.testing.assert_close(weights[token], 16 * scores[token, expected])


def test_deepseek_v3_corrects_the_choice_but_not_the_weights() -> None:
    """Groups count as the sum of their two best corrected scores."""
    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(40, 16, generator=generator), torch.randn(16, generator=generator)
    ids, weights = experts.route_tokens(logits, bias, 4, "sigmoid", True, 4, 2, 2.5)
    scores = logits.sigmoid()
    for token in range(40):
        corrected = scores[token] + bias
        groups = corrected.view(4, 4).topk(2).values.sum(dim=-1).topk(2).indices.tolist()
        allowed = [expert for expert in range(16) if expert // 4 in groups]
        expected = sorted(allowed, key=lambda expert: -float(corrected[expert]))[:4]
        assert ids[token].tolist() == expected
        chosen = scores[token, expected]
        torch.testing.assert_close(weights[token], 2.5 * chosen / chosen.sum())
