"""Quantized experts on Ascend NPUs, by products of groups of rows.

Letters: T tokens, H hidden, E experts (of this rank), I width inside an expert, M pairs of a token and an expert that
it uses, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from ascend_vllm.ops.ascend_experts import ACTIVATIONS, add_rows, sort_rows
from ascend_vllm.ops.ascend_formats import format_stack, is_fractal
from ascend_vllm.ops.ascend_quantized import pack_int4
from ascend_vllm.ops.quantized_gemm import CODES, MIDDLES, QuantizedPanels, unpack_codes
from ascend_vllm.ops.quantized_weights import InputRounding, QuantizedExperts
from ascend_vllm.ops.weight_only import PACKED


class _Stack:
    """One matrix of each expert, for npu_grouped_matmul.

    Args:
        size: E.
        shape: [N, K] of each.
        code: of the weights.
        group_size: of their inputs.
        has_int8_inputs: whether inputs are in 8 bits, too.
        dtype: of activations.
        device: of the products.
    """

    def __init__(
        self,
        size: int,
        shape: tuple[int, int],
        code: str,
        group_size: int,
        has_int8_inputs: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        outputs, inputs = shape
        self._has_int8_inputs = has_int8_inputs
        self._middle = MIDDLES[code]
        self._bits = CODES[code]
        self._dtype = dtype
        self._device = device
        # until `finish`, on the CPU: numbers [E, N, K], scales [E, N, G], and what numbers are off by
        self._values = torch.empty(size, outputs, inputs, dtype=torch.int8)
        groups = -(-inputs // group_size)
        self._scales = torch.empty(size, outputs, groups)
        self._offsets: torch.Tensor | None = None
        # what npu_grouped_matmul is given beside the rows
        self._arguments: dict[str, list[torch.Tensor]] = {}

    def put(self, index: int, first_row: int, panels: QuantizedPanels) -> None:
        """Copies a matrix, or some of its outputs."""
        rows = slice(first_row, first_row + panels.out_features)

        def of_outputs(values: torch.Tensor) -> torch.Tensor:
            return values.transpose(1, 2).flatten(0, 1)[: panels.out_features].float()

        codes = unpack_codes(panels.codes, panels.in_features, panels.out_features, self._bits)
        # in uint8, whose bits are then those of the signed number
        self._values[index, rows] = (codes - self._middle).view(torch.int8)
        self._scales[index, rows] = of_outputs(panels.scales)
        if panels.zeros is not None:
            if self._offsets is None:
                self._offsets = torch.zeros_like(self._scales)
            self._offsets[index, rows] = self._middle - of_outputs(panels.zeros)

    def finish(self) -> None:
        """Brings the matrices to the device."""
        if self._has_int8_inputs:
            weight = format_stack(self._values.to(self._device), quantized=True)
            # CANN wants a scale in bfloat16 for results in it, but for weights in tiles
            has_wide_scale = self._dtype == torch.float16 or is_fractal(weight)
            scale = self._scales[:, :, 0].contiguous().to(self._device, None if has_wide_scale else self._dtype)
            self._arguments = {"weight": [weight], "scale": [scale]}
        else:
            if self._bits == 4 and self._offsets is None:
                self._offsets = torch.zeros_like(self._scales)
            self._arguments = {"weight": [self._weight()], "antiquant_scale": [self._of_outputs(self._scales)]}
            if self._offsets is not None:
                self._arguments["antiquant_offset"] = [self._of_outputs(self._offsets)]
        del self._values, self._scales, self._offsets

    def _weight(self) -> torch.Tensor:
        """[E, K, N], or packed [E, K, N / 8]."""
        size, outputs, inputs = self._values.shape
        if self._bits == 8:
            return self._values.to(self._device).transpose(1, 2)
        packed = [pack_int4(values.T, self._device) for values in self._values]
        return torch.stack(packed).view(size, inputs, outputs // PACKED)

    def _of_outputs(self, values: torch.Tensor) -> torch.Tensor:
        """values [E, N, G] → [E, G, N], or [E, N] of a single group, in activations' dtype."""
        turned = values.transpose(1, 2)
        return (turned[:, 0] if turned.shape[1] == 1 else turned).contiguous().to(self._device, self._dtype)

    def inputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows as products take them, and their scales if they are int8."""
        if not self._has_int8_inputs:
            return rows, None
        return torch.ops.npu.npu_dynamic_quant(rows)  # type: ignore[no-any-return]

    def __call__(self, rows: torch.Tensor, ends: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """rows [M, K], with their scales [M] if they are int8 → [M, N], undefined behind the last end."""
        arguments: dict[str, Any] = dict(self._arguments)
        if scales is not None:
            arguments |= {"per_token_scale": [scales], "output_dtype": self._dtype}
        (result,) = torch.ops.npu.npu_grouped_matmul(
            [rows], **arguments, group_list=ends, split_item=2, group_type=0, group_list_type=0
        )
        return result  # type: ignore[no-any-return]


class NpuQuantizedExperts(QuantizedExperts):
    """See `QuantizedExperts`. Inputs in 8 bits have a scale per token."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        # gate and up, and down; each with the format of its matrices
        self._parts: dict[int, tuple[_Stack, tuple[object, ...]]] = {}

    def put(self, index: int, matrix: int, panels: QuantizedPanels, rounding: InputRounding | None) -> None:
        self._check(panels, rounding)
        part = matrix // 2
        kind = panels.code, panels.group_size, rounding
        if part not in self._parts:
            shape = (self.hidden_size, self.inner_size) if part else (2 * self.inner_size, self.hidden_size)
            stack = _Stack(
                self.size, shape, panels.code, panels.group_size, rounding is not None, self.dtype, self.device
            )
            self._parts[part] = stack, kind
        stack, first_kind = self._parts[part]
        if kind != first_kind:
            raise ValueError("the experts of a layer must be quantized alike")
        stack.put(index, self.inner_size if matrix == 1 else 0, panels)

    def _check(self, panels: QuantizedPanels, rounding: InputRounding | None) -> None:
        """Refuses what npu_grouped_matmul does not take."""
        has_groups = panels.group_size < panels.in_features
        what = None
        if rounding is not None and rounding.scale is not None:
            what = "measured scales of inputs"
        elif rounding is not None and rounding.has_offsets:
            what = "asymmetric inputs"
        elif panels.code not in ("uint4", "uint8"):
            what = "8-bit floats"
        elif panels.order is not None:
            what = "act-order"
        elif panels.code == "uint8" and has_groups:
            what = "groups of inputs in 8 bits"
        elif panels.code == "uint4" and panels.in_features % panels.group_size:
            what = f"groups of {panels.group_size} inputs, which do not divide {panels.in_features}"
        elif panels.code == "uint4" and panels.out_features % PACKED:
            what = f"4 bits with {panels.out_features} outputs, which 8 does not divide"
        if what is not None:
            raise ValueError(
                f"an NPU has no products of experts with {what}; use W8A8 with a scale per token, 4 bits, or the "
                "unquantized checkpoint"
            )

    def finish(self) -> None:
        for stack, _ in self._parts.values():
            stack.finish()

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: str,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        if len(x) == 0:
            return x.new_empty(x.shape)
        gate_up, down = (self._parts[part][0] for part in range(2))
        rows, scales = gate_up.inputs(x.contiguous())
        sizes = (self.first_expert, self.size, self.num_experts)
        rows, places, ends, row_scales = sort_rows(rows, ids, *sizes, scales)
        rows = gate_up(rows, ends, None if scales is None else row_scales)
        rows, scales = down.inputs(ACTIVATIONS[activation](rows))
        rows = down(rows, ends, scales)
        return add_rows(rows, places, ends, weights, self.size < self.num_experts, shared, shared_gate)
