"""The context in which layers are built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from ascend_vllm.config.lora import LoRAConfig
from ascend_vllm.distributed.collectives import Collectives, SingleRank
from ascend_vllm.distributed.parallel_context import ParallelContext
from ascend_vllm.layers.quantization.base import QuantScheme
from ascend_vllm.layers.quantization.unquantized import UnquantizedScheme
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.types.kv_cache import KVCacheFormat


@dataclasses.dataclass(frozen=True)
class BuildContext:
    """Passed to the constructor of every layer; layers know nothing else of the engine.

    Attributes:
        dtype: of weights and activations.
        device: of the weights.
        parallel: ranks of this worker, which select its part of each layer.
        collectives: of the tensor-parallel group.
        quant: chooses the quantization method of each layer.
        step_state: where layers declare step state.
        lora: limits of LoRA adapters; None: there are none.
        checkpoint_shapes: of the checkpoint's tensors, by the model's names, for layers with several layouts; empty
            if weights are random.
        checkpoint_dtypes: of those of them whose dtype can be loaded.
        checkpoint_names: the checkpoint's own names of them, which rules of quantization formats refer to.
        kv_cache: format of a KV cache in one byte per number; None: it is in `dtype`.
        kv_layer_scales: of its keys and values, for each layer of the model; None: the checkpoint's, if it has some.

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
    lora: LoRAConfig | None = None
    checkpoint_shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    checkpoint_dtypes: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)
    checkpoint_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    kv_cache: KVCacheFormat | None = None
    kv_layer_scales: tuple[float, ...] | None = None
