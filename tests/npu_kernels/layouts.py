"""Layouts of a paged KV cache, as the kernels' host code numbers them."""

from __future__ import annotations

import torch

# [P, S, K, D]; [P, K, S, D], what the op references take; [P, K * D / 16, S, 16]
BLOCK_TOKEN_HEAD, BLOCK_HEAD_TOKEN, FRACTAL_NZ = range(3)
LAYOUTS = (BLOCK_TOKEN_HEAD, BLOCK_HEAD_TOKEN, FRACTAL_NZ)


def from_reference(cache: torch.Tensor, layout: int) -> torch.Tensor:
    """A cache [P, K, S, D] in another layout."""
    blocks, heads, tokens, size = cache.shape
    if layout == BLOCK_TOKEN_HEAD:
        return cache.transpose(1, 2).contiguous()
    if layout == BLOCK_HEAD_TOKEN:
        return cache.contiguous()
    pieces = cache.reshape(blocks, heads, tokens, size // 16, 16).transpose(2, 3)
    return pieces.reshape(blocks, heads * size // 16, tokens, 16).contiguous()


def to_reference(cache: torch.Tensor, layout: int, num_heads: int) -> torch.Tensor:
    """The inverse of `from_reference`."""
    if layout == BLOCK_TOKEN_HEAD:
        return cache.transpose(1, 2).contiguous()
    if layout == BLOCK_HEAD_TOKEN:
        return cache
    blocks, columns, tokens, _ = cache.shape
    pieces = cache.reshape(blocks, num_heads, columns // num_heads, tokens, 16).transpose(2, 3)
    return pieces.reshape(blocks, num_heads, tokens, columns // num_heads * 16).contiguous()
