"""Mixtures of experts: which experts a token uses, and their MLPs.

Letters: T tokens, H hidden, E experts, C experts that a token uses, I width inside an expert, P panels of 16 outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ascend_vllm.ops.gemm import GATED_ACTIVATIONS, PANEL, pack_panels, unpack_weight
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import define_op
from ascend_vllm.platforms.host_memory import weight_memory


def _route_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, experts, choices, scoring, renormalize, groups, chosen groups, scale, has a bias
    cases = [(0, 4, 2, "softmax", True, 1, 1, 1.0, False), (1, 8, 2, "softmax", True, 1, 1, 1.0, False)]
    cases += [(5, 60, 4, "softmax", False, 1, 1, 1.0, False), (3, 1, 1, "sigmoid", False, 1, 1, 2.0, True)]
    cases += [(70, 128, 8, "softmax", True, 1, 1, 1.0, False), (9, 160, 6, "softmax", False, 8, 3, 16.0, False)]
    cases += [(17, 256, 8, "sigmoid", True, 8, 4, 2.5, True), (4, 64, 6, "sigmoid", False, 4, 2, 1.0, False)]
    for seed, (tokens, experts, choices, scoring, renormalize, groups, chosen, scale, has_bias) in enumerate(cases):
        generator = torch.Generator().manual_seed(seed)
        # exact in every dtype, and no two of a token are equal
        ranks = torch.rand(tokens, experts, generator=generator).argsort(dim=-1)
        wide = ((ranks - experts // 2) / 16).to(dtype).repeat(1, 2)
        logits = wide[:, experts:] if seed % 2 else wide[:, :experts].contiguous()
        bias = torch.randn(experts, generator=generator) / 8 if has_bias else None
        yield logits, bias, choices, scoring, renormalize, groups, chosen, scale


@define_op(inputs=_route_inputs, devices=("cpu",), recordable=True)
def route_tokens(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    num_choices: int,
    scoring: str,
    renormalize: bool,
    num_groups: int,
    num_chosen_groups: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts of each token.

    Of equal experts the one with the smaller number is chosen.

    Args:
        logits: [T, E] float, the router's result; rows may be strided.
        bias: [E] float32, added to scores for the choice only (DeepSeek V3's `e_score_correction_bias`), or None.
        num_choices: C, experts of a token.
        scoring: "softmax" or "sigmoid", which makes scores of the logits, in float32.
        renormalize: the weights of a token are divided by their sum.
        num_groups: groups of as many experts each, of which a token uses a few; 1: no groups.
        num_chosen_groups: how many. A group is as good as its best expert; with a bias, as the sum of its best two.
        scale: factor on the weights, at last.

    Returns:
        Experts [T, C] int32, best first, and their weights [T, C] float32.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(dim=-1) if scoring == "softmax" else wide.sigmoid()
    ranks = scores if bias is None else scores + bias
    if num_groups > 1:
        groups = ranks.view(len(ranks), num_groups, ranks.shape[1] // num_groups)
        best = groups.amax(dim=-1) if bias is None else groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        chosen = best.argsort(dim=-1, descending=True, stable=True)[:, :num_chosen_groups]
        is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
        ranks = groups.masked_fill(~is_chosen.unsqueeze(-1), -math.inf).flatten(1)
    ids = ranks.argsort(dim=-1, descending=True, stable=True)[:, :num_choices]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids.int(), weights * scale


def packed_stack(experts: int, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for `experts` weights [N, K] in panels, one after the other, zeroed."""
    panels = -(-outputs // PANEL)
    is_paired = dtype == torch.bfloat16
    shape = (panels, -(-inputs // 2), PANEL, 2) if is_paired else (panels, inputs, PANEL)
    return weight_memory((experts, *shape), dtype)


def gated_rows(inner: int) -> int:
    """Outputs of one half of a packed `gate_up`, whose ups begin with a panel."""
    return -(-inner // PANEL) * PANEL


def pack_experts(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs experts for `experts_mlp`.

    Args:
        gate: [E, I, H] float.
        up: as `gate`.
        down: [E, H, I].

    Returns:
        `gate_up` [E, P, H, 16], for bfloat16 [E, P, ceil(H / 2), 16, 2], with P = 2·ceil(I / 16), and `down`
        [E, P, I, 16] or [E, P, ceil(I / 2), 16, 2] with P = ceil(H / 16).
    """
    experts, inner, hidden = gate.shape
    gate_up = packed_stack(experts, 2 * gated_rows(inner), hidden, gate.dtype)
    packed_down = packed_stack(experts, hidden, inner, gate.dtype)
    for expert in range(experts):
        pack_panels(gate[expert], gate_up[expert], 0)
        pack_panels(up[expert], gate_up[expert], gated_rows(inner))
        pack_panels(down[expert], packed_down[expert], 0)
    return gate_up, packed_down


def _experts_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, hidden, width, experts, choices: none; odd sizes; part of a panel; all choose one; many rows per expert
    shapes = [(0, 16, 16, 2, 1), (1, 32, 16, 4, 2), (2, 7, 5, 3, 3), (5, 65, 33, 8, 2), (1, 96, 48, 60, 4)]
    shapes += [(33, 40, 24, 6, 2), (130, 48, 32, 3, 2), (220, 33, 17, 2, 1), (64, 1100, 50, 5, 2), (3, 64, 600, 4, 1)]
    for seed, (tokens, hidden, inner, experts, choices) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        gate, up = (torch.randn(2, experts, inner, hidden, generator=generator) / math.sqrt(hidden)).to(dtype)
        down = (torch.randn(experts, hidden, inner, generator=generator) / math.sqrt(inner)).to(dtype)
        wide = torch.randn(tokens, 2 * hidden, generator=generator).to(dtype)
        x = wide[:, hidden:] if seed % 2 else wide[:, :hidden].contiguous()
        # with seed 5 the experts are the middle ones of twice as many, and other ids are of another rank
        total, first = (2 * experts, experts // 2) if seed == 5 else (experts, 0)
        ids = torch.rand(tokens, total, generator=generator).argsort(dim=-1)[:, :choices].int().contiguous()
        if seed == 7:
            ids.fill_(1)
        weights = torch.rand(tokens, choices, generator=generator)
        shared = torch.randn(tokens, hidden, generator=generator).to(dtype) if seed % 3 else None
        shared_gate = torch.randn(tokens, 1, generator=generator).to(dtype) if seed % 3 == 2 else None
        activation = list(GATED_ACTIVATIONS)[seed % 3]
        yield x, ids, weights, *pack_experts(gate, up, down), activation, first, shared, shared_gate


@define_op(inputs=_experts_inputs, devices=("cpu",), recordable=True)
def experts_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    first_expert: int = 0,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum, over the experts of a token, of `down(act(gate(x)) · up(x))`, plus what all tokens share.

    The kernel sorts the pairs of a token and an expert by expert, and reads the weights of chosen experts only. The
    results of gate, up, their product and of each expert are rounded to the dtype of x; they are added in float32 in
    the order of `ids`, so a token's result does not depend on the other tokens.

    Args:
        x: [T, H] float; rows may be strided.
        ids: [T, C] int32, contiguous. Ids of other experts than these add nothing.
        weights: [T, C] float32, contiguous.
        gate_up: as `pack_experts` returns it, dtype of x.
        down: likewise.
        activation: one of GATED_ACTIVATIONS.
        first_expert: id of the first expert in `gate_up` and `down`.
        shared: [T, H], contiguous, dtype of x: the result of an MLP that all tokens use; or None.
        shared_gate: [T, 1], contiguous, dtype of x: `shared` is multiplied by its sigmoid; None: by 1.

    Returns:
        [T, H], contiguous, dtype of x.
    """
    hidden, wide = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    outputs, inner = gate_up.shape[1] * PANEL, down.shape[2] * (2 if down.dim() == 5 else 1)
    act = torch.nn.functional
    result = torch.zeros(*ids.shape, hidden, dtype=wide)
    for expert in range(len(gate_up)):
        tokens, choices = torch.nonzero(ids == first_expert + expert, as_tuple=True)
        both = x[tokens].to(wide) @ unpack_weight(gate_up[expert], hidden, outputs).to(wide).T
        gate, up = both.to(x.dtype).to(wide).chunk(2, dim=-1)
        gate = act.silu(gate) if activation == "silu" else act.gelu(gate, approximate=activation[5:] or "none")
        product = (gate * up).to(x.dtype)[:, :inner].to(wide)
        rows = product @ unpack_weight(down[expert], inner, hidden).to(wide).T
        result[tokens, choices] = rows.to(x.dtype).to(wide)
    total = (result * weights.unsqueeze(-1)).sum(dim=1)
    if shared is not None:
        total += shared.to(wide) if shared_gate is None else shared.to(wide) * shared_gate.to(wide).sigmoid()
    return total.to(x.dtype)


load_native_library()
