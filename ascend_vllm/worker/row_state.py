"""Values of the step state by slot, from which each step's tensors are built. See `layers.step_state`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.layers.step_state import StepState
from ascend_vllm.types.step import NewRow
from ascend_vllm.worker.sampling.columns import Int64Array


class RowState:
    """A value of each slot's row for each tensor that layers declared.

    Args:
        state: of the model; all layers have declared theirs.
        num_slots: number of slots.

    Attributes:
        is_empty: no layer has declared anything.
    """

    def __init__(self, state: StepState, num_slots: int) -> None:
        self.state = state
        # name → [num_slots, *shape]
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: torch.full((num_slots, *spec.shape), spec.fill, dtype=spec.dtype).numpy()
            for name, spec in state.specs.items()
            if not spec.order_of
        }
        self.is_empty = not self._columns

    def enter(self, row: NewRow) -> None:
        """Stores the values of a new row."""
        for name, column in self._columns.items():
            column[row.slot] = row.state.get(name, self.state.specs[name].fill)

    def copy(self, sources: Int64Array, targets: Int64Array) -> None:
        """Copies values to other slots."""
        for column in self._columns.values():
            column[targets] = column[sources]

    def gather(self, slots: Int64Array, num_scheduled: Int64Array) -> dict[str, npt.NDArray[Any]]:
        """The tensors of a step on the host, by name.

        Args:
            slots: [R].
            num_scheduled: [R] tokens of each.
        """
        specs = self.state.specs
        values = {name: column[slots] for name, column in self._columns.items()}
        self.state.is_plain = all((value == specs[name].fill).all() for name, value in values.items())
        tensors = {
            name: value if specs[name].is_per_row else np.repeat(value, num_scheduled, axis=0)
            for name, value in values.items()
        }
        for name, spec in specs.items():
            if spec.order_of:
                tensors[name] = tensors[spec.order_of].argsort(kind="stable")
        return tensors
