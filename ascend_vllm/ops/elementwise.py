"""Row-wise and element-wise ops: normalisation, rotary embedding, gated activations, sums, conversion to float32.

Everything is computed in float32 (float64 for float64 inputs) and rounded once to the dtype of the input.
Letters: T tokens, H hidden size, N heads, K key-value heads, D head size, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import define_op

# (rows, hidden): none, one, tails of every vector width, sizes of real models, enough rows for all threads
_ROW_SHAPES = ((0, 8), (1, 1), (3, 7), (2, 16), (5, 33), (4, 61), (1, 896), (67, 1024), (33, 4100))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that results are accumulated in: float32, or float64 for float64."""
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


@define_op(inputs=_rms_norm_inputs, recordable=True)
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


@define_op(inputs=_fused_add_rms_norm_inputs, mutates=("x", "residual"), recordable=True)
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


@define_op(inputs=_layer_norm_inputs, recordable=True)
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


def make_cos_sin_cache(max_position: int, rot_dim: int) -> torch.Tensor:
    """A rotary table for tests and benchmarks: [max_position, rot_dim] float32, with a base of 10,000."""
    inverse_frequency = 10000.0 ** (-torch.arange(0, rot_dim, 2, dtype=torch.float32) / rot_dim)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inverse_frequency)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _rotary_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # tokens, heads, key-value heads, head size, rotated part of it
    shapes = [(0, 2, 1, 16, 16), (1, 1, 1, 2, 2), (3, 4, 2, 24, 8), (5, 2, 2, 18, 18), (7, 14, 2, 64, 64)]
    shapes += [(2, 3, 1, 80, 20), (65, 16, 8, 128, 128), (3, 1, 1, 256, 64)]
    for seed, (tokens, heads, kv_heads, size, rot_dim) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        positions = torch.randint(0, 50, (tokens,), generator=generator)
        for is_neox in (True, False):
            qkv = _randn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, seed=seed + 50)
            query, key = qkv[:, : heads * size], qkv[:, heads * size : (heads + kv_heads) * size]
            yield positions, query, key, size, make_cos_sin_cache(50, rot_dim), is_neox


@define_op(inputs=_rotary_inputs, mutates=("query", "key"), recordable=True)
def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotates the first rot_dim elements of every head by the angles of its token's position, in place.

    Pair j is turned by angle j: (a, b) becomes (a cos - b sin, b cos + a sin). Su et al., "RoFormer", 2021.

    Args:
        positions: [T] int64, each in [0, P).
        query: [T, N*D] float; rows may be strided (views of a fused projection).
        key: [T, K*D], dtype of query, likewise.
        head_size: D.
        cos_sin_cache: [P, rot_dim] float32, cosines of the rot_dim/2 angles and then their sines; rot_dim <= D, even.
        is_neox: True pairs element j with j + rot_dim/2 (GPT-NeoX, Llama); False pairs 2j with 2j + 1 (GPT-J).
    """
    rot_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for x in (query, key):
        rotated = x.view(x.shape[0], x.shape[1] // head_size, head_size)[..., :rot_dim]
        values = _wide(rotated)
        if is_neox:
            first, second = values.chunk(2, dim=-1)
        else:
            first, second = values[..., 0::2], values[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        rotated.copy_(torch.cat(pairs, dim=-1) if is_neox else torch.stack(pairs, dim=-1).flatten(-2))


def _gate_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, width) in enumerate(_ROW_SHAPES):
        yield (_randn(rows, 2 * width, dtype=dtype, seed=seed, scale=3.0),)
    yield (_randn(4, 100, dtype=dtype, seed=60)[:, 10:70],)
    yield (torch.linspace(-100, 100, 4 * 42).view(4, 42).to(dtype),)


@define_op(inputs=_gate_inputs, recordable=True)
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Gated SiLU, `silu(x[:, :I]) * x[:, I:]` with `silu(a) = a / (1 + exp(-a))`.

    Args:
        x: [T, 2*I] float; rows may be strided.

    Returns:
        [T, I], contiguous, dtype of x.
    """
    gate, up = _wide(x).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _gelu_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for approximate in ("none", "tanh"):
        for (x,) in _gate_inputs(dtype):
            yield x, approximate


@define_op(inputs=_gelu_inputs, recordable=True)
def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Gated GELU, `gelu(x[:, :I]) * x[:, I:]`.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.

    Args:
        x: [T, 2*I] float; rows may be strided.
        approximate: ``"none"`` for the error function, ``"tanh"`` for its tanh approximation.

    Returns:
        [T, I], contiguous, dtype of x.
    """
    gate, up = _wide(x).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).to(x.dtype)


def _rows_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, width) in enumerate(_ROW_SHAPES):
        yield (_randn(rows, width, dtype=dtype, seed=seed),)
    yield (_randn(4, 100, dtype=dtype, seed=60)[:, 10:70],)


@define_op(inputs=_rows_inputs, tolerance=0.0, devices=("cpu",), recordable=True)
def to_float32(x: torch.Tensor) -> torch.Tensor:
    """`x.float()`, always a copy.

    Args:
        x: [T, H] float; rows may be strided.

    Returns:
        [T, H] float32, contiguous.
    """
    return _wide(x).clone(memory_format=torch.contiguous_format)


def _sum_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, width) in enumerate(_ROW_SHAPES):
        x = _randn(rows, width, dtype=dtype, seed=seed)
        yield x, _randn(rows, width, dtype=dtype, seed=seed + 100, scale=4.0)
    strided = _randn(6, 80, dtype=dtype, seed=30)
    yield strided[:, :40], strided[:, 40:]


@define_op(inputs=_sum_inputs, recordable=True)
def add_rows(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x + y`.

    Args:
        x: [T, H] float; rows may be strided.
        y: [T, H], dtype of x, likewise.

    Returns:
        [T, H], contiguous, dtype of x.
    """
    return (_wide(x) + _wide(y)).to(x.dtype)


def _concat_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, width) in enumerate(_ROW_SHAPES):
        yield ([_randn(rows, width, dtype=dtype, seed=seed)],)
        yield ([_randn(rows, width + other, dtype=dtype, seed=seed + other) for other in (1, 0, 5)],)
    strided = _randn(6, 80, dtype=dtype, seed=30)
    yield ([strided[:, 40:], strided[:, :40], strided[:, 3:4]],)


@define_op(inputs=_concat_inputs, tolerance=0.0, recordable=True)
def concat_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Matrices beside each other, `torch.cat(parts, 1)`.

    Args:
        parts: one at least, [T, …] of one dtype; rows may be strided.

    Returns:
        [T, …], contiguous.
    """
    return torch.cat(list(parts), 1)


load_native_library()
