"""Matrix products with weights in 8 or 4 bits, and with inputs in 8 bits.

Letters: T tokens, K inputs, N outputs, P panels of 16 outputs, G groups of inputs.

Codes of weights are packed in panels of 16 outputs and words of 32 bits: codes[p, u, n] holds consecutive inputs
of output 16 * p + n, its i-th one at bit `bits * (i // 2) + 16 * (i % 2)`, so that one shift and one mask yield a
pair of inputs as two 16-bit numbers. A weight is `(value(code) - zero) * scale`, with the scale and the zero of its
output and its group of inputs.

Inputs in 16 bits are multiplied as integers or, with AMX, in bfloat16, see `quantized_linear`; those in float32 are
multiplied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from ascend_vllm.ops.gemm import GATED_ACTIVATIONS, PANEL
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.registry import define_op
from ascend_vllm.platforms.host_memory import weight_memory

# name of a code → its bits; uint4 and uint8 are 0..15 and 0..255, float8_e4m3 is torch.float8_e4m3fn
CODES = {"uint4": 4, "uint8": 8, "float8_e4m3": 8}
# what weights of a code without zeros subtract
MIDDLES = {"uint4": 8, "uint8": 128, "float8_e4m3": 0}
# inputs that have a scale of their own, if they are rounded to 8 bits; the last ones of a group may be fewer
ROUNDED_BLOCK = 32
# groups of inputs have a multiple of so many, unless there is only one
GROUP_MULTIPLE = 16


def _shifts(bits: int) -> torch.Tensor:
    """Lowest bit of each input of a word."""
    inputs = torch.arange(32 // bits)
    return bits * (inputs // 2) + 16 * (inputs % 2)


def _pack_inputs(_dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # outputs, inputs: none; partial panels; incomplete words; more than a tile; first rows within a panel
    shapes = [(0, 8), (1, 1), (16, 8), (17, 7), (33, 66), (40, 130), (300, 129)]
    for seed, (outputs, inputs) in enumerate(shapes):
        for bits in (4, 8):
            generator = torch.Generator().manual_seed(seed)
            values = torch.randint(2**bits, (outputs, 2 * inputs), generator=generator).to(torch.uint8)
            values = values[:, :inputs] if seed % 2 else values[:, inputs:].contiguous()
            first_row = 11 * (seed % 3)
            words = -(-inputs // (32 // bits))
            codes = torch.full((-(-(first_row + outputs) // PANEL), words, PANEL), 7, dtype=torch.int32)
            yield values, codes, first_row, bits


@define_op(inputs=_pack_inputs, mutates=("codes",), dtypes=(torch.float32,), tolerance=0.0, devices=("cpu",))
def pack_codes(values: torch.Tensor, codes: torch.Tensor, first_row: int, bits: int) -> None:
    """Writes rows of codes into panels of 16 outputs.

    Args:
        values: [M, K] uint8, each below 2 ** bits; rows may be strided.
        codes: [P, ceil(K * bits / 32), 16] int32; its other rows are unchanged. Inputs beyond K are set to zero.
        first_row: index in it of the first row.
        bits: 4 or 8.
    """
    words = codes.shape[1]
    padded = torch.nn.functional.pad(values, (0, words * (32 // bits) - values.shape[1])).long()
    packed = (padded.view(len(values), words, 32 // bits) << _shifts(bits)).sum(-1)
    rows = torch.arange(first_row, first_row + len(values))
    codes[rows // PANEL, :, rows % PANEL] = packed.to(torch.int32)  # the highest bit becomes the sign


def unpack_codes(codes: torch.Tensor, in_features: int, out_features: int, bits: int) -> torch.Tensor:
    """The codes [N, K] uint8 that `pack_codes` packed."""
    words = codes.transpose(1, 2).flatten(0, 1)[:out_features, :, None]
    inputs = torch.bitwise_right_shift(words, _shifts(bits).int())
    return torch.bitwise_and(inputs, 2**bits - 1).flatten(1)[:, :in_features].to(torch.uint8)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    in_features: int,
    out_features: int,
    group_size: int,
    code: str,
) -> torch.Tensor:
    """The weight [N, K], float32, or float64 for such scales; arguments as those of `quantized_linear`."""
    wide = torch.promote_types(scales.dtype, torch.float32)
    values = unpack_codes(codes, in_features, out_features, CODES[code])
    numbers = values.view(torch.float8_e4m3fn).to(wide) if code == "float8_e4m3" else values.to(wide)
    groups = torch.arange(in_features) // group_size

    def of_inputs(panels: torch.Tensor) -> torch.Tensor:
        return panels.transpose(1, 2).flatten(0, 1)[:out_features].to(wide)[:, groups]

    zero = of_inputs(zeros) if zeros is not None else MIDDLES[code]
    return (numbers - zero) * of_inputs(scales)


class QuantizedPanels:
    """A weight [N, K] in codes of 4 or 8 bits, packed for `quantized_linear`.

    Rows are written while the checkpoint loads, any number at a time; no other copy of the weight is made.

    Args:
        out_features: N.
        in_features: K.
        group_size: inputs of a group; the last group may have fewer. A multiple of 16, or at least K.
        code: one of CODES.
        has_zeros: whether groups have zeros; else the zero is the middle of the code, MIDDLES.
        scale_dtype: float32, float16 or bfloat16: which of them keeps the scales of the checkpoint exactly.

    Attributes:
        order: [K] int32, which column of x is the weight's k-th input, for weights whose inputs were sorted by group;
            None at first, which means that they are in order.
        codes: [P, ceil(K * bits / 32), 16] int32.
        scales: [P, G, 16], scale_dtype.
        zeros: [P, G, 16] uint8, or None.
        rounds_inputs: whether products round their inputs to 8 bits; False at first.
        bias_dtype: of the biases of products.

    Raises:
        ValueError: groups of that size are not possible.

    Example::

        panels = QuantizedPanels(32, 64, 32, "uint4")
        panels.pack_rows(0, torch.randint(16, (32, 64), dtype=torch.uint8), torch.ones(32, 2))
        panels(torch.randn(5, 64), None)      # [5, 32]
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        group_size: int,
        code: str,
        *,
        has_zeros: bool = False,
        scale_dtype: torch.dtype = torch.float32,
    ) -> None:
        group_size = min(group_size, in_features)
        if group_size < in_features and group_size % GROUP_MULTIPLE:
            raise ValueError(f"groups must have a multiple of {GROUP_MULTIPLE} inputs, got {group_size}")
        self.out_features = out_features
        self.in_features = in_features
        self.group_size = group_size
        self.code = code
        panels, groups = -(-out_features // PANEL), -(-in_features // group_size)
        self.codes = weight_memory((panels, -(-in_features * CODES[code] // 32), PANEL), torch.int32)
        self.scales = weight_memory((panels, groups, PANEL), scale_dtype)
        self.zeros = weight_memory((panels, groups, PANEL), torch.uint8) if has_zeros else None
        self.order: torch.Tensor | None = None
        self.rounds_inputs = False
        self.bias_dtype = torch.float32

    @property
    def num_bytes(self) -> int:
        """Bytes that one product reads."""
        parts = (self.codes, self.scales, self.zeros)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def product_kind(self) -> str:
        """Of its products, one of native.QUANTIZED_PRODUCTS."""
        return f"{self.code}_rounded" if self.rounds_inputs else self.code

    def pack_rows(
        self, first_row: int, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> None:
        """Writes M rows from `first_row` on.

        Args:
            first_row: index of the first row.
            values: [M, K] uint8 codes, or torch.float8_e4m3fn for that code; rows may be strided.
            scales: [M, G] float.
            zeros: [M, G], whole numbers in 0..255; None if the weight has none.
        """
        pack_codes(values.view(torch.uint8), self.codes, first_row, CODES[self.code])
        rows = torch.arange(first_row, first_row + len(values))
        self.scales[rows // PANEL, :, rows % PANEL] = scales.to(self.scales.dtype)
        if self.zeros is not None and zeros is not None:
            self.zeros[rows // PANEL, :, rows % PANEL] = zeros.to(torch.uint8)

    def finish(self) -> None:
        """Called when all rows are written; there is nothing left to do."""

    def dequantized(self) -> torch.Tensor:
        """The weight, [N, K] float32, with its inputs in the order of x."""
        sizes = (self.in_features, self.out_features, self.group_size)
        weight = dequantize(self.codes, self.scales, self.zeros, *sizes, self.code)
        if self.order is None:
            return weight
        # an input that is there twice has a weight of 0 once
        columns = torch.zeros(self.out_features, int(self.order.max()) + 1)
        return columns.index_add_(1, self.order, weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [T, K] float; bias: [N] float32 or None. Returns [T, N]."""
        result: torch.Tensor = quantized_linear(x, *self._arguments(bias), self.rounds_inputs)
        return result

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """x: [T, K]; bias: [N] float32 or None; activation: one of GATED_ACTIVATIONS. Returns [T, N/2]."""
        if self.out_features % (2 * PANEL):
            return GATED_ACTIVATIONS[activation](self(x, bias))
        result: torch.Tensor = quantized_gated_linear(x, *self._arguments(bias), activation, self.rounds_inputs)
        return result

    def _arguments(self, bias: torch.Tensor | None) -> tuple[Any, ...]:
        return self.codes, self.scales, self.zeros, bias, self.order, self.out_features, self.group_size, self.code


def random_panels(
    outputs: int, inputs: int, group_size: int, code: str, has_zeros: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, scales and zeros of a weight like that of a trained layer."""
    generator = torch.Generator().manual_seed(seed)
    scale_dtype = (torch.float32, torch.float16, torch.bfloat16)[seed % 3]
    panels = QuantizedPanels(outputs, inputs, group_size, code, has_zeros=has_zeros, scale_dtype=scale_dtype)
    shape = (outputs, panels.scales.shape[1])
    top = 2 ** CODES[code]
    if code == "float8_e4m3":
        values = (torch.randn(outputs, inputs, generator=generator) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        size = 100.0
    else:
        values = torch.randint(top, (outputs, inputs), generator=generator).to(torch.uint8)
        size = 0.3 * top
    scales = (0.5 + torch.rand(shape, generator=generator)) / (size * math.sqrt(inputs))
    zeros = torch.randint(top // 4, 3 * top // 4, shape, generator=generator) if has_zeros else None
    panels.pack_rows(0, values, scales, zeros)
    return panels.codes, panels.scales, panels.zeros


def _linear_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows, inputs, outputs, group: none; incomplete words; partial panels; every tile height; short last groups; many
    # rows; wide
    shapes = [(0, 8, 8, 8), (1, 1, 1, 1), (1, 7, 33, 7), (2, 64, 16, 32), (3, 65, 100, 16), (4, 96, 40, 64)]
    shapes += [(5, 33, 17, 32), (6, 128, 96, 128), (7, 1100, 50, 1100), (8, 336, 65, 48), (13, 1040, 96, 128)]
    shapes += [(100, 513, 80, 256), (193, 160, 130, 32), (1, 896, 520, 128), (9, 512, 301, 320)]
    shapes += [(70, 1900, 70, 1900), (97, 1000, 50, 128)]
    for seed, (rows, inputs, outputs, group_size) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(outputs, generator=generator) if seed % 2 else None
        wide = torch.randn(rows, 3 * inputs, generator=generator).to(dtype)
        x = wide[:, inputs : 2 * inputs] if seed % 3 == 0 else wide[:, :inputs].contiguous()
        order = torch.randperm(inputs, generator=generator).int() if seed % 5 == 4 else None
        if order is not None and seed % 2 == 0:
            # some of the columns twice
            x = x[:, : -(-inputs // 2)]
            order %= x.shape[1]
        for code, has_zeros in (("uint4", False), ("uint4", True), ("uint8", seed % 2 == 0), ("float8_e4m3", False)):
            panels = random_panels(outputs, inputs, group_size, code, has_zeros, seed)
            for rounds_inputs in (False, True)[: 1 if code == "float8_e4m3" else 2]:
                yield x, *panels, bias, order, outputs, group_size, code, rounds_inputs


def _round_blocks(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """Inputs [T, K] as 8-bit multiples of the scale of each block, computed in float32."""
    rounded = torch.empty_like(x, dtype=torch.float32)
    for group in range(0, x.shape[1], group_size):
        end = min(x.shape[1], group + group_size)
        for start in range(group, end, ROUNDED_BLOCK):
            block = slice(start, min(end, start + ROUNDED_BLOCK))
            values = x[:, block].float()
            scales = values.abs().amax(1, keepdim=True) / 127
            rounded[:, block] = torch.where(scales == 0, 0.0, torch.round(values / scales) * scales)
    return rounded


def linear_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    order: torch.Tensor | None,
    out_features: int,
    group_size: int,
    code: str,
    rounds_inputs: bool = False,
) -> torch.Tensor:
    """Reference of `quantized_linear`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    inputs = x if order is None else x[:, order.long()]
    if rounds_inputs:
        inputs = _round_blocks(inputs, group_size)
    weight = dequantize(codes, scales, zeros, inputs.shape[1], out_features, group_size, code)
    result = inputs.to(wide) @ weight.to(wide).T
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(x.dtype)


@define_op(inputs=_linear_inputs, devices=("cpu",), recordable=True)
def quantized_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    order: torch.Tensor | None,
    out_features: int,
    group_size: int,
    code: str,
    rounds_inputs: bool = False,
) -> torch.Tensor:
    """`x @ weight.T + bias` with a weight in codes.

    With AMX, bfloat16 inputs are multiplied by `code - zero`, which is exact in bfloat16, and the sums of groups are
    scaled and added in float32 in one fixed order. Otherwise the kernel of codes that are whole numbers rounds 16-bit
    inputs to 16-bit multiples of a scale, that of the largest one among up to 128 inputs of a group: an error far
    below the rounding of the result. Products are then exact in 32-bit integers, and added as above. A row's result
    does not depend on the other rows.

    Args:
        x: [T, K] float, or fewer columns if order names some of them twice; rows may be strided.
        codes: the weight [N, K], [P, ceil(K * bits / 32), 16] int32 as `QuantizedPanels` holds it.
        scales: [P, G, 16] float32, float16 or bfloat16.
        zeros: [P, G, 16] uint8, or None for the middle of the code; None for float8_e4m3.
        bias: [N] float32, or None.
        order: [K] int32, which column of x is the weight's k-th input; None: they are in order.
        out_features: N.
        group_size: inputs of a group, a multiple of 16 or K.
        code: one of CODES.
        rounds_inputs: whether inputs are rounded to 8 bits: in each row, blocks of 32 inputs of a group, whose last
            one may be shorter, to multiples of their largest absolute value / 127. Not with float8_e4m3.

    Returns:
        [T, N], contiguous, dtype of x.
    """
    return linear_reference(x, codes, scales, zeros, bias, order, out_features, group_size, code, rounds_inputs)


def _gated_linear_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows, inputs, half of the outputs, group
    shapes = [(0, 8, 16, 8), (1, 7, 16, 7), (2, 64, 32, 32), (5, 33, 80, 16), (7, 1100, 48, 1100), (13, 96, 64, 48)]
    shapes += [(49, 513, 80, 128), (193, 64, 128, 32), (1, 896, 400, 128), (70, 1900, 48, 1900)]
    for seed, (rows, inputs, width, group_size) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(2 * width, generator=generator) if seed % 2 else None
        x = torch.randn(rows, 3 * inputs, generator=generator).to(dtype)[:, inputs : 2 * inputs]
        for code in CODES:
            panels = random_panels(2 * width, inputs, group_size, code, code == "uint4" and seed % 2 == 1, seed)
            rounds_inputs = code != "float8_e4m3" and seed % 2 == 0
            activation = list(GATED_ACTIVATIONS)[seed % 3]
            yield x, *panels, bias, None, 2 * width, group_size, code, activation, rounds_inputs


def gated_reference(y: torch.Tensor, activation: str) -> torch.Tensor:
    """Reference of the gated activations."""
    gate, up = y.to(torch.promote_types(y.dtype, torch.float32)).chunk(2, dim=-1)
    act = torch.nn.functional
    gate = act.silu(gate) if activation == "silu" else act.gelu(gate, approximate=activation[5:] or "none")
    return (gate * up).to(y.dtype)


@define_op(inputs=_gated_linear_inputs, devices=("cpu",), recordable=True)
def quantized_gated_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    order: torch.Tensor | None,
    out_features: int,
    group_size: int,
    code: str,
    activation: str,
    rounds_inputs: bool = False,
) -> torch.Tensor:
    """`act(y[:, :I]) * y[:, I:]` of `y = x @ weight.T + bias`; the kernel never writes y to memory.

    y is rounded to the dtype of x in between, so that the result equals that of the two separate ops.

    Args:
        x: [T, K] float; rows may be strided.
        codes: the weight [2*I, K], as those of `quantized_linear`; so are scales and zeros.
        scales: of the weight.
        zeros: of the weight, or None.
        bias: [2*I] float32, or None.
        order: of the inputs, or None.
        out_features: 2*I, a multiple of 32.
        group_size: as above.
        code: one of CODES.
        activation: one of GATED_ACTIVATIONS.
        rounds_inputs: as above.

    Returns:
        [T, I], contiguous, dtype of x.
    """
    y = linear_reference(x, codes, scales, zeros, bias, order, out_features, group_size, code, rounds_inputs)
    return gated_reference(y, activation)


def _tokens_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (rows, inputs) in enumerate([(0, 8), (1, 1), (3, 7), (2, 64), (5, 130), (40, 897), (1, 4864)]):
        x = torch.randn(rows, 2 * inputs, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 4 - 2)
        if seed % 3 == 0:
            x[:1] = 0.0
        yield x.to(dtype)[:, inputs:], seed % 2 == 1
        yield x.to(dtype)[:, inputs:] + 0.5, seed % 2 == 0


def tokens_reference(x: torch.Tensor, has_offset: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of `quantize_tokens`."""
    values = x.float()
    if has_offset:
        low, high = values.amin(1).clamp(max=0), values.amax(1).clamp(min=0)
        scales = (high - low) / 255
        offsets = torch.where(scales > 0, torch.round(-128 - low / scales), 0.0)
    else:
        scales = values.abs().amax(1) / 127
        offsets = torch.zeros_like(scales)
    q = torch.where(scales[:, None] > 0, torch.round(values / scales[:, None]) + offsets[:, None], 0.0)
    return q.clamp(-128, 127).to(torch.int8), scales, offsets.to(torch.int32)


@define_op(inputs=_tokens_inputs, tolerance=0.0, devices=("cpu",), recordable=True)
def quantize_tokens(x: torch.Tensor, has_offset: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds each row to 8-bit multiples of its own scale; x is about `(q - offset) * scale`. Computed in float32.

    Without offsets, the scale of a row is its largest absolute value / 127. With offsets, it is (largest - smallest
    value) / 255, both taken of the row and 0, and the offset is round(-128 - smallest / scale); as vLLM's int8
    quantization of tokens and compressed-tensors' range. Halves are rounded to even numbers. A row of zeros has scale
    0 and q 0.

    Args:
        x: [T, K] float; rows may be strided.
        has_offset: whether rows have offsets; else they are zero.

    Returns:
        q [T, K] int8, scale [T] float32, offset [T] int32.
    """
    return tokens_reference(x, has_offset)


def _static_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (x, _) in enumerate(_tokens_inputs(dtype)):
        yield x, 0.013 * (1 + seed), 7 * (seed % 3)


def static_reference(x: torch.Tensor, scale: float, offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reference of `quantize_static`."""
    scales = torch.full((len(x),), scale, dtype=torch.float32, device=x.device)
    q = torch.round(x.float() / scales[:, None]) + offset
    offsets = torch.full((len(x),), offset, dtype=torch.int32, device=x.device)
    return q.clamp(-128, 127).to(torch.int8), scales, offsets


@define_op(inputs=_static_inputs, tolerance=0.0, devices=("cpu",), recordable=True)
def quantize_static(x: torch.Tensor, scale: float, offset: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`clamp(round(x / scale) + offset, -128, 127)`, computed in float32; halves are rounded to even numbers.

    Args:
        x: [T, K] float; rows may be strided.
        scale: of all rows, above 0.
        offset: of all rows.

    Returns:
        As `quantize_tokens`: q [T, K] int8, scale [T] float32, offset [T] int32.
    """
    return static_reference(x, scale, offset)


class Int8Panels(QuantizedPanels):
    """A weight [N, K] in 8-bit whole numbers with one scale per output, packed for `int8_linear`.

    Args:
        out_features: N.
        in_features: K.

    Attributes:
        sums: [N] int32, sums of each row's numbers, for inputs with offsets.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__(out_features, in_features, in_features, "uint8")
        self.sums = torch.zeros(out_features, dtype=torch.int32)

    @property
    def product_kind(self) -> str:
        """Of its products."""
        return "int8"

    def pack_int8_rows(self, first_row: int, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Writes M rows from `first_row` on; values: [M, K] int8; scales: [M] float32."""
        self.pack_rows(first_row, values.view(torch.uint8) ^ 128, scales[:, None])
        self.sums[first_row : first_row + len(values)] = values.sum(1, dtype=torch.int32)

    def product(
        self,
        q: torch.Tensor,
        q_scales: torch.Tensor,
        q_offsets: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`int8_linear` with this weight."""
        sums = self.sums if q_offsets is not None else None
        result: torch.Tensor = int8_linear(
            q, q_scales, q_offsets, self.codes, self.scales, sums, bias, self.out_features, dtype
        )
        return result

    def gated_product(
        self,
        q: torch.Tensor,
        q_scales: torch.Tensor,
        q_offsets: torch.Tensor | None,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        activation: str,
    ) -> torch.Tensor:
        """`int8_gated_linear` with this weight."""
        if self.out_features % (2 * PANEL):
            return GATED_ACTIVATIONS[activation](self.product(q, q_scales, q_offsets, bias, dtype))
        sums = self.sums if q_offsets is not None else None
        result: torch.Tensor = int8_gated_linear(
            q, q_scales, q_offsets, self.codes, self.scales, sums, bias, self.out_features, dtype, activation
        )
        return result


def _int8_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    # rows, inputs, outputs
    shapes = [(0, 8, 8), (1, 1, 1), (1, 7, 33), (2, 64, 16), (3, 65, 100), (4, 10, 40), (5, 33, 17), (6, 128, 96)]
    shapes += [(7, 1100, 50), (13, 96, 65), (100, 513, 80), (193, 40, 130), (1, 896, 2000), (9, 512, 1001)]
    shapes += [(70, 1900, 96)]
    for seed, (rows, inputs, outputs) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        q = torch.randint(-128, 128, (rows, inputs), generator=generator).to(torch.int8)
        if seed % 4 == 1:
            q[:] = -128
        weight = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
        panels = Int8Panels(outputs, inputs)
        panels.pack_int8_rows(0, weight, (0.5 + torch.rand(outputs, generator=generator)) / (74 * math.sqrt(inputs)))
        q_scales = (0.5 + torch.rand(rows, generator=generator)) / 74
        offsets = torch.randint(-128, 128, (rows,), generator=generator).int() if seed % 3 == 1 else None
        sums = None if offsets is None else panels.sums
        bias = torch.randn(outputs, generator=generator) if seed % 2 else None
        yield q, q_scales, offsets, panels.codes, panels.scales, sums, bias, outputs, dtype


def int8_reference(
    q: torch.Tensor,
    q_scales: torch.Tensor,
    q_offsets: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Reference of `int8_linear`; the result has the dtype of q_scales if that is wider than float32."""
    wide = q_scales.dtype
    weight = unpack_codes(codes, q.shape[1], out_features, 8).double() - 128
    # exact: sums of whole numbers below 2^53
    total = q.double() @ weight.T
    if q_offsets is not None and sums is not None:
        total -= q_offsets.double()[:, None] * sums.double()
    output_scales = scales.transpose(1, 2).reshape(-1)[:out_features].to(wide)
    result = total.to(wide) * (q_scales[:, None] * output_scales)
    if bias is not None:
        result = result + bias.to(wide)
    return result.to(dtype if wide == torch.float32 else wide)


@define_op(inputs=_int8_inputs, devices=("cpu",), recordable=True)
def int8_linear(
    q: torch.Tensor,
    q_scales: torch.Tensor,
    q_offsets: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`((q - q_offsets) @ weight.T) * q_scales * scales + bias` of 8-bit numbers; sums are exact in 32 bits.

    Args:
        q: [T, K] int8, contiguous; K is at most 65536.
        q_scales: [T] float32.
        q_offsets: [T] int32, or None.
        codes: the weight [N, K], [P, ceil(K / 4), 16] int32: its numbers + 128, as `Int8Panels` holds them.
        scales: [P, 1, 16] float32.
        sums: [N] int32, sums of the weight's rows; None without q_offsets.
        bias: [N] float32, or None.
        out_features: N.
        dtype: of the result: float32, float16 or bfloat16.

    Returns:
        [T, N], contiguous.
    """
    return int8_reference(q, q_scales, q_offsets, codes, scales, sums, bias, out_features, dtype)


def _int8_gated_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, (q, q_scales, offsets, codes, scales, sums, bias, outputs, _) in enumerate(_int8_inputs(dtype)):
        if outputs % (2 * PANEL) == 0:
            yield q, q_scales, offsets, codes, scales, sums, bias, outputs, dtype, list(GATED_ACTIVATIONS)[seed % 3]


@define_op(inputs=_int8_gated_inputs, devices=("cpu",), recordable=True)
def int8_gated_linear(
    q: torch.Tensor,
    q_scales: torch.Tensor,
    q_offsets: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """`act(y[:, :I]) * y[:, I:]` of the y that `int8_linear` returns.

    Args:
        q: [T, K] int8; this and the following ones as those of `int8_linear`.
        q_scales: of the rows.
        q_offsets: of the rows, or None.
        codes: the weight [2*I, K].
        scales: of the weight.
        sums: of the weight's rows, or None.
        bias: [2*I] float32, or None.
        out_features: 2*I, a multiple of 32.
        dtype: of the result.
        activation: one of GATED_ACTIVATIONS.

    Returns:
        [T, I], contiguous.
    """
    return gated_reference(
        int8_reference(q, q_scales, q_offsets, codes, scales, sums, bias, out_features, dtype), activation
    )


load_native_library()
