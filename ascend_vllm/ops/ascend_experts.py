"""`ops.experts` on Ascend NPUs: choosing experts, and products of groups of rows.

Letters: T tokens, H hidden, E experts, C experts that a token uses, I width inside an expert, M pairs of a token and
an expert that it uses.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_vllm.ops import ascend_elementwise
from ascend_vllm.ops.registry import OPS

# limits of npu_moe_gating_top_k, also for the number of experts with each group's rounded up to a multiple of 32;
# groups have more experts than the last of these
_MAX_EXPERTS = 2048
_GROUP_ALIGNMENT = 32
_TOO_SMALL_GROUP = 2

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": ascend_elementwise.silu_and_mul,
    "gelu": lambda x: ascend_elementwise.gelu_and_mul(x, "none"),
    "gelu_tanh": lambda x: ascend_elementwise.gelu_and_mul(x, "tanh"),
}


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
    """See `experts.route_tokens`; CANN does not say which of equal experts is chosen.

    The operators have no sigmoid without renormalising, and no small groups: torch's operators compute those.
    """
    is_softmax = scoring == "softmax"
    if len(logits) == 0 or not (is_softmax or renormalize) or not _fits_gating(logits.shape[1], num_groups):
        return OPS["route_tokens"].reference(  # type: ignore[no-any-return]
            logits, bias, num_choices, scoring, renormalize, num_groups, num_chosen_groups, scale
        )
    # results have the dtype of the logits
    logits = logits.float()
    if not is_softmax or bias is not None or num_groups > 1:
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits,
            num_choices,
            bias=bias,
            k_group=num_chosen_groups,
            group_count=num_groups,
            # by the sum of a group's best two experts, or by its best
            group_select_mode=0 if bias is None else 1,
            norm_type=0 if is_softmax else 1,
            # renormalises after a sigmoid, and never after a softmax
            routed_scaling_factor=1.0 if is_softmax else scale,
            eps=1e-20,
        )
    else:
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits, None, num_choices)
    if is_softmax and renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights * scale if is_softmax and scale != 1.0 else weights


def _fits_gating(num_experts: int, num_groups: int) -> bool:
    """Whether npu_moe_gating_top_k takes so many experts in so many groups; the other operator takes these, too."""
    group = num_experts // num_groups
    aligned = -(-group // _GROUP_ALIGNMENT) * _GROUP_ALIGNMENT * num_groups
    return group > _TOO_SMALL_GROUP and max(num_experts, aligned) <= _MAX_EXPERTS


def grouped_experts_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    num_experts: int,
    first_expert: int = 0,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `experts.grouped_experts_mlp`; numbers of rows stay on the device, so graphs can be made of it."""
    if len(x) == 0:
        return x.new_empty(x.shape)
    sizes = (first_expert, len(gate_up), num_experts)
    rows, places, ends, _ = sort_rows(x.contiguous(), ids, *sizes)
    rows = ACTIVATIONS[activation](_product(rows, gate_up, ends))
    rows = _product(rows, down, ends)
    return add_rows(rows, places, ends, weights, len(gate_up) < num_experts, shared, shared_gate)


def sort_rows(
    x: torch.Tensor,
    ids: torch.Tensor,
    first_expert: int,
    num_own: int,
    num_experts: int,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies each token to the rows of the experts that it uses, sorted by expert.

    Args:
        x: [T, H], contiguous, not empty; int8 with scales.
        ids: [T, C] int32.
        first_expert: the first one here.
        num_own: how many are here.
        num_experts: of all ranks.
        scales: [T] float32, of each token.

    Returns:
        Rows [M, H], undefined behind those of the experts here; the row of each pair [M] int32, -1 for those with
        experts of other ranks; ends [E] int64 of each expert's rows; and, of rows with scales, those [M].
    """
    # Ends, not counts, which CANN rules out for a single group in FRACTAL_NZ.
    return torch.ops.npu.npu_moe_init_routing_v2(  # type: ignore[no-any-return]
        x,
        ids,
        scale=scales,
        active_num=ids.numel(),
        expert_num=num_experts,
        expert_tokens_num_type=0,
        expert_tokens_num_flag=True,
        active_expert_range=[first_expert, first_expert + num_own],
        quant_mode=-1,
        row_idx_type=0,
    )


def add_rows(
    rows: torch.Tensor,
    places: torch.Tensor,
    ends: torch.Tensor,
    weights: torch.Tensor,
    has_others: bool,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
) -> torch.Tensor:
    """Adds the results of each token's experts, rows [M, H] as `sort_rows` has them, and of what all tokens use.

    Args:
        rows: results.
        places: of `sort_rows`.
        ends: of `sort_rows`.
        weights: [T, C] float32.
        has_others: whether other ranks have experts, too.
        shared: see `experts.experts_mlp`.
        shared_gate: likewise.
    """
    if has_others:
        rows, places = _place_others(rows, places, ends[-1:])
    result: torch.Tensor = torch.ops.npu.npu_moe_token_unpermute(rows, places, weights)
    if shared is None:
        return result
    return result.add_(shared) if shared_gate is None else torch.addcmul(result, shared, shared_gate.sigmoid())


def _product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [M, K] times the weights [E, K, N] of their experts → [M, N], undefined behind the last end."""
    (result,) = torch.ops.npu.npu_grouped_matmul(
        [rows], [weights], group_list=ends, split_item=2, group_type=0, group_list_type=0
    )
    return result  # type: ignore[no-any-return]


def _place_others(
    rows: torch.Tensor, places: torch.Tensor, num_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives pairs with experts of other ranks the undefined rows, as zeros: `places` must be a permutation.

    Args:
        rows: [M, H], `num_rows` of them defined.
        places: [M] int32, the row of each pair, -1 for those with experts of other ranks.
        num_rows: [1] int64.

    Returns:
        `rows` and `places` with all of their elements defined.
    """
    is_other = places < 0
    behind = is_other.cumsum(0, dtype=torch.int32) + (num_rows.int() - 1)
    is_undefined = torch.arange(len(rows), device=rows.device) >= num_rows
    return rows.masked_fill(is_undefined.unsqueeze(1), 0), torch.where(is_other, behind, places)
