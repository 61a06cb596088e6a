"""Mixtures of experts with weights in 8 or 4 bits, and with inputs in 8 bits.

Letters: T tokens, H hidden, E experts, C experts that a token uses, I width inside an expert, P panels of 16 outputs,
K inputs, G groups of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ascend_vllm.ops.experts import gated_rows, weighted_sum
from ascend_vllm.ops.gemm import GATED_ACTIVATIONS, PANEL
from ascend_vllm.ops.native import load_native_library
from ascend_vllm.ops.quantized_gemm import (
    CODES,
    MIDDLES,
    Int8Panels,
    QuantizedPanels,
    gated_reference,
    int8_reference,
    linear_reference,
    random_panels,
    static_reference,
    tokens_reference,
)
from ascend_vllm.ops.registry import define_op
from ascend_vllm.platforms.host_memory import weight_memory


class PanelStack:
    """Packed weights of one size and format, one after the other. The first one that is put decides the format.

    Args:
        size: how many, E.
        num_panels: of each, P.

    Attributes:
        codes: [E, P, ceil(K * bits / 32), 16] int32.
        scales: [E, P, G, 16].
        zeros: [E, P, G, 16] uint8, or None.
        order: [E, K] int32, or None.
        sums: [E, P * 16] int32 of `Int8Panels`, or None.
        group_size: inputs of a group.
        code: one of CODES.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    code: str

    def __init__(self, size: int, num_panels: int) -> None:
        self._size = size
        self._num_panels = num_panels
        self._kind: tuple[object, ...] | None = None
        self.zeros: torch.Tensor | None = None
        self.order: torch.Tensor | None = None
        self.sums: torch.Tensor | None = None
        # which weights have been put, by their first panels
        self._orders: dict[int, torch.Tensor | None] = {}

    def put(self, index: int, first_panel: int, panels: QuantizedPanels) -> None:
        """Copies a weight, or some of its outputs, to its place.

        Args:
            index: of the weight.
            first_panel: where its outputs begin.
            panels: [N, K].

        Raises:
            ValueError: its format is not that of the others, or its inputs are in another order than those of the
                weight's other outputs.
        """
        kind = (type(panels), panels.in_features, panels.group_size, panels.code, panels.scales.dtype)
        if self._kind is None:
            self._kind = kind
            self.group_size, self.code = panels.group_size, panels.code
            shape = (self._size, self._num_panels)
            self.codes = weight_memory((*shape, *panels.codes.shape[1:]), torch.int32)
            self.scales = weight_memory((*shape, *panels.scales.shape[1:]), panels.scales.dtype)
            if isinstance(panels, Int8Panels):
                self.sums = torch.zeros(self._size, self._num_panels * PANEL, dtype=torch.int32)
        if kind != self._kind:
            raise ValueError(
                "the experts of a layer must be quantized alike (with act-order, several ranks need whole experts: "
                "--enable-expert-parallel)"
            )
        if not _equal(self._orders.setdefault(index, panels.order), panels.order):
            raise ValueError("the matrices of an expert that read the same inputs must have them in the same order")
        rows = slice(first_panel, first_panel + len(panels.codes))
        self.codes[index, rows] = panels.codes
        self.scales[index, rows] = panels.scales
        if panels.zeros is not None and self.zeros is None:
            self.zeros = torch.full(self.scales.shape, MIDDLES[self.code], dtype=torch.uint8)
        if panels.zeros is not None and self.zeros is not None:
            self.zeros[index, rows] = panels.zeros
        if panels.order is not None and self.order is None:
            self.order = torch.arange(panels.in_features, dtype=torch.int32).repeat(self._size, 1)
        if panels.order is not None and self.order is not None:
            self.order[index] = panels.order
        if isinstance(panels, Int8Panels) and self.sums is not None:
            start = first_panel * PANEL
            self.sums[index, start : start + panels.out_features] = panels.sums

    def arguments(self) -> tuple[Any, ...]:
        """What `quantized_experts_mlp` wants of a stack."""
        return self.codes, self.scales, self.zeros, self.order, self.group_size, self.code


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is second if first is None or second is None else torch.equal(first, second)


