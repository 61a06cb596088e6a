"""Matrix products with weights that are packed once.

Letters: T tokens, K inputs, N outputs, P panels of 16 outputs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ascend_vllm.ops.elementwise import gelu_and_mul, silu_and_mul
from ascend_vllm.ops.native import cpu_isa, load_native_library
from ascend_vllm.ops.registry import FLOAT_DTYPES, OPS, define_op
from ascend_vllm.platforms.host_memory import weight_memory

# Why one kernel serves every dtype and number of rows: GFLOP/s of the best of several interleaved calls, one thread
# of an AMD EPYC (Zen 3: AVX2, no BF16 instructions), busy with other work. `linear` is torch.nn.functional.linear;
# `mkl` and `onednn` are its weights prepacked for that number of rows (mkl::_mkl_linear,
# mkldnn::_linear_pointwise), which exist only for float32 here: for bfloat16 and float16 oneDNN wants AVX-512.
#
#                    float32                          bfloat16         float16
#     shape  rows    linear   mkl  onednn  kernel     linear  kernel   linear  kernel
#   896x896     1        17    15      15      22         10      41       13      43
#   896x896     8        33    31      35      42         10      84       13      91
#   896x896    32        58    61      58      70         10      89       12      74
#   896x896   256        84    82      72      77          7      76       13      90
#   896x896  1024        80    90      76      92
#  896x9728     1         7    11       8      11         10      28       12      27
#  896x9728     8        14    25      32      45          8      59       12      62
#  896x9728    32        30    35      40      47          7      47       11      73
#  896x9728   256        48    52      48      55          7      60       13      91
#  4864x896     1        10     6       9      13         10      35       13      42
#  4864x896     8        24    22      29      37          7      59       14      64
#  4864x896    32        51    46      54      59          8      86       14      84
#  4864x896   256        56    55      47      54          7      65       14      91
#  4864x896  1024        60    61      55      58
#  896x151936   1         5     7       6       7          7      17       11      24
#  896x151936   8        12    16      24      30          7      38       13      63
#  896x151936  32        26    32      40      50         10      79       12      85
#
# The same for bfloat16 with AMX tiles, one thread of an Intel Xeon (Sapphire Rapids, with busy neighbours):
#
#     shape  rows         1         16         64        256       1024
#              onednn kernel  onednn kernel  ...
#  896x9728          4   10   103  153   277  257   392  323   812  637
#  4864x896          5   11   154  216   454  510   710  594   842  696
#  896x151936        9   14   136  203   493  413   565  453   401  446
#
# There oneDNN was ahead by up to a quarter from 64 rows on; since then products of more than 16 rows prefetch their
# inputs, which makes them 1.07 to 1.16 times as fast. oneDNN has no gated product, which gains as much for the
# largest weight (_MAX_GATED_ROWS), and needs its own copy of every weight.
#
# The kernel keeps a single copy of the weight, and a row's result does not depend on the rows beside it.
PANEL = 16


def packed_zeros(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a weight [N, K] in panels, zeroed."""
    panels = -(-outputs // PANEL)
    is_paired = dtype == torch.bfloat16
    return weight_memory((panels, -(-inputs // 2), PANEL, 2) if is_paired else (panels, inputs, PANEL), dtype)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """Packs a weight for `packed_linear`: panels of 16 outputs, and bfloat16 inputs in pairs.

    Args:
        weight: [N, K] float; rows may be strided.

    Returns:
        [P, K, 16], or for bfloat16 [P, ceil(K / 2), 16, 2]; padding is zero.
    """
    outputs, inputs = weight.shape
    packed = packed_zeros(outputs, inputs, weight.dtype)
    pack_panels(weight, packed, 0)
    return packed


def _pack_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # outputs, inputs: none; partial panels; odd inputs; more than a tile; strided rows; first rows within a panel
    for seed, (outputs, inputs) in enumerate([(0, 8), (1, 1), (16, 8), (17, 7), (33, 65), (40, 130), (700, 129)]):
        weight = torch.randn(outputs, 2 * inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
        weight = weight[:, :inputs] if seed % 2 else weight[:, inputs:].contiguous()
        first_row = 11 * (seed % 3)
        yield weight, packed_zeros(first_row + outputs, inputs, dtype) + 7, first_row


@define_op(inputs=_pack_inputs, mutates=("packed",), tolerance=0.0, devices=("cpu",))
def pack_panels(weight: torch.Tensor, packed: torch.Tensor, first_row: int) -> None:
    """Writes rows of a weight into panels of 16 outputs.

    Args:
        weight: [M, K] float; rows may be strided.
        packed: a weight [N, K] as `pack_weight` returns it; its other rows are unchanged. Where inputs are in pairs
            and K is odd, the last input's partner is set to zero.
        first_row: index in it of the first row.
    """
    steps = packed.shape[1]
    pairs = packed if packed.dim() == 4 else packed.unsqueeze(-1)
    padded = torch.nn.functional.pad(weight, (0, steps * pairs.shape[3] - weight.shape[1]))
    rows = torch.arange(first_row, first_row + len(weight))
    pairs[rows // PANEL, :, rows % PANEL] = padded.view(len(weight), steps, pairs.shape[3])


def _unpack_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (outputs, inputs, count) in enumerate([(16, 8, 0), (1, 1, 3), (17, 7, 20), (2000, 129, 300)]):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
        yield pack_weight(weight), torch.randint(outputs, (count,), generator=generator), inputs


@define_op(inputs=_unpack_inputs, tolerance=0.0, devices=("cpu",), recordable=True)
def unpack_rows(packed: torch.Tensor, indices: torch.Tensor, in_features: int) -> torch.Tensor:
    """Rows of a weight that `pack_weight` packed, as `torch.embedding` returns them for the weight itself.

    Args:
        packed: the weight [N, K].
        indices: [T] int64, each below the number of panels times 16.
        in_features: K.

    Returns:
        [T, K], contiguous, dtype of the weight.
    """
    panels = packed if packed.dim() == 4 else packed.unsqueeze(-1)
    rows = panels[indices // PANEL, :, indices % PANEL]
    return rows.reshape(len(indices), panels.shape[1] * panels.shape[3])[:, :in_features].contiguous()


def unpack_weight(packed: torch.Tensor, in_features: int, out_features: int) -> torch.Tensor:
    """The weight [N, K] that `pack_weight` packed."""
    pairs = packed if packed.dim() == 4 else packed.unsqueeze(-1)
    return pairs.transpose(1, 2).flatten(2).flatten(0, 1)[:out_features, :in_features]


def _linear_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows, inputs, outputs: none; odd inputs; partial panels; every tile height; slices; many rows; wide
    shapes = [(0, 8, 8), (1, 1, 1), (1, 7, 33), (2, 64, 16), (3, 65, 100), (4, 10, 40), (5, 33, 17), (6, 128, 96)]
    shapes += [(7, 1100, 50), (13, 96, 65), (100, 513, 80), (193, 40, 130), (1, 896, 2000), (9, 512, 1001)]
    for seed, (rows, inputs, outputs) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)
        bias = torch.randn(outputs, generator=generator).to(dtype) if seed % 2 else None
        wide = torch.randn(rows, 3 * inputs, generator=generator).to(dtype)
        x = wide[:, inputs : 2 * inputs] if seed % 3 == 0 else wide[:, :inputs].contiguous()
        yield x, pack_weight(weight.to(dtype)), bias, outputs


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """Reference of the products below."""
    weight = unpack_weight(packed, x.shape[1], out_features)
    wide = torch.promote_types(x.dtype, torch.float32)
    result = x.to(wide) @ weight.to(wide).T
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(x.dtype)


@define_op(inputs=_linear_inputs, devices=("cpu",), recordable=True)
def packed_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """`x @ weight.T + bias`, accumulated in float32.

    The kernel sums every output in one fixed order, so a row's result does not depend on the other rows.

    Args:
        x: [T, K] float; rows may be strided.
        packed: the weight [N, K] as `pack_weight` returns it, dtype of x.
        bias: [N], dtype of x, or None.
        out_features: N.

    Returns:
        [T, N], contiguous, dtype of x.
    """
    return _linear(x, packed, bias, out_features)


# Time of the gated product relative to the two ops, 896x9728 in bfloat16, interleaved on two cores of an AMD EPYC
# (Zen 3): 1 row 0.99, 8 rows 0.99, 32 rows 1.01, 128 rows 1.02, 1024 rows 1.03: its tasks have half the rows, and
# each reads its panels from memory. With AMX tiles, where writing the result costs far more than the product, on two
# cores of an Intel Xeon (Sapphire Rapids): 1 row 0.99, 8 rows 0.98, 32 rows 0.92, 128 rows 0.88, 1024 rows 0.83. With
# dot products of bfloat16 pairs, likewise faster than memory, on two cores of an AMD EPYC (Zen 5): 1 row 0.97, 8 rows
# 1.00, 32 rows 1.02, 128 rows 1.02, 256 rows 0.95, 1024 rows 0.94, 4096 rows 0.69.
_MAX_GATED_ROWS = 8
# kernels of bfloat16 products of many rows → rows from which on the gated product is the faster one
_LEAST_GATED_ROWS: dict[str | None, int] = {"amx_bf16": 0, "avx512_bf16": 256}
# name of a gated activation → act(x[:, :I]) * x[:, I:]
GATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: silu_and_mul(x),
    "gelu": lambda x: gelu_and_mul(x, "none"),
    "gelu_tanh": lambda x: gelu_and_mul(x, "tanh"),
}


def _gated_linear_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows, inputs, half of the outputs: none; odd inputs; every tile height; slices; several tasks; wide
    shapes = [(0, 8, 16), (1, 7, 16), (2, 64, 32), (3, 65, 48), (4, 10, 64), (5, 33, 80), (6, 128, 96), (7, 1100, 48)]
    shapes += [(13, 96, 64), (49, 513, 80), (193, 40, 128), (1, 896, 2000)]
    for seed, (rows, inputs, width) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        weight = (torch.randn(2 * width, inputs, generator=generator) / math.sqrt(inputs)).to(dtype)
        bias = torch.randn(2 * width, generator=generator).to(dtype) if seed % 2 else None
        x = torch.randn(rows, 3 * inputs, generator=generator).to(dtype)[:, inputs : 2 * inputs]
        yield x, pack_weight(weight), bias, 2 * width, list(GATED_ACTIVATIONS)[seed % 3]


@define_op(inputs=_gated_linear_inputs, devices=("cpu",), recordable=True)
def packed_gated_linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, activation: str
) -> torch.Tensor:
    """`act(y[:, :I]) * y[:, I:]` of `y = x @ weight.T + bias`; the kernel never writes y to memory.

    y is rounded to the dtype of x in between, so that the result equals that of the two separate ops.

    Args:
        x: [T, K] float; rows may be strided.
        packed: the weight [2*I, K] as `pack_weight` returns it, dtype of x.
        bias: [2*I], dtype of x, or None.
        out_features: 2*I, a multiple of 32.
        activation: one of GATED_ACTIVATIONS.

    Returns:
        [T, I], contiguous, dtype of x.
    """
    y = _linear(x, packed, bias, out_features)
    gate, up = y.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    act = torch.nn.functional
    gate = act.silu(gate) if activation == "silu" else act.gelu(gate, approximate=approximate)
    return (gate * up).to(x.dtype)


# device type → converts a weight [N, K] to the memory format of that device's products; its shape stays [N, K]
WEIGHT_FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}


def has_kernel(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this dtype and device are packed in panels."""
    return dtype in FLOAT_DTYPES and OPS["packed_linear"].has_kernel(device.type)


class PackedRows:
    """Rows of a packed weight, written like a tensor by `copy_`.

    Args:
        packed: the weight [N, K] as `pack_weight` returns it.
        first_row: index of the first row.
        shape: number of rows, and K.
    """

    def __init__(self, packed: torch.Tensor, first_row: int, shape: tuple[int, int]) -> None:
        self._packed = packed
        self._first_row = first_row
        self.shape = shape
        self.dtype = packed.dtype

    def copy_(self, source: torch.Tensor) -> None:
        """Writes the rows: [M, K] of any float dtype, on the CPU."""
        rows = source.to(self.dtype)
        pack_panels(rows if rows.stride(1) == 1 else rows.contiguous(), self._packed, self._first_row)


class PackedLinear:
    """A linear layer whose weight is packed once for the device's GEMM.

    On CPU the checkpoint's tensors are written straight into the panels, without an intermediate copy.

    Args:
        out_features: N.
        in_features: K.
        dtype: of the weight.
        device: of the weight.

    Example::

        layer = PackedLinear(3, 8, torch.float32, torch.device("cpu"))
        layer.target(0, 3).copy_(torch.randn(3, 8))
        layer.finish()
        layer(torch.randn(5, 8), None)      # [5, 3]
    """

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self._has_kernel = has_kernel(dtype, device)
        self._least_gated_rows = sys.maxsize
        if self._has_kernel and dtype == torch.bfloat16:
            self._least_gated_rows = _LEAST_GATED_ROWS.get(cpu_isa("many_rows", dtype), sys.maxsize)
        if self._has_kernel:
            self._weight = packed_zeros(out_features, in_features, dtype)
        else:
            self._weight = torch.empty(out_features, in_features, dtype=dtype, device=device)

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedLinear:
        """A layer with an existing weight [N, K]; where weights are packed, the layer keeps only the packed copy."""
        out_features, in_features = weight.shape
        layer = cls(out_features, in_features, weight.dtype, weight.device)
        if layer._has_kernel:
            layer.target(0, layer.out_features).copy_(weight)
        else:
            layer._weight = weight
        layer.finish()
        return layer

    def target(self, first_row: int, num_rows: int) -> torch.Tensor | PackedRows:
        """Destination of rows [num_rows, K] of the weight. All rows must be written before `finish`."""
        if self._has_kernel:
            return PackedRows(self._weight, first_row, (num_rows, self.in_features))
        return self._weight[first_row : first_row + num_rows]

    def finish(self) -> None:
        """Converts the complete weight to the device's memory format, if it has one."""
        convert = None if self._has_kernel else WEIGHT_FORMATS.get(self._weight.device.type)
        if convert is not None:
            self._weight = convert(self._weight)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """indices: [T] int64, below N. Returns those rows of the weight, [T, K]. For packed weights only."""
        result: torch.Tensor = unpack_rows(self._weight, indices, self.in_features)
        return result

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K], dtype of the weight, rows may be strided; bias: [N] or None. Returns [T, N]."""
        if self._has_kernel:
            result: torch.Tensor = packed_linear(x, self._weight, bias, self.out_features)
            return result
        return torch.nn.functional.linear(x, self._weight, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """x: [T, K]; bias: [N] or None; activation: one of GATED_ACTIVATIONS. Returns [T, N/2]."""
        is_faster = len(x) <= _MAX_GATED_ROWS or len(x) >= self._least_gated_rows
        if self._has_kernel and self.out_features % (2 * PANEL) == 0 and is_faster:
            result: torch.Tensor = packed_gated_linear(x, self._weight, bias, self.out_features, activation)
            return result
        return GATED_ACTIVATIONS[activation](self(x, bias))


load_native_library()
