"""The experts of a mixture: MLPs of which every token uses a few.

Letters: T tokens, H hidden, E experts, C experts that a token uses, I width inside an expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ascend_vllm.config.arch import ExpertsConfig
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import Layer, Target, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.ops.experts import ExpertStack, route_tokens

# names of gate, up and down in an expert
_MATRICES = ("gate_proj", "up_proj", "down_proj")


class _Transposed:
    """A target for a matrix that the checkpoint has with inputs first.

    Args:
        target: [out, in].
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.shape = (target.shape[1], target.shape[0])
        self.dtype = target.dtype

    def copy_(self, source: torch.Tensor) -> None:
        """source: [in, out], on the CPU."""
        self._target.copy_(source.T)


class Experts(Layer):
    """The experts' weights, stored for the device while they are loaded, and the choice of experts.

    Checkpoints have a matrix per expert, or all of them in `gate_up_proj` and `down_proj`, with outputs or inputs
    first. Tensor parallelism splits the inside of each expert; with `ParallelContext.expert_parallel` a rank holds
    some whole experts instead. Either way the ranks' results are added.

    Args:
        context: surroundings of the layer.
        prefix: name of the module that holds the experts, for example "model.layers.0.mlp.experts".
        experts: what they are like.
        hidden_size: H.
        activation: one of GATED_ACTIVATIONS.

    Raises:
        ModelLoadError: the format of the checkpoint's weights has no experts, or there are too few.
    """

    def __init__(
        self, context: BuildContext, prefix: str, experts: ExpertsConfig, hidden_size: int, activation: str
    ) -> None:
        if experts.count % experts.num_groups or experts.num_chosen_groups > experts.num_groups:
            raise ModelLoadError(
                f"config.json: a token cannot use {experts.num_chosen_groups} (topk_group) of {experts.num_groups} "
                f"(n_group) equal groups of {experts.count} experts"
            )
        available = experts.count // experts.num_groups * experts.num_chosen_groups
        if experts.num_chosen > available:
            raise ModelLoadError(
                f"config.json: a token cannot use {experts.num_chosen} (num_experts_per_tok) of {available} experts"
            )
        if not context.quant.has_experts:
            raise ModelLoadError("quantized mixtures of experts are not supported; serve the unquantised checkpoint")
        self._config = experts
        self._activation = activation
        self._collectives = context.collectives
        parallel = context.parallel
        self._own = parallel.experts(experts.count)
        self._inner = parallel.inside_of_experts(experts.intermediate_size)
        sizes = (experts.count, self._own.start, self._own.size, hidden_size, self._inner.size)
        self._stack = ExpertStack(*sizes, context.dtype, context.device)
        self._hidden_size = hidden_size
        self._slots = self._stacked_slots(context, prefix) or self._single_slots(prefix)

    def slots(self) -> list[WeightSlot]:
        """Three matrices for each of this rank's experts."""
        return self._slots

    def after_load(self) -> None:
        """Converts the weights to the device's format."""
        self._slots = []
        self._stack.finish()

    def forward(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        correction: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Chooses the experts of each token and adds their results.

        Args:
            x: [T, H].
            logits: [T, E], what the router makes of x.
            correction: [E] float32, see `route_tokens`.
            shared: [T, H], this rank's part of the result of an MLP for all tokens, or None.
            shared_gate: [T, 1], see `experts_mlp`.

        Returns:
            [T, H], complete on every rank.
        """
        config = self._config
        ids, weights = route_tokens(
            logits,
            correction,
            config.num_chosen,
            config.scoring,
            config.renormalizes,
            config.num_groups,
            config.num_chosen_groups,
            config.scale,
        )
        result = self._stack(x, ids, weights, self._activation, shared, shared_gate)
        return self._collectives.all_reduce(result)

    def _single_slots(self, prefix: str) -> list[WeightSlot]:
        """Slots of matrices per expert. Those of other ranks' experts take nothing of them."""
        width, hidden, start = self._config.intermediate_size, self._hidden_size, self._inner.start
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        starts = ((start, 0), (start, 0), (0, start))
        slots = []
        for expert in range(self._config.count):
            index = expert - self._own.start
            targets: Sequence[Target] = [torch.empty(0, columns) for _, columns in shapes]
            if 0 <= index < self._own.size:
                targets = self._stack.targets(index)
            for name, shape, target, first in zip(_MATRICES, shapes, targets, starts, strict=True):
                slots.append(WeightSlot(f"{prefix}.{expert}.{name}.weight", shape, target, first))
        return slots

    def _stacked_slots(self, context: BuildContext, prefix: str) -> list[WeightSlot]:
        """Slots of the matrices of all experts in one tensor; none if the checkpoint has no such tensors."""
        names = (f"{prefix}.gate_up_proj", f"{prefix}.down_proj")
        if names[0] not in context.checkpoint_shapes:
            return []
        count, width = self._config.count, self._config.intermediate_size
        hidden, start = self._hidden_size, self._inner.start
        gate_up_shape, down_shape = (count, 2 * width, hidden), (count, hidden, width)
        has_inputs_first = context.checkpoint_shapes[names[0]] != gate_up_shape
        if has_inputs_first:
            gate_up_shape, down_shape = (count, hidden, 2 * width), (count, width, hidden)
        slots = []
        for index in range(self._own.size):
            shapes, starts = (gate_up_shape, gate_up_shape, down_shape), ((start, 0), (width + start, 0), (0, start))
            sources = (names[0], names[0], names[1])
            for name, shape, rows, first in zip(sources, shapes, self._stack.targets(index), starts, strict=True):
                target: Target = _Transposed(rows) if has_inputs_first else rows
                part = first[::-1] if has_inputs_first else first
                slots.append(WeightSlot(name, shape, target, (self._own.start + index, *part)))
        return slots