def _stacks(
    seed: int, experts: int, hidden: int, inner: int, make: Callable[[int, int, int], QuantizedPanels]
) -> tuple[PanelStack, PanelStack]:
    """Weights of experts.

    Args:
        seed: of all.
        experts: how many.
        hidden: H.
        inner: I.
        make: gets outputs, inputs and a seed, whose units tell the matrices of an expert apart.
    """
    gate_up, down = PanelStack(experts, 2 * gated_rows(inner) // PANEL), PanelStack(experts, -(-hidden // PANEL))
    for index in range(experts):
        for half in range(2):
            gate_up.put(index, half * gated_rows(inner) // PANEL, make(inner, hidden, 100 * seed + 10 * index + half))
        down.put(index, 0, make(hidden, inner, 100 * seed + 10 * index + 2))
    return gate_up, down


def _choices(seed: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """x, ids and weights; the first expert; shared and its gate."""
    tokens, hidden, _, experts, choices = sizes
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, 2 * hidden, generator=generator).to(dtype)
    x = wide[:, hidden:] if seed % 2 else wide[:, :hidden].contiguous()
    # with seed 4 the experts are the middle ones of twice as many, and other ids are of another rank
    total, first = (2 * experts, experts // 2) if seed == 4 else (experts, 0)
    ids = torch.rand(tokens, total, generator=generator).argsort(dim=-1)[:, :choices].int().contiguous()
    weights = torch.rand(tokens, choices, generator=generator)
    shared = torch.randn(tokens, hidden, generator=generator).to(dtype) if seed % 3 else None
    shared_gate = torch.randn(tokens, 1, generator=generator).to(dtype) if seed % 3 == 2 else None
    return x, ids, weights, first, shared, shared_gate


# tokens, hidden, width, experts, choices: none; odd sizes; part of a panel; many rows per expert
_SIZES = [(0, 16, 16, 2, 1), (1, 32, 16, 4, 2), (3, 64, 40, 3, 3), (9, 96, 64, 8, 4), (5, 33, 48, 6, 3)]
_SIZES += [(130, 64, 32, 2, 1), (1, 256, 160, 12, 6)]


def _quantized_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, sizes in enumerate(_SIZES):
        _, hidden, inner, experts, _ = sizes
        x, ids, weights, *rest = _choices(seed, dtype, sizes)
        for code in CODES:
            has_zeros = code == "uint4" and seed % 2 == 0

            def make(
                outputs: int, inputs: int, of: int, code: str = code, has_zeros: bool = has_zeros, seed: int = seed
            ) -> QuantizedPanels:
                size = inputs if seed % 2 else 32
                # scales of a weight have a dtype of its seed
                panels = QuantizedPanels(outputs, inputs, size, code, has_zeros=has_zeros)
                drawn = random_panels(outputs, inputs, size, code, has_zeros, of)
                panels.codes, panels.scales, panels.zeros = drawn[0], drawn[1].float(), drawn[2]
                if seed == 3:
                    generator = torch.Generator().manual_seed(of // 10)
                    panels.order = torch.randperm(inputs, generator=generator).int()
                return panels

            gate_up, down = _stacks(seed, experts, hidden, inner, make)
            activation = list(GATED_ACTIVATIONS)[seed % 3]
            yield x, ids, weights, *gate_up.arguments(), *down.arguments(), inner, activation, *rest


def _part(stack: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if stack is None else stack[expert]


@define_op(inputs=_quantized_inputs, devices=("cpu",), recordable=True)
def quantized_experts_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_zeros: torch.Tensor | None,
    gate_up_order: torch.Tensor | None,
    gate_up_group: int,
    gate_up_code: str,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_zeros: torch.Tensor | None,
    down_order: torch.Tensor | None,
    down_group: int,
    down_code: str,
    inner: int,
    activation: str,
    first_expert: int = 0,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.experts.experts_mlp` with weights in codes; products are rounded as those of `quantized_linear`.

    Args:
        x: [T, H] float; rows may be strided.
        ids: [T, C] int32, contiguous. Ids of other experts than these add nothing.
        weights: [T, C] float32, contiguous.
        gate_up: codes of [2 * I', H], see `PanelStack`, with I' = I up to a multiple of 16; ups begin with a panel.
        gate_up_scales: of them.
        gate_up_zeros: of them, or None.
        gate_up_order: [E, K] int32, columns of x; None: they are in order.
        gate_up_group: inputs of a group.
        gate_up_code: one of CODES.
        down: codes of [H, I]; this and the following ones likewise.
        down_scales: of them.
        down_zeros: of them, or None.
        down_order: of them, or None.
        down_group: of them.
        down_code: of them.
        inner: I.
        activation: one of GATED_ACTIVATIONS.
        first_expert: id of the first expert in `gate_up` and `down`.
        shared: [T, H], contiguous, dtype of x, added; or None.
        shared_gate: [T, 1], contiguous, dtype of x: `shared` is multiplied by its sigmoid; None: by 1.

    Returns:
        [T, H], contiguous, dtype of x.
    """

    width, hidden = gate_up.shape[1] * PANEL, x.shape[1]
    results = torch.zeros(*ids.shape, hidden, dtype=x.dtype)
    for expert in range(len(gate_up)):
        tokens, choices = torch.nonzero(ids == first_expert + expert, as_tuple=True)
        zeros, order = _part(gate_up_zeros, expert), _part(gate_up_order, expert)
        stack = (gate_up[expert], gate_up_scales[expert], zeros, None, order, width, gate_up_group, gate_up_code)
        gated = gated_reference(linear_reference(x[tokens], *stack), activation)[:, :inner]
        zeros, order = _part(down_zeros, expert), _part(down_order, expert)
        stack = (down[expert], down_scales[expert], zeros, None, order, hidden, down_group, down_code)
        results[tokens, choices] = linear_reference(gated, *stack)
    return weighted_sum(results, weights, shared, shared_gate)


def _int8_inputs(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for seed, sizes in enumerate(_SIZES):
        tokens, hidden, inner, experts, _ = sizes
        x, ids, weights, *rest = _choices(seed, dtype, sizes)

        def make(outputs: int, inputs: int, seed: int) -> QuantizedPanels:
            generator = torch.Generator().manual_seed(seed)
            panels = Int8Panels(outputs, inputs)
            values = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
            panels.pack_int8_rows(
                0, values, (0.5 + torch.rand(outputs, generator=generator)) / (74 * math.sqrt(inputs))
            )
            return panels

        stacks = _stacks(seed, experts, hidden, inner, make)
        # the inputs' scales: of rows; of rows with offsets; measured
        kind = seed % 3
        measured = torch.stack((torch.full((experts,), 0.02), torch.arange(experts) - 3.0), dim=1)
        parts = [
            (stack.codes, stack.scales, stack.sums if kind else None, measured if kind == 2 else None)
            for stack in stacks
        ]
        yield x, ids, weights, *parts[0], *parts[1], inner, list(GATED_ACTIVATIONS)[tokens % 3], *rest


@define_op(inputs=_int8_inputs, devices=("cpu",), recordable=True)
def int8_experts_mlp(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    gate_up_sums: torch.Tensor | None,
    gate_up_inputs: torch.Tensor | None,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    down_sums: torch.Tensor | None,
    down_inputs: torch.Tensor | None,
    inner: int,
    activation: str,
    first_expert: int = 0,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.experts.experts_mlp` of 8-bit weights, whose inputs are rounded to 8 bits, too.

    Args:
        x: [T, H] float; rows may be strided.
        ids: [T, C] int32, contiguous. Ids of other experts than these add nothing.
        weights: [T, C] float32, contiguous.
        gate_up: numbers + 128 of [2 * I', H], as codes of `quantized_experts_mlp`.
        gate_up_scales: [E, P, 1, 16] float32.
        gate_up_sums: [E, 2 * I'] int32, sums of the weights' rows; None: inputs have no offsets.
        gate_up_inputs: [E, 2] float32, scale and offset of all inputs of an expert, see `quantize_static`; None: each
            row has its own, see `quantize_tokens`.
        down: of [H, I]; this and the following ones likewise.
        down_scales: of it.
        down_sums: [E, H'] int32 with H' = H up to a multiple of 16, or None.
        down_inputs: of its inputs, or None.
        inner: I.
        activation: one of GATED_ACTIVATIONS.
        first_expert: id of the first expert in `gate_up` and `down`.
        shared: as in `quantized_experts_mlp`.
        shared_gate: likewise.

    Returns:
        [T, H], contiguous, dtype of x.
    """

    def product(
        rows: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        sums: torch.Tensor | None,
        measured: torch.Tensor | None,
        out_features: int,
    ) -> torch.Tensor:
        if measured is None:
            q, q_scales, offsets = tokens_reference(rows, sums is not None)
        else:
            scale, offset = measured.tolist()
            q, q_scales, offsets = static_reference(rows, scale, round(offset))
        given = offsets if sums is not None else None
        own = None if sums is None else sums[:out_features]
        return int8_reference(q, q_scales, given, codes, scales, own, None, out_features, x.dtype)

    results = torch.zeros(*ids.shape, x.shape[1], dtype=x.dtype)
    for expert in range(len(gate_up)):
        tokens, choices = torch.nonzero(ids == first_expert + expert, as_tuple=True)
        sums, measured = _part(gate_up_sums, expert), _part(gate_up_inputs, expert)
        both = product(x[tokens], gate_up[expert], gate_up_scales[expert], sums, measured, gate_up.shape[1] * PANEL)
        gated = gated_reference(both, activation)[:, :inner]
        sums, measured = _part(down_sums, expert), _part(down_inputs, expert)
        rows = product(gated, down[expert], down_scales[expert], sums, measured, x.shape[1])
        results[tokens, choices] = rows.to(x.dtype)
    return weighted_sum(results, weights, shared, shared_gate)


load_native_library()
