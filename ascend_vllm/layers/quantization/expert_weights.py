"""Quantized experts: each matrix is loaded by the method of its format, and then copied to a stack of them.

Letters: T tokens, H hidden, E experts, C experts that a token uses, I width inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.quantization.int8 import Int8Linear, StaticScale, joined_scale
from ascend_vllm.layers.quantization.matrix import WeightMethod
from ascend_vllm.ops.experts import ExpertStack, gated_rows
from ascend_vllm.ops.gemm import PANEL
from ascend_vllm.ops.quantized_experts import PanelStack, int8_experts_mlp, quantized_experts_mlp
from ascend_vllm.ops.quantized_weights import QuantizedExperts

# names of gate, up and down in an expert
MATRICES = ("gate_proj", "up_proj", "down_proj")


class QuantizedExpertStack:
    """Gate, up and down of some experts in 8 or 4 bits, as `ops.experts.ExpertStack`.

    Args:
        prefix: name of the experts, for messages.
        first_expert: id of the first one here.
        size: how many are here.
        hidden_size: H.
        inner_size: I.
    """

    def __init__(self, prefix: str, first_expert: int, size: int, hidden_size: int, inner_size: int) -> None:
        self._prefix = prefix
        self._first_expert = first_expert
        self._size = size
        self._inner_size = inner_size
        # where the ups begin
        self._half = gated_rows(inner_size) // PANEL
        self._gate_up = PanelStack(size, 2 * self._half)
        self._down = PanelStack(size, -(-hidden_size // PANEL))
        self._has_offsets = False
        # of inputs with measured scales, by the part (0: gate and up, 1: down) and the expert
        self._scales: dict[tuple[int, int], StaticScale] = {}
        # [E, 2] of both parts, scales and offsets; None: each row has its own
        self._measured: list[torch.Tensor | None] = [None, None]

    @property
    def product_kinds(self) -> frozenset[str]:
        """Of the products, of `ops.native.QUANTIZED_PRODUCTS`; known when the matrices are here."""
        return frozenset({"int8" if stack.sums is not None else stack.code for stack in (self._gate_up, self._down)})

    def put(self, index: int, matrix: int, method: WeightMethod) -> None:
        """Takes a loaded matrix.

        Args:
            index: of the expert among those here.
            matrix: 0, 1 or 2: gate, up or down.
            method: of the matrix.

        Raises:
            ModelLoadError: it is not like those before.
        """
        stack = self._down if matrix == 2 else self._gate_up
        try:
            stack.put(index, self._half if matrix == 1 else 0, method.panels)
        except ValueError as error:
            raise ModelLoadError(f"{self._prefix}: {error}") from error
        if not isinstance(method, Int8Linear):
            return
        self._has_offsets |= method.uses_offsets
        if method.static is not None:
            place = matrix // 2, index
            scales = [self._scales.get(place, method.static), method.static]
            self._scales[place] = joined_scale(self._prefix, scales, subtracts_offset=True)

    def finish(self) -> None:
        """Called when all matrices are here."""
        for part in range(2) if self._scales else ():
            scales = [self._scales[part, index] for index in range(self._size)]
            self._measured[part] = torch.tensor([(scale.scale, float(scale.offset)) for scale in scales])

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: str,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `ops.experts.experts_mlp`; returns [T, H]."""
        gate_up, down = self._gate_up, self._down
        rest = (self._inner_size, activation, self._first_expert, shared, shared_gate)
        result: torch.Tensor
        if gate_up.sums is not None:
            parts = [
                (stack.codes, stack.scales, stack.sums if self._has_offsets else None, measured)
                for stack, measured in zip((gate_up, down), self._measured, strict=True)
            ]
            result = int8_experts_mlp(x, ids, weights, *parts[0], *parts[1], *rest)
        else:
            result = quantized_experts_mlp(x, ids, weights, *gate_up.arguments(), *down.arguments(), *rest)
        return result


class DeviceExpertStack:
    """The same in the form of a device other than a CPU.

    Codes that the device has no products of are kept in the dtype of activations.

    Args:
        prefix: name of the experts, for messages.
        form: of the device.
        widened: codes that are kept in that dtype.
    """

    def __init__(self, prefix: str, form: QuantizedExperts, widened: Sequence[str]) -> None:
        self._prefix = prefix
        self._form = form
        self._widened = widened
        self._dense: ExpertStack | None = None

    def put(self, index: int, matrix: int, method: WeightMethod) -> None:
        """As `QuantizedExpertStack.put`.

        Raises:
            ModelLoadError: the device has no products of such experts, or the matrix is not like those before.
        """
        form = self._form
        if method.panels.code in self._widened:
            if self._dense is None:
                sizes = (form.num_experts, form.first_expert, form.size, form.hidden_size, form.inner_size)
                self._dense = ExpertStack(*sizes, form.dtype, form.device)
            self._dense.targets(index)[matrix].copy_(method.panels.dequantized())
            return
        try:
            if self._dense is not None:
                raise ValueError("the experts of a layer must be quantized alike")
            form.put(index, matrix, method.panels, method.rounding if isinstance(method, Int8Linear) else None)
        except ValueError as error:
            raise ModelLoadError(f"{self._prefix}: {error}") from error

    def finish(self) -> None:
        """Called when all matrices are here."""
        (self._dense or self._form).finish()

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: str,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `ops.experts.experts_mlp`; returns [T, H]."""
        return (self._dense or self._form)(x, ids, weights, activation, shared, shared_gate)
