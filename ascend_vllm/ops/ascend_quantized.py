"""Quantized weights on Ascend NPUs: the forms in which torch_npu's products read them.

Letters: T tokens, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.logger import init_logger
from ascend_vllm.ops.ascend_formats import format_inputs_first
from ascend_vllm.ops.gemm import GATED_ACTIVATIONS, PackedLinear
from ascend_vllm.ops.quantized_gemm import CODES, MIDDLES, tokens_reference
from ascend_vllm.ops.quantized_weights import CodedWeight, InputRounding, Int8Weight, RoundedInputs
from ascend_vllm.ops.weight_only import PACKED
from ascend_vllm.ops.weight_only import weight_only_linear as _weight_only_linear

logger = init_logger(__name__)

# most elements of the last axis of the operators' operands, and of either axis of a weight whose inputs are not
# rounded; larger weights are cut into pieces of outputs
MOST_ELEMENTS = 65535
# most values that are in 32 bits at a time while they are packed
_PACKED_AT_ONCE = 1 << 26


def _pieces(count: int) -> Iterator[slice]:
    """Ranges of so many outputs, none longer than the operators take, each a multiple of 8 but the last."""
    step = MOST_ELEMENTS // PACKED * PACKED
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def pack_int4(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """values [R, C] int8, each -8 ... 7, on the CPU → [R, C / 8] int32 on the device."""
    step = max(1, _PACKED_AT_ONCE // max(1, values.shape[1]))
    words = [
        torch.ops.npu.npu_convert_weight_to_int4pack(part.int().to(device).contiguous())
        for part in torch.split(values, step)
    ]
    return torch.cat(words)


def weight_only_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    """See `weight_only.weight_only_linear`.

    It is an op of ours because npugraph_ex of torch_npu 2.13 fails to compile graphs that name the operator itself.
    """
    if len(x) == 0:
        return x.new_empty(0, scales.shape[1])
    return torch.ops.npu.npu_weight_quant_batchmatmul(  # type: ignore[no-any-return]
        x.contiguous(), weight, scales, antiquant_offset=offsets, bias=bias, antiquant_group_size=group_size
    )


def make_coded_weight(
    out_features: int,
    in_features: int,
    group_size: int,
    code: str,
    *,
    has_zeros: bool,
    scale_dtype: torch.dtype,  # noqa: ARG001 - scales have the dtype of activations
    dtype: torch.dtype,
    device: torch.device,
) -> CodedWeight:
    """See `quantized_weights.CodedForm`. Weights in 8-bit floats are kept in the dtype of activations."""
    sizes = (out_features, in_features, min(group_size, in_features))
    if code == "float8_e4m3":
        _tell_widened(dtype)
        return _WidenedWeight(*sizes, dtype, device)
    return _NpuCodedWeight(*sizes, code, has_zeros, dtype, device)


@functools.cache
def _tell_widened(dtype: torch.dtype) -> None:
    logger.warning(
        "NPUs have no products of weights in 8-bit floats: they are kept in %s, in twice the memory", dtype
    )


class _Rows:
    """Rows that are written one part after the other, on the CPU.

    Attributes:
        order: see `CodedWeight`.
        rounds_inputs: without effect.
    """

    def __init__(self, out_features: int, in_features: int, group_size: int) -> None:
        self._sizes = (out_features, in_features)
        self._group_size = group_size
        self.order: torch.Tensor | None = None
        self.rounds_inputs = False
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def pack_rows(
        self, first_row: int, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> None:
        """See `CodedWeight`."""
        if first_row != sum(len(part[0]) for part in self._parts):
            raise RuntimeError("rows are written in another order")
        self._parts.append((values, scales, zeros))

    def _take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Values [N, K], scales [N, G] and zeros [N, G] of all rows, once."""
        values, scales, zeros = zip(*self._parts, strict=True)
        self._parts = []
        given = [part for part in zeros if part is not None]
        return torch.cat(values), torch.cat([part.float() for part in scales]), torch.cat(given) if given else None


