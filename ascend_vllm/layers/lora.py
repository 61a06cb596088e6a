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
from ascend_vllm.ops.lora import PANEL, lora_expand, lora_shrink, num_panels, pack_a, pack_b, padded_rank
from ascend_vllm.types.step import ADAPTER_SLOT

# in the step state ADAPTER_SLOT: a row has no adapter
NO_ADAPTER = -1


class Matrices(Protocol):
    """What an adapter adds to one linear layer of the checkpoint, see `models.lora_adapter.LoRAMatrices`."""

    @property
    def a(self) -> torch.Tensor:
        """[rank, K] float."""

    @property
    def b(self) -> torch.Tensor:
        """[N, rank] float, with the scale."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerAdapter:
    """An adapter's part in one layer, as `LoRALinear.place` copies it: this rank's columns and rows.

    Attributes:
        a: [S, R / 16, K, 16] in the adapters' dtype.
        b: [P, R, 16], P panels of all slices.
        rank: of the slice with the largest.
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: int


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
        num_slots, max_rank = self._config.max_loras, padded_rank(self._config.max_rank)
        dtype: torch.dtype = getattr(torch, self._config.dtype)
        self._widths = [output.shard.size for output in layer.outputs]
        of_a = (num_slots, len(self._widths), max_rank // PANEL, layer.in_features, PANEL)
        of_b = (num_slots, num_panels(self._widths), max_rank, PANEL)
        self._a, self._b = (torch.zeros(shape, dtype=dtype, device=layer.device) for shape in (of_a, of_b))
        # [L] int32: 0 where a slot's adapter leaves this layer as it is
        self._ranks = torch.zeros(num_slots, dtype=torch.int32, device=layer.device)
        # [maximum tokens] int32
        spec = StepStateSpec(ADAPTER_SLOT, torch.int32, fill=NO_ADAPTER)
        self._slots = self._step_state.declare(spec)
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
        lora_expand(result, lora_shrink(x, self._a, slots, self._ranks), self._b, slots, self._ranks, self._widths)
        return result

    def pack(self, layer: LinearLayer, matrices: Mapping[str, Matrices]) -> LayerAdapter | None:
        """The parts of an adapter that this rank's layer needs.

        Args:
            layer: that this method belongs to.
            matrices: of the adapter, by names in the checkpoint.

        Returns:
            None if the adapter leaves the layer as it is.

        Raises:
            ModelLoadError: a matrix does not fit the layer.
        """
        parts = [matrices.get(output.name) for output in layer.outputs]
        if not any(parts):
            return None
        a, b = torch.zeros_like(self._a[0]), torch.zeros_like(self._b[0])
        panel = rank = 0
        for index, (output, part) in enumerate(zip(layer.outputs, parts, strict=True)):
            last = panel + num_panels([output.shard.size])
            if part is not None:
                _check_shapes(layer, output, part)
                columns = slice(layer.in_shard.start, layer.in_shard.start + layer.in_shard.size)
                rows = slice(output.shard.start, output.shard.start + output.shard.size)
                pack_a(part.a[:, columns], a[index])
                pack_b(part.b[rows], b[panel:last])
                rank = max(rank, len(part.a))
            panel = last
        return LayerAdapter(a, b, rank)

    def place(self, slot: int, adapter: LayerAdapter | None) -> None:
        """Puts an adapter into a slot; None: one that leaves the layer as it is."""
        self._ranks[slot] = 0 if adapter is None else adapter.rank
        if adapter is not None:
            self._a[slot].copy_(adapter.a)
            self._b[slot].copy_(adapter.b)


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

    def pack(self, matrices: Mapping[str, Matrices], name: str) -> list[LayerAdapter | None]:
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

    def place(self, slot: int, adapter: Sequence[LayerAdapter | None]) -> None:
        """Puts what `pack` returned into a slot, whose rows must have ended."""
        for (_, method), part in zip(self._layers, adapter, strict=True):
            method.place(slot, part)
