"""Decoding by compiled graphs: one function per shape, made by the platform's compiler and cached on disk.

They have the same shapes, buffers and padding as captured graphs, see `worker.graph_runner`. Compiled functions take
the rows' lengths as a list of integers, which the compiler treats as variables.

Letters: G largest capture size, g capture size of a graph, q its tokens per row, R rows of a step, T tokens,
B blocks, H hidden size.
"""

from __future__ import annotations

import inspect
import time
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import tqdm

from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch, LayerCache
from ascend_vllm.config.graphs import GraphConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.logger import init_logger
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.platforms.interface import GraphCompiler
from ascend_vllm.worker.graph_cache import GraphCache
from ascend_vllm.worker.graph_runner import PaddedGraphs, Shape, StaticInputs, padded_len

logger = init_logger(__name__)

# input_ids, positions, slot_mapping, block_table, seq_lens, lengths → [g*q, H]
Compiled = Callable[..., torch.Tensor]

# lengths to compile with: all different, and none that compilers would treat as a constant, such as 0 and 1
_FIRST_LENGTH = 3


class _DecodeModule(torch.nn.Module):
    """The module whose method is compiled; compilers that cache their results accept methods of modules only.

    Args:
        model: on the device.
        backend: computes attention.
        kv_caches: one per layer.
        shape: g and q.
        inputs: hold the tensors that do not change from step to step.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_caches: list[LayerCache],
        shape: Shape,
        inputs: StaticInputs,
    ) -> None:
        super().__init__()
        self.size, self.query_len = shape
        self.model = model
        # without decorators, which compilers cannot trace
        self.model_forward = inspect.unwrap(type(model).forward)
        self.backend = backend
        self.kv_caches = kv_caches
        batch = inputs.batch(*shape)
        self.query_start = batch.query_start
        self.logits_indices = batch.logits_indices
        # views of fixed memory, which each step writes
        self.state = batch.state

    def extra_repr(self) -> str:
        """Distinguishes shapes: the compiler names files by this."""
        return f"gear={self.size}, query_len={self.query_len}"


def _decode(
    self: _DecodeModule,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """[g*q, H] of g rows of q tokens each."""
    batch = ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slot_mapping,
        query_start=self.query_start,
        seq_lens=seq_lens,
        block_table=block_table,
        logits_indices=self.logits_indices,
        # arrays would become constants; their values are in `lengths`
        query_start_np=cast(Any, None),
        seq_lens_np=cast(Any, None),
        max_query_len=self.query_len,
        max_seq_len=padded_len(self.query_len),
        state=self.state,
    )
    metadata = self.backend.prepare_compiled(batch, lengths)
    hidden: torch.Tensor = self.model_forward(self.model, batch, self.kv_caches, self.backend, metadata)
    return hidden


def _method_of(module: _DecodeModule) -> types.MethodType:
    """`_decode` for a shape, with its own code object, since the compiler caches one result per code object."""
    name = f"decode_{module.size}x{module.query_len}"
    code = _decode.__code__.replace(co_name=name, co_qualname=name)
    return types.MethodType(types.FunctionType(code, globals(), name), module)


class CompiledRunner(PaddedGraphs):
    """Computes decoding steps by compiled graphs.

    Args:
        config: see `PaddedGraphs`, as the next three.
        block_size: tokens of a KV block.
        device: of the model.
        step_state: of the model.
        model: on `device`.
        backend: computes attention.
        kv_caches: one per layer, made by the backend.
        compiler: of the platform.
        cache: directory of the compiled functions.
    """

    def __init__(
        self,
        config: GraphConfig,
        block_size: int,
        device: torch.device,
        step_state: StepState,
        model: CausalLM,
        backend: AttentionBackend,
        kv_caches: list[LayerCache],
        compiler: GraphCompiler,
        cache: GraphCache,
    ) -> None:
        super().__init__(config, block_size, device, step_state)
        self._compiler = compiler
        self._cache = cache
        self._modules = {
            shape: _DecodeModule(model, backend, kv_caches, shape, self._inputs) for shape in self._shapes
        }
        self._compiled: dict[Shape, Compiled] = {}

    def capture(self) -> None:
        """Compiles the functions that are not cached, loads the others, and captures the graph of each shape.

        Raises:
            ConfigError: the model cannot be compiled, or a graph cannot be captured.
        """
        start = time.monotonic()
        reused = self._cache.prepare()
        progress = "Loading compiled graphs" if reused else "Compiling graphs"
        with torch.no_grad():
            for shape in tqdm.tqdm(list(self._modules), desc=progress, unit="graph"):
                try:
                    if not reused:
                        # The function that was just compiled is discarded: each call would check its guards and
                        # compile again for lengths that it treats as constants. Loaded functions do neither.
                        self._first_call(shape, self._load(shape))
                        self._compiler.reset()
                    self._compiled[shape] = self._load(shape)
                    self._first_call(shape, self._compiled[shape])
                except (RuntimeError, AssertionError) as error:
                    raise ConfigError(
                        f"INFER_MODE=PTA: the decoding graph of {shape[0]} sequences cannot be compiled: {error}. "
                        "Unset INFER_MODE, use smaller capture sizes or set --enforce-eager."
                    ) from error
        self._cache.keep()
        what = "Loaded" if reused else "Compiled"
        logger.info("%s %d graphs in %.2f s", what, len(self._modules), time.monotonic() - start)

    def _compute(self, shape: Shape, lengths: list[int]) -> torch.Tensor:
        return self._compiled[shape](*self._arguments(shape), lengths)

    def _load(self, shape: Shape) -> Compiled:
        return self._compiler.compile(_method_of(self._modules[shape]), self._cache.directory)

    def _first_call(self, shape: Shape, compiled: Compiled) -> None:
        size, query_len = shape
        first = _FIRST_LENGTH + query_len - 1
        compiled(*self._arguments(shape), list(range(first, first + size)))

    def _arguments(self, shape: Shape) -> list[torch.Tensor]:
        batch = self._inputs.batch(*shape)
        return [batch.input_ids, batch.positions, batch.slot_mapping, batch.block_table, batch.seq_lens]