class _WidenedWeight(_Rows):
    """Dequantized while it is loaded."""

    def __init__(
        self, out_features: int, in_features: int, group_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(out_features, in_features, group_size)
        self._dtype = dtype
        self._device = device
        self.bias_dtype = dtype
        self._weight: PackedLinear | None = None

    def finish(self) -> None:
        """Multiplies with the scales in float32, and rounds to the dtype of activations."""
        values, scales, _ = self._take()
        spread = scales.repeat_interleave(self._group_size, 1)[:, : values.shape[1]]
        self._weight = PackedLinear.of((values.float() * spread).to(self._dtype).to(self._device))
        self.order = None if self.order is None else self.order.to(self._device)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._weight is None:
            raise RuntimeError("a weight is used before it is loaded")
        return self._weight(x if self.order is None else x.index_select(1, self.order), bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return GATED_ACTIVATIONS[activation](self(x, bias))


class _NpuCodedWeight(_Rows):
    """For npu_weight_quant_batchmatmul: y = x @ ((weight + offset) * scale) + bias.

    Weights of 4 bits are packed along their outputs, [K, N / 8]; if 8 does not divide those, they are kept in 8 bits.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        group_size: int,
        code: str,
        has_zeros: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(out_features, in_features, group_size)
        if in_features > MOST_ELEMENTS:
            raise ModelLoadError(
                f"an NPU has no products of quantized weights with {in_features} inputs, but of {MOST_ELEMENTS} at "
                "most; use more ranks, or the unquantized checkpoint"
            )
        self._code = code
        self._has_zeros = has_zeros
        self._dtype = dtype
        self._device = device
        # CANN's rule
        self.bias_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
        # of each piece: its outputs, weight, scales and offsets
        self._pieces: list[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def finish(self) -> None:
        """Brings the rows to the device, in pieces of outputs."""
        values, scales, zeros = self._take()
        middle = MIDDLES[self._code]
        # in uint8, whose bits are then those of the signed number
        signed = (values - middle).view(torch.int8)
        has_groups = self._group_size < values.shape[1]
        for rows in _pieces(len(values)):
            scale = self._of_outputs(scales[rows])
            # the sum of a number and its offset is exact in 16 bits
            offset = None if zeros is None else self._of_outputs(middle - zeros[rows].float())
            self._pieces.append((rows, self._weight(signed[rows], has_groups), scale, offset))
        if not has_groups:
            self._group_size = 0
        self.order = None if self.order is None else self.order.to(self._device)

    def _weight(self, values: torch.Tensor, has_groups: bool) -> torch.Tensor:
        """values [M, K] int8 → [K, M], packed or not."""
        if CODES[self._code] == 4 and len(values) % PACKED == 0:
            return pack_int4(values.T, self._device)
        # with a scale per output CANN's kernel is faster on the transposed view of the other layout
        return values.T.contiguous().to(self._device) if has_groups else values.to(self._device).T

    def _of_outputs(self, values: torch.Tensor) -> torch.Tensor:
        """values [M, G] float → [G, M] of activations' dtype."""
        return values.T.contiguous().to(self._device, self._dtype)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.order is not None:
            x = x.index_select(1, self.order)
        parts = [
            _weight_only_linear(x, weight, scale, offset, None if bias is None else bias[rows], self._group_size)
            for rows, weight, scale, offset in self._pieces
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        return GATED_ACTIVATIONS[activation](self(x, bias))


class NpuInt8Weight(Int8Weight):
    """For npu_quant_matmul: contiguous [K, N], in tiles if VLLM_ASCEND_ENABLE_NZ says so, in pieces of outputs.

    Scales per token come from npu_dynamic_quant. With measured scales, npu_quantize multiplies by the reciprocal of
    the scale in the dtype of activations; products then have the scale whose reciprocal that is exactly. Their scales
    of outputs are float32 for bfloat16. For float16 they are parameters of the matrix unit, which keep 10 bits: the
    operator makes those of float32 in eager calls only.
    """

    most_inputs = MOST_ELEMENTS

    def __init__(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rounding: InputRounding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._rounding = rounding
        self._dtype = dtype
        values = torch.cat([part for part, _ in parts])
        scales = torch.cat([part for _, part in parts])
        self._out_features, in_features = values.shape
        # what is subtracted of the sums of each output
        sums = values.sum(1, dtype=torch.int32)
        self._shift: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None
        if rounding.scale is not None:
            reciprocal = torch.full((in_features,), 1 / rounding.scale, dtype=torch.float32).to(dtype)
            scales = scales / reciprocal[0].float()
            # [K] each, on the device
            self._reciprocal = reciprocal.to(device)
            self._offset = torch.full((in_features,), rounding.offset, dtype=dtype).to(device)
            if rounding.uses_offsets:
                self._shift = (-rounding.offset * sums).to(device)
        elif rounding.has_offsets:
            self._sums, self._scales = sums.float().to(device), scales.to(device)
        # of each piece: its outputs, weight and scales
        self._pieces = [
            (rows, format_inputs_first(values[rows].to(device)), self._output_scale(scales[rows].to(device)))
            for rows in _pieces(self._out_features)
        ]

    def _output_scale(self, scales: torch.Tensor) -> torch.Tensor:
        if self._rounding.scale is None or self._dtype != torch.float16:
            return scales
        return torch.ops.npu.npu_trans_quant_param(scales, None, 1)  # type: ignore[no-any-return]

    def bias_of_sums(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.to(self._pieces[0][1].device)

    def quantize(self, x: torch.Tensor) -> RoundedInputs:
        """x [T, K] → q [T, K] int8, with a scale per token also scales [T], with offsets those [T], too."""
        rounding = self._rounding
        if len(x) == 0 or (rounding.scale is None and rounding.has_offsets):
            # npu_dynamic_quant_asymmetric rounds a range without 0, and its offset is no whole number
            return tokens_reference(x, rounding.has_offsets)
        if rounding.scale is None:
            return torch.ops.npu.npu_dynamic_quant(x)  # type: ignore[no-any-return]
        q = torch.ops.npu.npu_quantize(x.contiguous(), self._reciprocal, self._offset, torch.qint8, -1, False)
        return (q,)

    def product(self, inputs: RoundedInputs, bias: torch.Tensor | None) -> torch.Tensor:
        q = inputs[0]
        if len(q) == 0:
            return q.new_empty(0, self._out_features, dtype=self._dtype)
        if self._rounding.scale is not None:
            return self._measured_product(q, bias)
        if self._sums is None:
            return self._products(q, bias, self._dtype, inputs[1])
        _, scales, offsets = inputs
        sums = self._products(q, None, torch.int32, None) - offsets.float()[:, None] * self._sums
        result = sums * (scales[:, None] * self._scales)
        return (result if bias is None else result + bias).to(self._dtype)

    def _measured_product(self, q: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if bias is None or bias.dtype == torch.int32:
            return self._products(q, self._shift if bias is None else bias, self._dtype, None)
        # with a measured scale the operator takes a bias of floats for bfloat16 only, and then none of integers
        return self._products(q, self._shift, self._dtype, None).add_(bias)

    def _products(
        self, q: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, token_scales: torch.Tensor | None
    ) -> torch.Tensor:
        parts = [
            torch.ops.npu.npu_quant_matmul(
                q,
                weight,
                scale,
                pertoken_scale=token_scales,
                bias=None if bias is None else bias[rows],
                output_dtype=dtype,
            )
            for rows, weight, scale in self._pieces
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
