"""Step state: additional per-row or per-token inputs of layers, such as adapter ids.

A layer declares a named tensor while it is built, and gets memory at a fixed address: the model runner writes each
step's values to the front of it, so that tapes and graphs can read them. Linear layers, which do not get the batch,
read the first T entries of that memory for T tokens; other layers find them in `ForwardBatch.state`.

Letters: T tokens, R rows of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ascend_vllm.attention.backend import NO_STATE


@dataclasses.dataclass(frozen=True, slots=True)
class StepStateSpec:
    """A tensor of step state.

    Attributes:
        name: of the tensor, and of the rows' values that fill it (`NewRow.state`).
        dtype: of its entries.
        shape: of an entry.
        fill: entry of rows without a value, and of padding rows of graphs.
        is_per_row: the tensor has an entry per row, otherwise one per token.
        order_of: name of another tensor with an entry per token: this one has the numbers of the step's tokens,
            sorted by the other's entries. Rows have no values for it, and padding tokens are the last ones.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    fill: float = 0
    is_per_row: bool = False
    order_of: str = ""


class StepState:
    """The tensors of a model.

    Args:
        max_num_tokens: maximum tokens of a step, padding included.
        max_num_rows: maximum rows of a step, padding included.
        device: of the tensors.

    Attributes:
        specs: the declared tensors, by name.
        is_plain: all entries of the current step are what their specs fill in, so that layers may compute less.
        logits_tokens: numbers of the step's tokens whose logits are computed next, for the LM head.

    Example:
        >>> state = StepState(8, 4, torch.device("cpu"))
        >>> state.declare(StepStateSpec("adapter", torch.int64, fill=-1)).shape
        torch.Size([8])
        >>> state.views(2, 5)["adapter"].tolist()
        [-1, -1, -1, -1, -1]
    """

    def __init__(self, max_num_tokens: int, max_num_rows: int, device: torch.device) -> None:
        self._max_num_tokens = max_num_tokens
        self._max_num_rows = max_num_rows
        self._device = device
        self.specs: dict[str, StepStateSpec] = {}
        self.is_plain = True
        self.logits_tokens: torch.Tensor | slice = slice(None)
        self._memory: dict[str, torch.Tensor] = {}

    def declare(self, spec: StepStateSpec) -> torch.Tensor:
        """Declares a tensor; returns its memory, [maximum tokens or rows, *shape], which equal declarations share.

        Raises:
            ValueError: the name is declared differently.
        """
        if self.specs.setdefault(spec.name, spec) != spec:
            raise ValueError(f"step state {spec.name!r} is declared in two ways: {self.specs[spec.name]} and {spec}")
        if spec.name not in self._memory:
            count = self._max_num_rows if spec.is_per_row else self._max_num_tokens
            self._memory[spec.name] = (
                torch.arange(count, dtype=spec.dtype, device=self._device)
                if spec.order_of
                else torch.full((count, *spec.shape), spec.fill, dtype=spec.dtype, device=self._device)
            )
        return self._memory[spec.name]

    def views(self, num_rows: int, num_tokens: int) -> Mapping[str, torch.Tensor]:
        """The tensors of a step, by name: [R, *shape] or [T, *shape]."""
        if not self.specs:
            return NO_STATE
        counts = {name: num_rows if spec.is_per_row else num_tokens for name, spec in self.specs.items()}
        return {name: self._memory[name][:count] for name, count in counts.items()}

    def write(self, values: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Writes a step's values, by name, without waiting for the device; returns the tensors of the step."""
        return {name: self._memory[name][: len(value)].copy_(value) for name, value in values.items()}

    def pad(self, rows: slice, tokens: slice) -> None:
        """Fills the entries of padding rows and their tokens."""
        for name, spec in self.specs.items():
            padding = rows if spec.is_per_row else tokens
            if spec.order_of:
                torch.arange(padding.start, padding.stop, out=self._memory[name][padding])
            else:
                self._memory[name][padding].fill_(spec.fill)
