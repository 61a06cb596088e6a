"""`ops.elementwise` on Ascend NPUs: norms, rotary embedding, gated activations and sums.

Letters: T tokens, H hidden size, N heads, K key-value heads, D head size, F rotated part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# head sizes that npu_apply_rotary_pos_emb supports, and the on-chip memory of a core, which its inputs must fit in
_FUSED_ROTARY_SIZES = (64, 128)
_CORE_BYTES = 192 << 10


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    rows = x.view(-1, x.shape[-1])
    return torch.ops.npu.npu_rms_norm(rows, weight, epsilon)[0].view(x.shape)  # type: ignore[no-any-return]


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
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
    return torch.nn.functional.layer_norm(x.contiguous(), x.shape[-1:], weight, bias, epsilon)


class _StepAngles:
    """Caches the latest cosines and sines, so that the layers of a step gather them once.

    `layers.rotary` makes a new positions tensor in every step. Tensors are compared by identity, not by contents: the
    cache holds references to them, so that no later tensor can have the same identity.
    """

    def __init__(self) -> None:
        # the arguments that the angles were gathered for
        self._newest: tuple[torch.Tensor, torch.Tensor, torch.dtype, bool] | None = None
        self._angles: tuple[torch.Tensor, ...] = ()

    def get(
        self, positions: torch.Tensor, cos_sin_cache: torch.Tensor, dtype: torch.dtype, is_neox: bool
    ) -> tuple[torch.Tensor, ...]:
        """Cosines and sines of [T] positions, from a table [P, F].

        Returns:
            [T, 1, F] each: every value twice, once per element of its pair.
        """
        newest = self._newest
        if (
            newest is None
            or newest[0] is not positions
            or newest[1] is not cos_sin_cache
            or newest[2:] != (dtype, is_neox)
        ):
            halves = cos_sin_cache.index_select(0, positions).to(dtype)[:, None].chunk(2, dim=-1)
            if is_neox:
                self._angles = tuple(torch.cat((half, half), dim=-1) for half in halves)
            else:
                self._angles = tuple(torch.stack((half, half), dim=-1).flatten(-2) for half in halves)
            self._newest = positions, cos_sin_cache, dtype, is_neox
        return self._angles


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
    cos, sin = _step_angles.get(positions, cos_sin_cache, query.dtype, is_neox)
    # torch_npu's _npu_rotary_embedding would do all of this in one call, but it caches the first table it is given
    query, key = query.view(num_tokens, -1, head_size), key.view(num_tokens, -1, head_size)
    if is_neox and rot_dim == head_size and _fits_fused_rotary(query, key):
        # four axes: the layout TND of three came later
        torch.ops.npu.npu_apply_rotary_pos_emb(query[None], key[None], cos[None], sin[None], "BSND")
        return
    mode = "half" if is_neox else "interleave"
    for x in (query, key):
        rotated = x[..., :rot_dim]
        rotated.copy_(torch.ops.npu.npu_rotary_mul(rotated[None], cos[None], sin[None], mode)[0])


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
    return torch.ops.npu.npu_swiglu(x.contiguous(), -1)  # type: ignore[no-any-return]


def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """See `elementwise.gelu_and_mul`; npu_gelu_mul takes rows of up to 1024 elements only, too few for an MLP."""
    # float32 as in the reference; torch's gelu ignores `approximate` on NPUs
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.ops.npu.npu_gelu(gate.contiguous(), approximate=approximate) * up).to(x.dtype)  # type: ignore[no-any-return]


def add_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def concat_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts), 1)
