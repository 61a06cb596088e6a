"""Row-wise and element-wise ops: normalisation, rotary embedding, gated activations.

Everything is computed in float32 (float64 for float64 inputs) and rounded once to the dtype of the input.
Letters: T tokens, H hidden size, N heads, K key-value heads, D head size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import define_op

# (rows, hidden): none, one, tails of every vector width, sizes of real models, enough rows for all threads
_ROW_SHAPES = ((0, 8), (1, 1), (3, 7), (2, 16), (5, 33), (4, 61), (1, 896), (67, 1024), (33, 4100))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """The dtype that results are accumulated in: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _randn(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale + offset).to(dtype)


def _rms_norm_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, hidden) in enumerate(_ROW_SHAPES):
        weight = _randn(hidden, dtype=dtype, seed=seed + 100, scale=0.2, offset=1.0)
        yield _randn(rows, hidden, dtype=dtype, seed=seed, scale=10.0 ** (seed % 3 - 1)), weight, 1e-6
    # Heads of a fused qkv projection; a slice of columns; one dimension; a transposed block that needs a copy.
    qkv = _randn(9, 8 * 24, dtype=dtype, seed=20)
    weight = _randn(24, dtype=dtype, seed=21, offset=1.0)
    yield qkv[:, : 6 * 24].view(9, 6, 24), weight, 1e-5
    yield qkv[::2, 24:48], weight, 1e-5
    yield qkv[0, :24], weight, 1e-5
    yield _randn(2, 3, 4, 24, dtype=dtype, seed=22).permute(2, 1, 0, 3), weight, 1e-5
    yield torch.zeros(2, 24, dtype=dtype), weight, 1e-5


@define_op(inputs=_rms_norm_inputs)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square normalisation of the last dimension, `x / sqrt(mean(x^2) + epsilon) * weight`.

    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    Args:
        x: [..., H] float; contiguous in its last dimension, other strides are free.
        weight: [H], dtype of x.
        epsilon: added to the mean of squares.

    Returns:
        [..., H], contiguous, dtype of x.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])
    """
    values = _wide(x)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (values * scale * _wide(weight)).to(x.dtype).contiguous()


def _fused_add_rms_norm_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, hidden) in enumerate(_ROW_SHAPES):
        weight = _randn(hidden, dtype=dtype, seed=seed + 100, scale=0.2, offset=1.0)
        x = _randn(rows, hidden, dtype=dtype, seed=seed)
        yield x, _randn(rows, hidden, dtype=dtype, seed=seed + 200, scale=4.0), weight, 1e-6
    strided = _randn(6, 80, dtype=dtype, seed=30)
    yield strided[:, :40], strided[:, 40:], _randn(40, dtype=dtype, seed=31), 1e-5


@define_op(inputs=_fused_add_rms_norm_inputs, mutates=("x", "residual"))
def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """Adds x to the residual stream and normalises the sum: `residual += x; x = rms_norm(residual)`.

    The sum is rounded to the dtype before it is normalised, as two separate ops would do.

    Args:
        x: [T, H] float, overwritten with the result; rows may be strided.
        residual: [T, H], dtype of x, overwritten with the sum; rows may be strided.
        weight: [H], dtype of x.
        epsilon: added to the mean of squares.
    """
    residual.copy_(_wide(residual) + _wide(x))
    values = _wide(residual)
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    x.copy_(values * scale * _wide(weight))


def _layer_norm_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, hidden) in enumerate(_ROW_SHAPES):
        weight = _randn(hidden, dtype=dtype, seed=seed + 100, scale=0.2, offset=1.0)
        bias = _randn(hidden, dtype=dtype, seed=seed + 200)
        x = _randn(rows, hidden, dtype=dtype, seed=seed, offset=float(seed % 4))
        yield x, weight, bias, 1e-5
        yield x, (weight if seed % 2 else None), (None if seed % 2 else bias), 1e-5
    yield _randn(5, 48, dtype=dtype, seed=40), None, None, 1e-5
    yield _randn(5, 3, 48, dtype=dtype, seed=41)[:, 1], None, None, 1e-5
    yield torch.full((2, 19), 3.0, dtype=dtype), None, None, 1e-5


@define_op(inputs=_layer_norm_inputs)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Layer normalisation of the last dimension, `(x - mean) / sqrt(variance + epsilon) * weight + bias`.

    Ba, Kiros and Hinton, "Layer Normalization", 2016; the variance is the biased one.

    Args:
        x: [..., H] float; contiguous in its last dimension, other strides are free.
        weight: [H], dtype of x, or None for ones.
        bias: [H], dtype of x, or None for zeros.
        epsilon: added to the variance.

    Returns:
        [..., H], contiguous, dtype of x.
    """
    values = _wide(x)
    centered = values - values.mean(-1, keepdim=True)
    result = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        result = result * _wide(weight)
    if bias is not None:
        result = result + _wide(bias)
    return result.to(x.dtype).contiguous()


load_native_library()
