"""What all layers are: plain objects that own tensors and know which checkpoint tensors fill them.

They are not `torch.nn.Module`: a decode step on a small model is mostly Python, and attribute look-ups and calls
of plain objects cost a fraction of a module's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class Target(Protocol):
    """What takes a part of a checkpoint's tensor: a tensor, or what keeps it in another arrangement."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the part."""

    @property
    def dtype(self) -> torch.dtype:
        """What it is converted to."""

    def copy_(self, source: torch.Tensor, /) -> object:
        """Takes the part."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """Where one tensor of a checkpoint goes.

    Attributes:
        name: the tensor's name in the checkpoint, e.g. "model.layers.0.self_attn.q_proj.weight".
        shape: its whole shape in the checkpoint.
        target: what it fills: a view of the layer's own tensor (this rank's part of it), or the like.
        dim: dimension that is split over ranks.
        start: where this rank's part starts there; its size is the target's.
    """

    name: str
    shape: tuple[int, ...]
    target: Target
    dim: int = 0
    start: int = 0

    def part(self, source: torch.Tensor) -> torch.Tensor:
        """This rank's part of a checkpoint tensor."""
        return source.narrow(self.dim, self.start, self.target.shape[self.dim])

    def fill(self, source: torch.Tensor) -> None:
        """Copies this rank's part of a checkpoint tensor into place, converting its dtype."""
        self.target.copy_(self.part(source))


class Layer:
    """Base of layers and models. Attributes that are layers, or lists of layers, are its children."""

    def slots(self) -> list[WeightSlot]:
        """Checkpoint tensors of this layer itself, without its children's."""
        return []

    def after_load(self) -> None:
        """Called once, when all slots of this layer are filled; may rearrange and free what was loaded."""

    def layers(self) -> Iterator[Layer]:
        """This layer and all below it, each once, in the order of their making."""
        seen: set[int] = set()
        pending: list[Layer] = [self]
        while pending:
            layer = pending.pop()
            if id(layer) in seen:
                continue
            seen.add(id(layer))
            yield layer
            pending.extend(reversed(list(layer._children())))

    def _children(self) -> Iterator[Layer]:
        for value in vars(self).values():
            if isinstance(value, Layer):
                yield value
            elif isinstance(value, list):
                yield from (item for item in value if isinstance(item, Layer))
