"""`ops.elementwise` on Ascend NPUs: norms, rotary embedding and gated activations.

Letters: T tokens, H hidden size, N heads, K key-value heads, D head size, F rotated part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

# head sizes that npu_apply_rotary_pos_emb supports, and the on-chip memory of a core, which its inputs must fit in
_FUSED_ROTARY_SIZES = (64, 128)
_CORE_BYTES = 192 << 10


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """See `elementwise.rms_norm`."""
    x = x.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = x.view(-1, x.shape[-1])
    return torch.ops.npu.npu_rms_norm(rows, weight, epsilon)[0].view(x.shape)  # type: ignore[no-any-return]


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """See `elementwise.fused_add_rms_norm`."""
    if x.numel() == 0:
        return
    if x.is_contiguous() and residual.is_contiguous():
        torch.ops.npu.npu_add_rms_norm_v2(x, residual, weight, epsilon)
        return
    normed, _, total = torch.ops.npu.npu_add_rms_norm(x.contiguous(), residual.contiguous(), weight, epsilon)
    x.copy_(normed)
    residual.copy_(total)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """See `elementwise.layer_norm`."""
    return torch.nn.functional.layer_norm(x.contiguous(), x.shape[-1:], weight, bias, epsilon)


@dataclasses.dataclass(frozen=True, slots=True)
class _Angles:
    """Cosines and sines of a step's tokens, and the arguments that they were gathered for."""

    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    dtype: torch.dtype
    is_neox: bool
    # [T, 1, F] each: every value twice, once per element of its pair
    cos: torch.Tensor
    sin: torch.Tensor

    def matches(
        self, positions: torch.Tensor, cos_sin_cache: torch.Tensor, dtype: torch.dtype, is_neox: bool
    ) -> bool:
        """Whether they are the angles for these arguments; tensors are compared by identity, not by contents."""
        return (
            positions is self.positions
            and cos_sin_cache is self.cos_sin_cache
            and dtype == self.dtype
            and is_neox == self.is_neox
        )


class _StepAngles:
    """Caches the latest angles, so that the layers of a step gather them once.

    `layers.rotary` makes a new positions tensor in every step. The cache holds a reference to it, so that no later
    tensor can have the same identity.
    """

    def __init__(self) -> None:
        self._newest: _Angles | None = None

    def get(self, positions: torch.Tensor, cos_sin_cache: torch.Tensor, dtype: torch.dtype, is_neox: bool) -> _Angles:
        """The angles of [T] positions, from a table [P, F]."""
        newest = self._newest
        if newest is None or not newest.matches(positions, cos_sin_cache, dtype, is_neox):
            cos, sin = cos_sin_cache.index_select(0, positions).to(dtype)[:, None].chunk(2, dim=-1)
            duplicate = _repeat_halves if is_neox else _repeat_interleaved
            newest = self._newest = _Angles(positions, cos_sin_cache, dtype, is_neox, duplicate(cos), duplicate(sin))
        return newest


def _repeat_halves(angles: torch.Tensor) -> torch.Tensor:
    return torch.cat((angles, angles), dim=-1)


def _repeat_interleaved(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack((angles, angles), dim=-1).flatten(-2)


_step_angles = _StepAngles()


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """See `elementwise.rotary_embedding`; cosines and sines are rounded to the dtype of the query."""
    num_tokens = query.shape[0]
    if num_tokens == 0:
        return
    rot_dim = cos_sin_cache.shape[-1]
    angles = _step_angles.get(positions, cos_sin_cache, query.dtype, is_neox)
    # torch_npu's _npu_rotary_embedding would do all of this in one call, but it caches the first table it is given
    query, key = query.view(num_tokens, -1, head_size), key.view(num_tokens, -1, head_size)
    if is_neox and rot_dim == head_size and _fits_fused_rotary(query, key):
        torch.ops.npu.npu_apply_rotary_pos_emb(query, key, angles.cos, angles.sin, "TND")
        return
    mode = "half" if is_neox else "interleave"
    for x in (query, key):
        rotated = x[..., :rot_dim]
        rotated.copy_(torch.ops.npu.npu_rotary_mul(rotated[None], angles.cos[None], angles.sin[None], mode)[0])


def _fits_fused_rotary(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether npu_apply_rotary_pos_emb supports these; the formula is in its documentation."""
    size = query.shape[2]
    if size not in _FUSED_ROTARY_SIZES:
        return False
    width = (query.shape[1] + key.shape[1]) * size
    casts = query.dtype == torch.bfloat16
    element = 4 if casts else query.element_size()
    needed = 5 * width * element + 4 * size * query.element_size() + (8 * size if casts else 0)
    return needed <= _CORE_BYTES


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `elementwise.silu_and_mul`."""
    return torch.ops.npu.npu_swiglu(x.contiguous(), -1)  # type: ignore[no-any-return]


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """See `elementwise.gelu_and_mul`; npu_gelu_mul takes rows of up to 1024 elements only, too few for an MLP."""
    # float32 as in the reference; torch's gelu ignores `approximate` on NPUs
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.ops.npu.npu_gelu(gate.contiguous(), approximate=approximate) * up).to(x.dtype)  # type: ignore[no-any-return]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "layer_norm": layer_norm,
    "rotary_embedding": rotary_embedding,
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": gelu_and_mul,
}
