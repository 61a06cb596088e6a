"""Mixtures of experts: which experts a token uses, and their MLPs.

Letters: T tokens, H hidden, E experts, C experts that a token uses, I width inside an expert, P panels of 16 outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ascend_vllm.ops.gemm import GATED_ACTIVATIONS, PANEL, PackedRows, has_kernel, pack_panels, unpack_weight
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


@define_op(inputs=_route_inputs, recordable=True)
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
    # more rows and inputs than a task of tiles keeps at a time
    shapes += [(300, 2100, 24, 1, 1)]
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
    results = torch.zeros(*ids.shape, hidden, dtype=x.dtype)
    for expert in range(len(gate_up)):
        tokens, choices = torch.nonzero(ids == first_expert + expert, as_tuple=True)
        both = x[tokens].to(wide) @ unpack_weight(gate_up[expert], hidden, outputs).to(wide).T
        product = _gated(both.to(x.dtype), activation)[:, :inner].to(wide)
        rows = product @ unpack_weight(down[expert], inner, hidden).to(wide).T
        results[tokens, choices] = rows.to(x.dtype)
    return weighted_sum(results, weights, shared, shared_gate)


def _gated(both: torch.Tensor, activation: str) -> torch.Tensor:
    """[..., 2*I] → [..., I]: the activation of the first half, times the second."""
    act = torch.nn.functional
    gate, up = both.to(torch.promote_types(both.dtype, torch.float32)).chunk(2, dim=-1)
    gate = act.silu(gate) if activation == "silu" else act.gelu(gate, approximate=activation[5:] or "none")
    return (gate * up).to(both.dtype)


def weighted_sum(
    results: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
) -> torch.Tensor:
    """results [T, C, H] of the experts, and the other arguments of `experts_mlp` → its result [T, H]."""
    wide = torch.promote_types(results.dtype, torch.float32)
    total = (results.to(wide) * weights.unsqueeze(-1)).sum(dim=1)
    if shared is not None:
        total += shared.to(wide) if shared_gate is None else shared.to(wide) * shared_gate.to(wide).sigmoid()
    return total.to(results.dtype)


def _grouped_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, hidden, width, experts of all ranks, of this one, its first one, choices: none; one expert; all here; a
    # rank in the middle; one with the last expert; more rows than experts
    shapes = [(0, 16, 16, 4, 4, 0, 2), (3, 32, 16, 1, 1, 0, 1), (1, 48, 24, 8, 8, 0, 3), (9, 32, 40, 8, 3, 2, 2)]
    shapes += [(2, 16, 8, 6, 1, 5, 2), (70, 64, 32, 5, 5, 0, 2)]
    for seed, (tokens, hidden, inner, total, own, first, choices) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        gate_up = (torch.randn(own, 2 * inner, hidden, generator=generator) / math.sqrt(hidden)).to(dtype)
        down = (torch.randn(own, hidden, inner, generator=generator) / math.sqrt(inner)).to(dtype)
        x = torch.randn(tokens, 2 * hidden, generator=generator).to(dtype)[:, hidden:]
        ids = torch.rand(tokens, total, generator=generator).argsort(dim=-1)[:, :choices].int().contiguous()
        weights = torch.rand(tokens, choices, generator=generator)
        shared = torch.randn(tokens, hidden, generator=generator).to(dtype) if seed % 3 else None
        shared_gate = torch.randn(tokens, 1, generator=generator).to(dtype) if seed % 3 == 2 else None
        activation = list(GATED_ACTIVATIONS)[seed % 3]
        turned = (gate_up.transpose(1, 2), down.transpose(1, 2))
        yield x, ids, weights, *turned, activation, total, first, shared, shared_gate


@define_op(inputs=_grouped_inputs, devices=("npu",))
def grouped_experts_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    num_experts: int,  # noqa: ARG001 - operators that sort by expert must know it
    first_expert: int = 0,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `experts_mlp`, with weights as grouped matrix products take them, and the number of experts.

    Args:
        x: [T, H] float; rows may be strided.
        ids: [T, C] int32, contiguous, below `num_experts`. Ids of other experts than these add nothing.
        weights: [T, C] float32, contiguous.
        gate_up: [E, H, 2*I], gates first, dtype of x; may be a view of [E, 2*I, H].
        down: [E, I, H], likewise.
        activation: one of GATED_ACTIVATIONS.
        num_experts: of all ranks.
        first_expert: id of the first expert in `gate_up` and `down`.
        shared: as in `experts_mlp`.
        shared_gate: likewise.

    Returns:
        [T, H], contiguous, dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    index = ids.long() - first_expert
    is_own = (index >= 0) & (index < len(gate_up))
    index = torch.where(is_own, index, 0)
    both = torch.einsum("th,tchi->tci", x.to(wide), gate_up[index].to(wide)).to(x.dtype)
    product = _gated(both, activation).to(wide)
    results = torch.einsum("tci,tcih->tch", product, down[index].to(wide)).to(x.dtype)
    return weighted_sum(results, weights * is_own, shared, shared_gate)


# device type → converts experts' weights [E, N, K] to [E, K, N] in the memory format of that device's products
STACK_FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


class ExpertStack:
    """Gate, up and down of some experts, in the layout of the device's product.

    Packed in panels while they are loaded where the device has kernels for that, as in `PackedLinear`; plain matrices
    elsewhere.

    Args:
        num_experts: experts of all ranks.
        first_expert: id of the first one here.
        size: how many are here.
        hidden_size: H.
        inner_size: I.
        dtype: of the weights.
        device: of the weights.
    """

    def __init__(
        self,
        num_experts: int,
        first_expert: int,
        size: int,
        hidden_size: int,
        inner_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_experts = num_experts
        self._first_expert = first_expert
        self._hidden_size = hidden_size
        self._inner_size = inner_size
        self._has_kernel = has_kernel(dtype, device)
        if self._has_kernel:
            self._gate_up = packed_stack(size, 2 * gated_rows(inner_size), hidden_size, dtype)
            self._down = packed_stack(size, hidden_size, inner_size, dtype)
        else:
            self._gate_up = torch.empty(size, 2 * inner_size, hidden_size, dtype=dtype, device=device)
            self._down = torch.empty(size, hidden_size, inner_size, dtype=dtype, device=device)

    def targets(self, index: int) -> tuple[torch.Tensor | PackedRows, ...]:
        """Destinations of gate [I, H], up [I, H] and down [H, I] of the expert with this index among those here.

        All must be written before `finish`.
        """
        inner, hidden = self._inner_size, self._hidden_size
        gate_up, down = self._gate_up[index], self._down[index]
        if not self._has_kernel:
            return gate_up[:inner], gate_up[inner:], down
        return (
            PackedRows(gate_up, 0, (inner, hidden)),
            PackedRows(gate_up, gated_rows(inner), (inner, hidden)),
            PackedRows(down, 0, (hidden, inner)),
        )

    def finish(self) -> None:
        """Converts the complete weights to the device's memory format."""
        if not self._has_kernel:
            convert = STACK_FORMATS.get(self._gate_up.device.type, _inputs_first)
            self._gate_up, self._down = convert(self._gate_up), convert(self._down)

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: str,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `experts_mlp`; returns [T, H]."""
        stacks = (self._gate_up, self._down, activation)
        rest = (self._first_expert, shared, shared_gate)
        result: torch.Tensor
        if self._has_kernel:
            result = experts_mlp(x, ids, weights, *stacks, *rest)
        else:
            result = grouped_experts_mlp(x, ids, weights, *stacks, self._num_experts, *rest)
        return result


def _inputs_first(weights: torch.Tensor) -> torch.Tensor:
    return weights.transpose(1, 2)


load_native_library()
