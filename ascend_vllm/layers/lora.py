"""LoRA: a layer's method is wrapped by one that adds what each row's adapter makes of the inputs.

Adapters lie in slots, memory at fixed addresses in every layer, so that tapes and graphs may read them. A row's slot
is step state (`layers.step_state`). Steps in which no row has an adapter compute nothing else than the wrapped
methods.

Letters: T tokens, L slots, S slices of a layer, one for each of its matrices, K inputs, N outputs, R largest rank.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch

from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.distributed.collectives import Collectives, SingleRank
from ascend_vllm.distributed.parallel_context import ParallelContext, Shard
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
from ascend_vllm.ops.lora import (
    ADAPTER_FORMS,
    TABLE_FORMS,
    AdapterSlots,
    AddedVectors,
    PackedAdapter,
    PanelSlots,
    lora_clamp_tokens,
    lora_put_added,
)
from ascend_vllm.types.step import ADAPTER_SLOT

# in the step state ADAPTER_SLOT: a row has no adapter
NO_ADAPTER = -1
_ADAPTER_ORDER = "adapter_order"
# adapters' name of the LM head
_HEAD = "lm_head"
# names of the vectors of tokens that an adapter adds to the vocabulary, as vLLM 0.6.3 has them in its files
ADDED_INPUTS, ADDED_OUTPUTS = "input_embeddings", "output_embeddings"

Slots = TypeVar("Slots", bound=AdapterSlots)


class SlotMemory(Protocol):
    """What an `AdapterSite` places adapters in; see `AdapterSlots`."""

    def pack(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> PackedAdapter:
        """Arranges an adapter for `place`."""

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Copies an adapter into a slot; None: one that leaves the layer as it is."""


class Matrices(Protocol):
    """What an adapter adds to one matrix of the checkpoint, see `models.lora_adapter.LoRAMatrices`."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterSite:
    """A layer's slots, and which matrices of an adapter go into them.

    Attributes:
        slots: in the layer's memory.
        outputs: rows of B of each slice, by the matrices' names in the checkpoint.
        inputs: columns of A that this rank has.
        total_inputs: all columns of A.
        tensors: end of the matrices' names in adapters, with a place for "A" and "B".
        used: slots whose adapters change the layer.
    """

    slots: SlotMemory
    outputs: tuple[LinearOutput, ...]
    inputs: Shard
    total_inputs: int
    tensors: str = "lora_{}.weight"
    used: set[int] = dataclasses.field(default_factory=set)

    def pack(self, matrices: Mapping[str, Matrices]) -> PackedAdapter | None:
        """The parts of an adapter that this rank needs, for `place`.

        Args:
            matrices: of the adapter, by names in the checkpoint.

        Returns:
            None if the adapter leaves the layer as it is.

        Raises:
            ModelLoadError: a matrix does not fit the layer.
        """
        parts = [self._part_of(output, matrices.get(output.name)) for output in self.outputs]
        return self.slots.pack(parts) if any(part is not None for part in parts) else None

    def place(self, slot: int, adapter: PackedAdapter | None) -> None:
        """Puts what `pack` returned into a slot."""
        self.slots.place(slot, adapter)
        if adapter is None:
            self.used.discard(slot)
        else:
            self.used.add(slot)

    def _part_of(self, output: LinearOutput, part: Matrices | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's columns of A and rows of B."""
        if part is None:
            return None
        shapes = (tuple(part.a.shape), tuple(part.b.shape))
        wanted = ((len(part.a), self.total_inputs), (output.total, len(part.a)))
        for name, shape, right in zip("AB", shapes, wanted, strict=True):
            if shape != right:
                tensor = f"{output.name}.{self.tensors.format(name)}"
                raise ModelLoadError(f"{tensor} has shape {list(shape)}, the model needs {list(right)}")
        return _range(part.a.T, self.inputs).T, _range(part.b, output.shard)


def _range(rows: torch.Tensor, shard: Shard) -> torch.Tensor:
    return rows[shard.start : shard.start + shard.size]


@dataclasses.dataclass(frozen=True, slots=True)
class Ranks:
    """The workers that share the layers.

    Attributes:
        parallel: which of them this one is.
        collectives: of them.
    """

    parallel: ParallelContext = dataclasses.field(default_factory=ParallelContext)
    collectives: Collectives = dataclasses.field(default_factory=SingleRank)


