"""Keys and values, or latents, in one byte per number: how a paged cache holds them.

Letters: as in `ops.paged` and `ops.latent`. A number is a byte times a scale. There is one scale for all keys of a
layer and one for all values, or each head of each token has scales of its own, which are computed when it is written.
So are those of latent attention: one for all rows, or two for each, of its latent and of its rotated key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# dtypes of a cache of bytes
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class ByteCache(NamedTuple):
    """One layer's cache. A block of a head is contiguous: its numbers, then their scales."""

    # [2, P, K, bytes of S slots] uint8: keys, then values; the other fields are views of it
    planes: torch.Tensor
    # [P, K, S, D]
    keys: torch.Tensor
    values: torch.Tensor
    # [P, K, S] bfloat16
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None

    @classmethod
    def over(cls, planes: torch.Tensor, block_size: int, head_size: int, dtype: torch.dtype) -> ByteCache:
        """The cache in `planes`, of S * D bytes a head and block, or S * (D + 2) with scales.

        Example:
            >>> ByteCache.over(torch.zeros(2, 1, 1, 16 * 34, dtype=torch.uint8), 16, 32, torch.int8).keys.shape
            torch.Size([1, 1, 16, 32])
        """
        size = block_size * head_size
        numbers = planes[..., :size].view(dtype).view(*planes.shape[:-1], block_size, head_size)
        if planes.shape[-1] == size:
            return cls(planes, numbers[0], numbers[1], None, None)
        scales = planes[..., size:].view(torch.bfloat16)
        return cls(planes, numbers[0], numbers[1], scales[0], scales[1])


class LatentByteCache(NamedTuple):
    """One layer's cache of latents. A block is contiguous: its rows, then their scales."""

    # [P, bytes of a block] uint8; the other fields are views of it
    planes: torch.Tensor
    # [P, S, W]
    rows: torch.Tensor
    # [P, S, 2] bfloat16: of the latent, and of the rotated key
    scales: torch.Tensor | None

    @classmethod
    def over(cls, planes: torch.Tensor, block_size: int, width: int, dtype: torch.dtype) -> LatentByteCache:
        """The cache in `planes`, of S * W bytes a block, or S * (W + 4) with scales.

        Example:
            >>> LatentByteCache.over(torch.zeros(3, 16 * 580, dtype=torch.uint8), 16, 576, torch.int8).rows.shape
            torch.Size([3, 16, 576])
        """
        size = block_size * width
        rows = planes[:, :size].view(dtype).view(-1, block_size, width)
        if planes.shape[1] == size:
            return cls(planes, rows, None)
        return cls(planes, rows, planes[:, size:].view(torch.bfloat16).view(-1, block_size, 2))


def largest_number(dtype: torch.dtype) -> float:
    """The largest number of a dtype whose rows have scales of their own; E4M3 if it is not int8."""
    return 127.0 if dtype == torch.int8 else 448.0


def own_scales(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Scales at which the largest number of each row becomes `largest`, rounded up to bfloat16.

    Args:
        x: [..., D], float32 or wider.
        largest: see `largest_number`.

    Returns:
        [..., 1] in x's dtype; NaN for rows with a number that is not finite.

    Example:
        >>> own_scales(torch.tensor([[1.0, -254.0]]), 127.0).item()
        2.0
    """
    bits = (x.abs().amax(-1, keepdim=True).float() / largest).view(torch.int32)
    scales = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite().all(-1, keepdim=True), scales, float("nan")).to(x.dtype)


def to_bytes(x: torch.Tensor, scales: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    """x / scales rounded to the nearest number of `dtype`, ties to even; rows without a positive scale become zeros.

    Args:
        x: float32 or wider.
        scales: broadcast to x.
        dtype: one of BYTE_DTYPES, or x's to leave the numbers as they are.
    """
    scales = torch.as_tensor(scales, dtype=x.dtype)
    ratios = torch.where(scales > 0, x / scales, 0)
    if dtype == torch.int8:
        return ratios.round().clamp(-128, 127).to(dtype)
    if dtype not in BYTE_DTYPES:
        return ratios.to(dtype)
    largest = torch.finfo(dtype).max
    return ratios.clamp(-largest, largest).to(dtype)


def from_bytes(numbers: torch.Tensor, scales: torch.Tensor | None, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """numbers [..., D] times scales [...] or one scale, in `dtype`."""
    if scales is not None:
        return numbers.to(dtype) * scales.to(dtype)[..., None]
    return numbers.to(dtype) if scale == 1 else numbers.to(dtype) * scale
