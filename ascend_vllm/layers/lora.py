"""LoRA in linear layers: a layer's method is wrapped by one that adds what each row's adapter makes of the inputs.

Adapters lie in slots, memory at fixed addresses in every layer, so that tapes and graphs may read them. A row's slot
is step state (`layers.step_state`). Steps in which no row has an adapter compute nothing else than the wrapped
methods.

Letters: T tokens, L slots, S slices of a layer, one for each of its matrices, K inputs, N outputs, R largest rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.linear import Linear
from ascend_vllm.layers.quantization.base import (
    Activation,
    ActivationQuant,
    LayerKind,
    LinearLayer,
    LinearOutput,
    QuantMethod,
    QuantScheme,
)
from ascend_vllm.layers.step_state import StepState, StepStateSpec
from ascend_vllm.ops.gemm import GATED_ACTIVATIONS
from ascend_vllm.ops.lora import ADAPTER_FORMS, PackedAdapter
from ascend_vllm.types.step import ADAPTER_SLOT

# in the step state ADAPTER_SLOT: a row has no adapter
NO_ADAPTER = -1
_ADAPTER_ORDER = "adapter_order"


class Matrices(Protocol):
    """What an adapter adds to one linear layer of the checkpoint, see `models.lora_adapter.LoRAMatrices`."""

    @property
    def a(self) -> torch.Tensor:
        """[rank, K] float."""

    @property
    def b(self) -> torch.Tensor:
        """[N, rank] float, with the scale."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Normed:
    """A norm's result, and what the wrapped method reads."""

    plain: torch.Tensor
    quantized: Activation


class _Both(ActivationQuant):
    """Keeps a norm's result beside what the wrapped method makes of it."""

    def __init__(self, inner: ActivationQuant) -> None:
        self._inner = inner

    def quantize(self, x: torch.Tensor) -> Activation:
        return _Normed(x, self._inner.quantize(x))