class AdaptedMethod(QuantMethod):
    """A method with adapters.

    Args:
        inner: the method of the layer's own weight.
        config: limits of adapters.
        step_state: of the model.
        ranks: that share the layer.

    Attributes:
        sites: where parts of adapters go; set by `create_weights`.
    """

    sites: list[AdapterSite]

    def __init__(self, inner: QuantMethod, config: LoRAConfig, step_state: StepState, ranks: Ranks) -> None:
        self._inner = inner
        self._config = config
        self._step_state = step_state
        self._ranks = ranks

    @property
    def product_kinds(self) -> frozenset[str]:  # type: ignore[override]
        """See `QuantMethod`."""
        return self._inner.product_kinds

    def after_load(self, layer: LinearLayer) -> None:
        self._inner.after_load(layer)

    def _make_slots(self, form: Callable[..., Slots], widths: list[int], inputs: int, device: torch.device) -> Slots:
        """Empty slots in a form; also declares what their products read of a step."""
        config = self._config
        made = form(config.max_loras, widths, inputs, config.max_rank, getattr(torch, config.dtype), device)
        # [maximum tokens] each
        self._slots = self._step_state.declare(StepStateSpec(ADAPTER_SLOT, made.index_dtype, fill=NO_ADAPTER))
        self._order: torch.Tensor | None = None
        if made.reads_order:
            spec = StepStateSpec(_ADAPTER_ORDER, made.index_dtype, order_of=ADAPTER_SLOT)
            self._order = self._step_state.declare(spec)
        return made


