"""The base of all layers: plain objects with tensors, and the checkpoint tensors that fill them.

Layers are not `torch.nn.Module`s: decoding with a small model is mostly Python, and attribute look-ups and calls of
plain objects cost a fraction of a module's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Target(Protocol):
    """The destination of a part of a checkpoint tensor: a tensor, or an object that stores it in another layout."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the part."""

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point tensors are converted to it; integers and 8-bit floats must have it in the checkpoint."""

    def copy_(self, source: torch.Tensor, /) -> object:
        """Stores the part."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """The destination of one tensor of a checkpoint, or of a part of it.

    The part is a range in every dimension: a rank's shard, a matrix of a fused tensor (`qkv_proj`), an expert of a
    stack, or several of these at once. Slots of the same name take parts of the same tensor.

    Attributes:
        name: the tensor's name in the checkpoint, e.g. "model.layers.0.self_attn.q_proj.weight".
        shape: of the whole tensor in the checkpoint.
        target: the destination, usually a view of the layer's tensor.
        starts: where the part starts in each dimension; 0 in those left out at the end. Its sizes are the target's;
            if the target has fewer dimensions, the first ones are single indices.

    Example:
        Rows 8 to 11 of expert 3 of a stack [experts, out, in]:

        >>> slot = WeightSlot("experts.up_proj", (4, 16, 5), torch.empty(4, 5), starts=(3, 8))
        >>> slot.part(torch.zeros(4, 16, 5)).shape
        torch.Size([4, 5])
    """

    name: str
    shape: tuple[int, ...]
    target: Target
    starts: tuple[int, ...] = ()

    def part(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the slot's part of a checkpoint tensor, as a view."""
        starts = (*self.starts, *[0] * (source.dim() - len(self.starts)))
        num_single = source.dim() - len(self.target.shape)
        for index in starts[:num_single]:
            source = source[index]
        for dim, (start, size) in enumerate(zip(starts[num_single:], self.target.shape, strict=True)):
            source = source.narrow(dim, start, size)
        return source

    def fill(self, source: torch.Tensor) -> None:
        """Copies the slot's part of a checkpoint tensor into place, converting its dtype."""
        self.target.copy_(self.part(source))


class Layer:
    """Base of layers and models. Attributes that are layers, or lists of layers, are its children."""

    def slots(self) -> list[WeightSlot]:
        """Checkpoint tensors of this layer itself, without its children's."""
        return []

    @property
    def product_kinds(self) -> frozenset[str]:
        """Of `ops.native.QUANTIZED_PRODUCTS`, those that the CPU computes for this layer itself, after loading."""
        return frozenset()

    def after_load(self) -> None:
        """Called once, when all slots of this layer are filled; may convert the loaded tensors and free them."""

    def layers(self) -> Iterator[Layer]:
        """This layer and all its descendants, each once, in the order of construction."""
        seen: set[int] = set()
        pending: list[Layer] = [self]
        while pending:
            layer = pending.pop()
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            yield layer
            values = vars(layer).values()
            items = [item for value in values for item in (value if isinstance(value, list) else [value])]
            pending.extend(item for item in reversed(items) if isinstance(item, Layer))
