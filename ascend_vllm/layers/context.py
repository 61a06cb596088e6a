"""What layers need to know of their surroundings to be built."""

from __future__ import annotations

import dataclasses

import torch

from ascend_vllm.distributed.collectives import Collectives, SingleRank
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.layers.quantization.base import QuantScheme
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.step_state import StepState


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """Handed to every layer at its making; layers know nothing else of the engine.

    Attributes:
        dtype: of weights and activations.
        device: where weights live.
        parallel: which part of each layer is held here.
        collectives: how the ranks that hold the other parts are reached.
        quant: chooses how each layer keeps its weights.
        step_state: where layers declare what they need to know of a step's rows.

    Example:
        >>> BuildContext(torch.float32, torch.device("cpu")).parallel.tp_size
        1
    """

    dtype: torch.dtype
    device: torch.device
    parallel: ParallelContext = dataclasses.field(default_factory=ParallelContext)
    collectives: Collectives = dataclasses.field(default_factory=SingleRank)
    quant: QuantScheme = dataclasses.field(default_factory=UnquantizedScheme)
    step_state: StepState = dataclasses.field(default_factory=lambda: StepState(0, 0, torch.device("cpu")))
