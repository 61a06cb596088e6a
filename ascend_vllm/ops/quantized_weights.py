"""The forms that devices keep quantized weights in: panels on CPUs, others in the tables below.

Letters: T tokens, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from ascend_vllm.ops.gemm import GATED_ACTIVATIONS
from ascend_vllm.ops.quantized_gemm import (
    GROUP_MULTIPLE,
    Int8Panels,
    QuantizedPanels,
    quantize_static,
    quantize_tokens,
)


class CodedWeight(Protocol):
    """A weight [N, K] in codes of 4 or 8 bits, as `quantized_gemm.QuantizedPanels`; rows are written while loading.

    Attributes:
        order: [K] int, which column of x is the weight's k-th input; None: they are in order. Set before `finish`.
        rounds_inputs: whether products round their inputs to 8 bits, where the device can.
        bias_dtype: of the biases of products.
    """

    order: torch.Tensor | None
    rounds_inputs: bool
    bias_dtype: torch.dtype

    def pack_rows(
        self, first_row: int, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None
    ) -> None:
        """Writes rows, the first ones first: values [M, K] uint8 or float8_e4m3fn, scales and zeros [M, G]."""

    def finish(self) -> None:
        """Called when all rows are written."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], bias [N] → [T, N]."""

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """x [T, K], bias [N] → [T, N/2]."""


@dataclasses.dataclass(frozen=True)
class CodedForm:
    """How a device keeps weights in codes.

    Attributes:
        make: called with N, K, the inputs of a group and the code; by name, `has_zeros` and `scale_dtype` as
            `QuantizedPanels`, `dtype` of activations, and `device`.
        group_multiple: groups of inputs have a multiple of so many, unless there is only one.
        widened: codes that are kept in the dtype of activations, as the device has no products of them.
    """

    make: Callable[..., CodedWeight]
    group_multiple: int
    widened: tuple[str, ...] = ()


def _make_panels(*sizes: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> CodedWeight:  # noqa: ARG001
    return QuantizedPanels(*sizes, **options)


# device type → its form of weights in codes
CODED_FORMS = {"cpu": CodedForm(_make_panels, GROUP_MULTIPLE)}

# inputs in 8 bits: what `Int8Weight.quantize` of the same device returns
RoundedInputs: TypeAlias = tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class InputRounding:
    """How inputs are rounded to 8 bits: x is about (q - offset) * scale.

    Attributes:
        scale: of all inputs, if it was measured; None: each token has its own.
        offset: of all inputs, if it was measured, -128 ... 127.
        has_offsets: whether tokens have offsets of their own.
        subtracts_offset: whether products subtract a measured offset; otherwise the bias contains that.
    """

    scale: float | None = None
    offset: int = 0
    has_offsets: bool = False
    subtracts_offset: bool = True

    @property
    def uses_offsets(self) -> bool:
        """Whether products subtract offsets."""
        return self.has_offsets if self.scale is None else self.offset != 0 and self.subtracts_offset


class Int8Weight(abc.ABC):
    """A weight [N, K] in 8-bit whole numbers with a scale per output, and how its inputs are rounded.

    Args:
        parts: values [M, K] int8 and scales [M] float32 of the rows, one part after the other.
        rounding: of the inputs.
        dtype: of activations.
        device: of the products.
    """

    # of biases of usual layers; None: that of activations
    bias_dtype: ClassVar[torch.dtype | None] = None
    # most inputs
    most_inputs: ClassVar[int]

    @abc.abstractmethod
    def __init__(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rounding: InputRounding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None: ...

    @abc.abstractmethod
    def bias_of_sums(self, bias: torch.Tensor) -> torch.Tensor:
        """A bias [N] int32 that is added to sums of products, before they are scaled, as `product` takes it."""

    @abc.abstractmethod
    def quantize(self, x: torch.Tensor) -> RoundedInputs:
        """x [T, K] → inputs of `product`."""

    @abc.abstractmethod
    def product(self, inputs: RoundedInputs, bias: torch.Tensor | None) -> torch.Tensor:
        """Rounded inputs and a bias [N] → [T, N] in the dtype of activations."""

    def gated_product(self, inputs: RoundedInputs, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """The same, and one of GATED_ACTIVATIONS of it: [T, N/2]."""
        return GATED_ACTIVATIONS[activation](self.product(inputs, bias))


class PanelInt8Weight(Int8Weight):
    """In panels, for CPUs.

    Attributes:
        panels: the weight.
    """

    bias_dtype = torch.float32
    # whose products can be added in 32 bits
    most_inputs = 1 << 16

    def __init__(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        rounding: InputRounding,
        dtype: torch.dtype,
        device: torch.device,  # noqa: ARG002
    ) -> None:
        self._rounding = rounding
        self._dtype = dtype
        self.panels = Int8Panels(sum(len(values) for values, _ in parts), parts[0][0].shape[1])
        row = 0
        for values, scales in parts:
            self.panels.pack_int8_rows(row, values, scales)
            row += len(values)
        self._scales = torch.cat([scales for _, scales in parts])

    def bias_of_sums(self, bias: torch.Tensor) -> torch.Tensor:
        return (self._scales.double() * (self._rounding.scale or 1.0) * bias).float()

    def quantize(self, x: torch.Tensor) -> RoundedInputs:
        """x [T, K] → q [T, K] int8, scales [T] float32, offsets [T] int32."""
        rounding = self._rounding
        if rounding.scale is not None:
            return quantize_static(x, rounding.scale, rounding.offset)  # type: ignore[no-any-return]
        return quantize_tokens(x, rounding.has_offsets)  # type: ignore[no-any-return]

    def product(self, inputs: RoundedInputs, bias: torch.Tensor | None) -> torch.Tensor:
        return self.panels.product(*self._used(inputs), bias, self._dtype)

    def gated_product(self, inputs: RoundedInputs, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """Without storing the product."""
        return self.panels.gated_product(*self._used(inputs), bias, self._dtype, activation)

    def _used(self, inputs: RoundedInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q, scales, offsets = inputs
        return q, scales, offsets if self._rounding.uses_offsets else None


class QuantizedExperts(abc.ABC):
    """Gate, up and down of some experts in the form of a device that has one of its own, as `experts.ExpertStack`.

    Args:
        num_experts: of all ranks.
        first_expert: id of the first one here.
        size: how many are here.
        hidden_size: width of inputs and results.
        inner_size: width inside an expert.
        dtype: of activations.
        device: of the products.
    """

    def __init__(
        self,
        num_experts: int,
        first_expert: int,
        size: int,
        hidden_size: int,
        inner_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.size = size
        self.hidden_size = hidden_size
        self.inner_size = inner_size
        self.dtype = dtype
        self.device = device

    @abc.abstractmethod
    def put(self, index: int, matrix: int, panels: QuantizedPanels, rounding: InputRounding | None) -> None:
        """Takes a loaded matrix.

        Args:
            index: of the expert among those here.
            matrix: 0, 1 or 2: gate, up or down.
            panels: of it, on the CPU.
            rounding: of its inputs; None: they are not rounded.

        Raises:
            ValueError: the device has no products of such experts, or the matrix is not like those before.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Called when all matrices are here."""

    @abc.abstractmethod
    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: str,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `experts.experts_mlp`."""


# device type → its form of quantized experts, other than that of CPUs (`layers.quantization.expert_weights`)
EXPERT_FORMS: dict[str, type[QuantizedExperts]] = {}
# device type → its form of weights whose inputs are in 8 bits, too
INT8_FORMS: dict[str, type[Int8Weight]] = {"cpu": PanelInt8Weight}
