"""The experts of a mixture: MLPs of which every token uses a few.

Letters: T tokens, H hidden, E experts, C experts that a token uses, I width inside an expert.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ascend_vllm.config.arch import ExpertsConfig
from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import Layer, Target, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.quantization.expert_weights import MATRICES, DeviceExpertStack, QuantizedExpertStack
from ascend_vllm.layers.quantization.matrix import QuantizedMatrix
from ascend_vllm.layers.quantization.unquantized import Unquantized
from ascend_vllm.ops.experts import ExpertStack, route_tokens
from ascend_vllm.ops.quantized_weights import CODED_FORMS, EXPERT_FORMS


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

    The scheme of the checkpoint's format chooses how they are stored, by the names of the matrices of an expert.

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
        self._config = experts
        self._activation = activation
        self._collectives = context.collectives
        parallel = context.parallel
        self._own = parallel.experts(experts.count)
        self._inner = parallel.inside_of_experts(experts.intermediate_size)
        self._hidden_size = hidden_size
        self._stack: ExpertStack | QuantizedExpertStack | DeviceExpertStack
        self._matrices: list[Layer] = []
        first = self._matrix(context, prefix, 0, 0)
        if isinstance(first.method, Unquantized):
            sizes = (experts.count, self._own.start, self._own.size, hidden_size, self._inner.size)
            self._stack = ExpertStack(*sizes, context.dtype, context.device)
            self._slots = self._dense_slots(context, prefix, self._stack)
        else:
            self._stack = self._quantized_stack(context, prefix)
            self._slots = []
            self._matrices = self._quantized_matrices(context, prefix, self._stack)

    def _quantized_stack(self, context: BuildContext, prefix: str) -> QuantizedExpertStack | DeviceExpertStack:
        sizes = (self._own.start, self._own.size, self._hidden_size, self._inner.size)
        form = EXPERT_FORMS.get(context.device.type)
        if form is None:
            return QuantizedExpertStack(prefix, *sizes)
        widened = CODED_FORMS[context.device.type].widened
        return DeviceExpertStack(prefix, form(self._config.count, *sizes, context.dtype, context.device), widened)

    @property
    def product_kinds(self) -> frozenset[str]:
        """See `Layer.product_kinds`."""
        return self._stack.product_kinds if isinstance(self._stack, QuantizedExpertStack) else frozenset()

    def slots(self) -> list[WeightSlot]:
        """Three matrices for each of this rank's experts; none if they are layers of their own."""
        return self._slots

    def after_load(self) -> None:
        """Converts the weights to the device's format."""
        self._slots, self._matrices = [], []
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

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """[N, K] of gate, up and down in the checkpoint."""
        width, hidden = self._config.intermediate_size, self._hidden_size
        return (width, hidden), (width, hidden), (hidden, width)

    def _matrix(self, context: BuildContext, prefix: str, expert: int, matrix: int) -> QuantizedMatrix:
        shape = self._shapes()[matrix]
        hidden = Shard(0, self._hidden_size)
        shards = (hidden, self._inner) if matrix == 2 else (self._inner, hidden)
        return QuantizedMatrix(context, f"{prefix}.{expert}.{MATRICES[matrix]}", shape, *shards)

    def _quantized_matrices(
        self, context: BuildContext, prefix: str, stack: QuantizedExpertStack | DeviceExpertStack
    ) -> list[Layer]:
        """Layers that load the matrices. Those of other ranks' experts take nothing of them."""
        matrices: list[Layer] = []
        for expert in range(self._config.count):
            index = expert - self._own.start
            is_own = 0 <= index < self._own.size
            for number in range(len(MATRICES)):
                matrix = self._matrix(context, prefix, expert, number)
                take = functools.partial(stack.put, index, number) if is_own else None
                matrix.load(take, functools.partial(self._placed, context, prefix, expert, number))
                matrices.append(matrix)
        return matrices

    def _placed(self, context: BuildContext, prefix: str, expert: int, matrix: int, slot: WeightSlot) -> WeightSlot:
        """Where a slot of a matrix is in the checkpoint, which may have the matrices of all experts in one tensor."""
        gate_up, down = (f"{prefix}.{name}" for name in ("gate_up_proj", "down_proj"))
        if gate_up not in context.checkpoint_shapes or not slot.name.endswith(".weight"):
            return slot
        count, width, hidden = self._config.count, self._config.intermediate_size, self._hidden_size
        shape = (hidden, width) if matrix == 2 else (2 * width, hidden)
        # ups are behind gates
        starts = slot.starts[0] + (width if matrix == 1 else 0), slot.starts[1]
        target = slot.target
        if context.checkpoint_shapes[gate_up] != (count, 2 * width, hidden):
            shape, starts, target = shape[::-1], starts[::-1], _Transposed(target)
        return WeightSlot(down if matrix == 2 else gate_up, (count, *shape), target, (expert, *starts))

    def _dense_slots(self, context: BuildContext, prefix: str, stack: ExpertStack) -> list[WeightSlot]:
        """Slots of the matrices' weights. Those of other ranks' experts take nothing of them."""
        start = self._inner.start
        starts = ((start, 0), (start, 0), (0, start))
        slots = []
        for expert in range(self._config.count):
            index = expert - self._own.start
            targets: Sequence[Target] = [torch.empty(0, columns) for _, columns in self._shapes()]
            if 0 <= index < self._own.size:
                targets = stack.targets(index)
            for matrix, (shape, target, first) in enumerate(zip(self._shapes(), targets, starts, strict=True)):
                slot = WeightSlot(f"{prefix}.{expert}.{MATRICES[matrix]}.weight", shape, target, first)
                slots.append(self._placed(context, prefix, expert, matrix, slot))
        return slots