class LoRALinear(AdaptedMethod):
    """A product with adapters.

    Where ranks split the layer's outputs, each has its rows of B and the whole of A, and where they split its inputs,
    the columns of A and the whole of B. With `LoRAConfig.fully_sharded` each has a share of the other matrix as well:
    columns of A, or rows of B; what all ranks' columns of A make of their inputs is added up before B.
    """

    # this rank's share of inputs and outputs that are whole on every rank
    _own_inputs = _own_outputs = slice(None)

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """The wrapped method's, and empty slots for adapters."""
        slots = self._inner.create_weights(layer)
        if self._inner.activation_quant is not None:
            self.activation_quant = _Both(self._inner.activation_quant)
        outputs, inputs = self._targets(layer), layer.in_shard
        if self._config.fully_sharded:
            outputs, inputs = self._share(outputs, inputs, layer.total_in_features)
        widths = [output.shard.size for output in outputs]
        form = ADAPTER_FORMS[layer.device.type]
        self._adapters = self._make_slots(form, widths, inputs.size, layer.device)
        self.sites = [AdapterSite(self._adapters, outputs, inputs, layer.total_in_features)]
        return slots

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        plain, own = (x.plain, x.quantized) if isinstance(x, _Normed) else (x, x)
        result = self._inner.apply(layer, own)
        return result if self._step_state.is_plain else self._add(plain, result)

    def apply_gated(self, layer: LinearLayer, x: Activation, activation: str) -> torch.Tensor:
        plain, own = (x.plain, x.quantized) if isinstance(x, _Normed) else (x, x)
        if self._step_state.is_plain:
            return self._inner.apply_gated(layer, own, activation)
        return GATED_ACTIVATIONS[activation](self._add(plain, self._inner.apply(layer, own)))

    def _share(
        self, outputs: tuple[LinearOutput, ...], inputs: Shard, total_inputs: int
    ) -> tuple[tuple[LinearOutput, ...], Shard]:
        """This rank's outputs and inputs under `fully_sharded`."""
        if inputs.size == total_inputs:
            inputs = self._ranks.parallel.share(total_inputs)
            self._own_inputs = slice(inputs.start, inputs.start + inputs.size)
        else:
            # layers with split inputs have one matrix, whose outputs the ranks add up
            (output,) = outputs
            shard = self._ranks.parallel.share(output.total)
            self._own_outputs = slice(shard.start, shard.start + shard.size)
            outputs = (dataclasses.replace(output, shard=shard),)
        return outputs, inputs

    def _targets(self, layer: LinearLayer) -> tuple[LinearOutput, ...]:
        """The layer's outputs, by the names that adapters have for them."""
        return layer.outputs

    def _rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots of the adapters of the inputs, and their order, see `AdapterSlots.shrink`."""
        return self._slots[:count], None if self._order is None else self._order[:count]

    def _add(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        slots, order = self._rows(len(x))
        shrunk = self._adapters.shrink(x[:, self._own_inputs], slots, order)
        if self._config.fully_sharded:
            shrunk = self._ranks.collectives.all_reduce(shrunk.contiguous())
        self._adapters.expand(result[:, self._own_outputs], shrunk, slots, order)
        return result


class LoRAHead(LoRALinear):
    """An LM head with adapters, which call it `lm_head` even if its weight is that of the embedding.

    Heads are in no tapes and graphs, so nothing need be launched for adapters that leave them as they are.
    """

    def _targets(self, layer: LinearLayer) -> tuple[LinearOutput, ...]:
        return tuple(dataclasses.replace(output, name=_HEAD) for output in layer.outputs)

    def _rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        slots = self._slots[self._step_state.logits_tokens][:count]
        return slots, None if self._order is None else slots.argsort(stable=True)

    def _add(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        return super()._add(x, result) if self.sites[0].used else result

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """As `LoRALinear.create_weights`; and slots for the vectors of added tokens."""
        weights = super().create_weights(layer)
        if self._config.max_added_tokens:
            # products with E vectors are the products of a rank E
            self._added = PanelSlots(
                self._config.max_loras, [1], layer.total_in_features, self._config.max_added_tokens,
                layer.dtype, layer.device,
            )  # fmt: skip
            self.sites.append(_added_site(ADDED_OUTPUTS, self._added, layer.total_in_features))
        return weights

    def finish_logits(self, x: Activation, logits: torch.Tensor) -> torch.Tensor:
        """Logits of added tokens behind the others, -inf in rows whose adapter does not have them."""
        most = self._config.max_added_tokens
        if not most:
            return logits
        own_columns = logits
        logits = logits.new_empty(len(logits), logits.shape[1] + most)
        logits[:, :-most], logits[:, -most:] = own_columns, -torch.inf
        if self._step_state.is_plain or not self.sites[1].used:
            return logits
        slots, order = self._rows(len(logits))
        own = self._added.shrink(x.plain if isinstance(x, _Normed) else x, slots, order)[:, 0]
        counts = self._added.ranks[slots.clamp(min=0)].masked_fill(slots < 0, 0)
        is_own = torch.arange(most) < counts[:, None]
        logits[:, -most:] = torch.where(is_own, own[:, :most].to(logits.dtype), -torch.inf)
        return logits


def _added_site(name: str, slots: SlotMemory, width: int) -> AdapterSite:
    """Where the vectors [n, H] of the tokens go that an adapter adds; they come as the A of a rank n."""
    return AdapterSite(slots, (LinearOutput(name, 1, Shard(0, 1)),), Shard(0, width), width)


class LoRAEmbedding(AdaptedMethod):
    """An embedding with adapters: each token's vector is that of the model and what its row's adapter adds to it."""

    def create_weights(self, layer: LinearLayer) -> list[WeightSlot]:
        """The wrapped method's, and empty slots for adapters, for those of a tied head too."""
        self._head: LoRAHead | None = None
        self.sites = []
        if layer.kind is LayerKind.TIED_EMBEDDING:
            self._head = LoRAHead(self._inner, self._config, self._step_state, self._ranks)
            weights = self._head.create_weights(layer)
            self.sites += self._head.sites
        else:
            weights = self._inner.create_weights(layer)
        form, (output,) = TABLE_FORMS[layer.device.type], layer.outputs
        width = layer.total_in_features
        self._table = self._make_slots(form, [width], output.shard.size, layer.device)
        vectors = LinearOutput(output.name, width, Shard(0, width))
        self.sites.append(AdapterSite(self._table, (vectors,), output.shard, output.total, "lora_embedding_{}"))
        self._num_tokens, config = output.total, self._config
        if config.max_added_tokens:
            self._added = AddedVectors(config.max_loras, config.max_added_tokens, width, layer.dtype)
            self.sites.append(_added_site(ADDED_INPUTS, self._added, width))
        return weights

    def apply(self, layer: LinearLayer, x: Activation) -> torch.Tensor:
        return (self._head or self._inner).apply(layer, x)

    def look_up(self, layer: LinearLayer, indices: torch.Tensor) -> torch.Tensor:
        if self._step_state.is_plain:
            return self._inner.look_up(layer, indices)
        if self._config.max_added_tokens:
            indices = lora_clamp_tokens(indices, self._num_tokens)
        vectors, slots = self._inner.look_up(layer, indices), self._slots[: len(indices)]
        self._table.expand(vectors, self._table.look_up(indices, slots), slots, None)
        return vectors

    def finish_vectors(self, indices: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Puts in the vectors of added tokens."""
        if self._config.max_added_tokens and not self._step_state.is_plain:
            lora_put_added(vectors, indices, self._slots[: len(indices)], self._added.tables, self._num_tokens)
        return vectors

    def finish_logits(self, x: Activation, logits: torch.Tensor) -> torch.Tensor:
        return logits if self._head is None else self._head.finish_logits(x, logits)


class LoRAScheme(QuantScheme):
    """Wraps the methods of linear layers, embeddings and heads. Routers and experts stay as they are.

    Args:
        inner: scheme of the checkpoint.
        config: limits of adapters.
        step_state: of the model.
        ranks: that share the layers.
    """

    def __init__(
        self, inner: QuantScheme, config: LoRAConfig, step_state: StepState, ranks: Ranks | None = None
    ) -> None:
        self._inner = inner
        self._config = config
        self._step_state = step_state
        self._ranks = ranks or Ranks()
        self.ignored_weights = inner.ignored_weights

    def method_for(self, layer: LinearLayer) -> QuantMethod:
        method = self._inner.method_for(layer)
        wrapper = _WRAPPERS.get(layer.kind)
        if wrapper is LoRAEmbedding and layer.device.type not in TABLE_FORMS:
            wrapper = LoRAHead if layer.kind is LayerKind.TIED_EMBEDDING else None
        if wrapper is None or not isinstance(layer, Linear):
            return method
        return wrapper(method, self._config, self._step_state, self._ranks)


_WRAPPERS: dict[LayerKind, type[AdaptedMethod]] = {
    LayerKind.LINEAR: LoRALinear,
    LayerKind.LM_HEAD: LoRAHead,
    LayerKind.EMBEDDING: LoRAEmbedding,
    LayerKind.TIED_EMBEDDING: LoRAEmbedding,
}


class ModelAdapters:
    """The slots for adapters in all layers of a model.

    Args:
        model: built with `LoRAScheme`.
        elsewhere: tensors of the checkpoint that other workers have, as regular expressions over whole names.
    """

    def __init__(self, model: Layer, elsewhere: Sequence[str] = ()) -> None:
        self._elsewhere = [re.compile(pattern) for pattern in elsewhere]
        self._sites = [
            site
            for layer in model.layers()
            if isinstance(layer, Linear) and isinstance(layer.method, AdaptedMethod)
            for site in layer.method.sites
        ]
        self._targets = {output.name for site in self._sites for output in site.outputs}

    def pack(self, matrices: Mapping[str, Matrices], name: str) -> Iterator[PackedAdapter | None]:
        """An adapter's part in each layer, one after another, for `place`.

        Args:
            matrices: by names in the checkpoint.
            name: of the adapter's directory, for messages.

        Raises:
            ModelLoadError: it has matrices for layers that the model does not have, or of wrong shapes.
        """
        # a stage has the embedding or the head, or neither
        added = {ADDED_INPUTS, ADDED_OUTPUTS}
        unknown = sorted(target for target in set(matrices) - self._targets - added if not self._is_elsewhere(target))
        if unknown:
            kinds = sorted({target.rpartition(".")[2] for target in self._targets - added})
            raise ModelLoadError(
                f"While loading {name}, expected target modules in {kinds} but received {unknown[:8]}. "
                "Please verify that the loaded LoRA module is correct"
            )
        try:
            for site in self._sites:
                yield site.pack(matrices)
        except ModelLoadError as error:
            raise ModelLoadError(f"{name}: {error}") from error

    def place(self, slot: int, adapter: Iterable[PackedAdapter | None]) -> None:
        """Puts what `pack` returned into a slot, whose rows must have ended; None: a layer stays as it is."""
        for site, part in zip(self._sites, adapter, strict=True):
            site.place(slot, part)

    def _is_elsewhere(self, target: str) -> bool:
        return any(pattern.fullmatch(f"{target}.weight") for pattern in self._elsewhere)