class LoRALinear(QuantMethod):
    """A method with adapters.

    Args:
        inner: the method of the layer's own weight.
        config: limits of adapters.
        step_state: of the model.
    """

    def __init__(self, inner: QuantMethod, config: LoRAConfig, step_state: StepState) -> None:
        self._inner = inner
        self._config = config
        self._step_state = step_state

    @property
    def product_kinds(self) -> frozenset[str]:  # type: ignore[override]
        """See `QuantMethod`."""
        return self._inner.product_kinds

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """The wrapped method's, and empty slots for adapters."""
        slots = self._inner.create_weights(layer)
        if self._inner.activation_quant is not None:
            self.activation_quant = _Both(self._inner.activation_quant)
        config = self._config
        self._adapters = ADAPTER_FORMS[layer.device.type](
            config.max_loras,
            [output.shard.size for output in layer.outputs],
            layer.in_features,
            config.max_rank,
            getattr(torch, config.dtype),
            layer.device,
        )
        # [maximum tokens] each
        dtype = self._adapters.index_dtype
        self._slots = self._step_state.declare(StepStateSpec(ADAPTER_SLOT, dtype, fill=NO_ADAPTER))
        self._order: torch.Tensor | None = None
        if self._adapters.reads_order:
            self._order = self._step_state.declare(StepStateSpec(_ADAPTER_ORDER, dtype, order_of=ADAPTER_SLOT))
        return slots

    def after_load(self, layer: LinearLayer) -> None:
        self._inner.after_load(layer)

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        plain, own = (x.plain, x.quantized) if isinstance(x, _Normed) else (x, x)
        result = self._inner.apply(layer, own)
        return result if self._step_state.is_plain else self._add(plain, result)

    def apply_gated(self, layer: LinearLayer, x: Activation, activation: str) -> torch.Tensor:
        plain, own = (x.plain, x.quantized) if isinstance(x, _Normed) else (x, x)
        if self._step_state.is_plain:
            return self._inner.apply_gated(layer, own, activation)
        return GATED_ACTIVATIONS[activation](self._add(plain, self._inner.apply(layer, own)))

    def _add(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        slots = self._slots[: len(x)]
        order = None if self._order is None else self._order[: len(x)]
        self._adapters.expand(result, self._adapters.shrink(x, slots, order), slots, order)
        return result

    def pack(self, layer: LinearLayer, matrices: Mapping[str, Matrices]) -> PackedAdapter | None:
        """The parts of an adapter that this rank's layer needs.

        Args:
            layer: that this method belongs to.
            matrices: of the adapter, by names in the checkpoint.

        Returns:
            None if the adapter leaves the layer as it is.

        Raises:
            ModelLoadError: a matrix does not fit the layer.
        """
        parts = [_part_of(layer, output, matrices.get(output.name)) for output in layer.outputs]
        return self._adapters.pack(parts) if any(part is not None for part in parts) else None

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Puts an adapter into a slot; None: one that leaves the layer as it is."""
        self._adapters.place(slot, adapter)


def _part_of(
    layer: LinearLayer, output: LinearOutput, part: Matrices | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """This rank's columns of A and rows of B."""
    if part is None:
        return None
    _check_shapes(layer, output, part)
    columns, rows = layer.in_shard, output.shard
    return (
        part.a[:, columns.start : columns.start + columns.size],
        part.b[rows.start : rows.start + rows.size],
    )


def _check_shapes(layer: LinearLayer, output: LinearOutput, part: Matrices) -> None:
    shapes = (tuple(part.a.shape), tuple(part.b.shape))
    wanted = ((len(part.a), layer.total_in_features), (output.total, len(part.a)))
    for name, shape, right in zip("AB", shapes, wanted, strict=True):
        if shape != right:
            raise ModelLoadError(
                f"{output.name}.lora_{name}.weight has shape {list(shape)}, the model needs {list(right)}"
            )


class LoRAScheme(QuantScheme):
    """Wraps the methods of linear layers. Embeddings, heads, routers and experts stay as they are.

    Args:
        inner: scheme of the checkpoint.
        config: limits of adapters.
        step_state: of the model.
    """

    def __init__(self, inner: QuantScheme, config: LoRAConfig, step_state: StepState) -> None:
        self._inner = inner
        self._config = config
        self._step_state = step_state
        self.ignored_weights = inner.ignored_weights

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        method = self._inner.method_for(layer)
        if layer.kind is not LayerKind.LINEAR or not isinstance(layer, Linear):
            return method
        return LoRALinear(method, self._config, self._step_state)


class ModelAdapters:
    """The slots for adapters in all layers of a model.

    Args:
        model: built with `LoRAScheme`.
    """

    def __init__(self, model: Layer) -> None:
        self._layers = [
            (layer, layer.method)
            for layer in model.layers()
            if isinstance(layer, Linear) and isinstance(layer.method, LoRALinear)
        ]
        self._targets = {output.name for layer, _ in self._layers for output in layer.outputs}

    def pack(self, matrices: Mapping[str, Matrices], name: str) -> list[PackedAdapter | None]:
        """An adapter's part in each layer, for `place`.

        Args:
            matrices: by names in the checkpoint.
            name: of the adapter's directory, for messages.

        Raises:
            ModelLoadError: it has matrices for layers that the model does not have, or of wrong shapes.
        """
        unknown = sorted(set(matrices) - self._targets)
        if unknown:
            kinds = sorted({target.rpartition(".")[2] for target in self._targets})
            raise ModelLoadError(
                f"While loading {name}, expected target modules in {kinds} but received {unknown[:8]}. "
                "Please verify that the loaded LoRA module is correct"
            )
        try:
            return [method.pack(layer, matrices) for layer, method in self._layers]
        except ModelLoadError as error:
            raise ModelLoadError(f"{name}: {error}") from error

    def place(self, slot: int, adapter: Sequence[PackedAdapter | None]) -> None:
        """Puts what `pack` returned into a slot, whose rows must have ended."""
        for (_, method), part in zip(self._layers, adapter, strict=True):
            method.place(slot, part)
