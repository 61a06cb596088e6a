"""Matrices that are loaded in a checkpoint's format and then become a part of something else: a stack of experts, or
the forms that latent attention has of a projection.

Letters: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ascend_vllm.distributed.parallel_context import Shard
from ascend_vllm.errors import ModelLoadError
from ascend_vllm.layers.base import Layer, WeightSlot
from ascend_vllm.layers.context import BuildContext
from ascend_vllm.layers.quantization.base import LayerKind, LinearOutput, QuantMethod
from ascend_vllm.layers.quantization.int8 import Int8Linear
from ascend_vllm.layers.quantization.weight_only import WeightOnlyLinear

# methods whose weights are one matrix in panels
WeightMethod = WeightOnlyLinear | Int8Linear


class QuantizedMatrix(Layer):
    """A matrix that its format loads, and that another layer then takes. Schemes see it as a `LinearLayer`.

    It is loaded on the CPU, whatever the device of that layer is.

    Args:
        context: surroundings of the layer.
        name: of the matrix.
        shape: [N, K] of it in the checkpoint.
        outputs: the rows of this rank.
        inputs: the columns of this rank.
    """

    kind = LayerKind.LINEAR

    def __init__(
        self, context: BuildContext, name: str, shape: tuple[int, int], outputs: Shard, inputs: Shard
    ) -> None:
        self.prefix = name
        self.dtype = context.dtype
        self.device = torch.device("cpu")
        self.outputs: tuple[LinearOutput, ...] = (LinearOutput(name, shape[0], outputs),)
        self.total_in_features = shape[1]
        self.in_shard = inputs
        self.in_features = inputs.size
        self.out_features = outputs.size
        self.has_bias = False
        self.bias: torch.Tensor | None = None
        self.checkpoint_shapes = context.checkpoint_shapes
        self.checkpoint_dtypes = context.checkpoint_dtypes
        self.checkpoint_names = context.checkpoint_names
        self.method: QuantMethod | None = context.quant.method_for(self)
        self._slots: list[WeightSlot] = []
        self._take: Callable[[WeightMethod], None] | None = None

    def load(
        self,
        take: Callable[[WeightMethod], None] | None,
        place: Callable[[WeightSlot], WeightSlot] = lambda slot: slot,
    ) -> None:
        """Makes the slots.

        Args:
            take: is given the loaded method, once; None: the matrix is another rank's, and nothing is kept of it.
            place: finds the place of a slot in the checkpoint.

        Raises:
            ModelLoadError: the method is not one of `WeightMethod`.
        """
        if not isinstance(self.method, WeightMethod):
            kind = type(self.method).__name__
            raise ModelLoadError(
                f"{self.prefix} is quantized in another way than matrices here can be, or than the first of them "
                f"({kind})"
            )
        self._take = take
        slots = self.method.create_weights(self)
        self._slots = [place(slot if take is not None else _without_target(slot)) for slot in slots]

    def slots(self) -> list[WeightSlot]:
        """The tensors of the matrix's format."""
        return self._slots

    def after_load(self) -> None:
        """Passes the weight on, and frees it here."""
        if self._take is not None and isinstance(self.method, WeightMethod):
            self.method.after_load(self)
            if self.bias is not None:
                raise ModelLoadError(
                    f"{self.prefix}: a bias, as ModelSlim's W8A8 has it, is not supported here; use a checkpoint "
                    "whose inputs have a scale per token (W8A8_DYNAMIC)"
                )
            self._take(self.method)
        self.method, self._take, self._slots = None, None, []


def _without_target(slot: WeightSlot) -> WeightSlot:
    nothing = torch.empty((0,) * len(slot.target.shape), dtype=slot.target.dtype)
    return WeightSlot(slot.name, slot.shape, nothing, slot.starts)
