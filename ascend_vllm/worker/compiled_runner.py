"""Decoding by compiled graphs: one function for each shape, made by the platform's compiler and kept on disk.

They take the place of captured graphs, see `worker.graph_runner`: the same shapes, buffers and padding. What is
compiled takes the rows' lengths as a list of integers, which the compiler treats as variables.

Letters: G rows of the largest gear, g of the gear at hand, q tokens of each row, R rows of a step, T tokens,
B blocks, H hidden size.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
import math
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
from ascend_vllm.worker.graph_runner import Shape, StaticInputs, padded_len, padded_lens, shape_of

logger = init_logger(__name__)

# input_ids, positions, slot_mapping, block_table, seq_lens, lengths → [g*q, H]
Compiled = Callable[..., torch.Tensor]

# lengths to compile with: all different, and none that compilers take for a constant
_FIRST_LENGTH = 3


class _DecodeModule(torch.nn.Module):
    """What is compiled; compilers that keep their results take methods of modules only.

    Args:
        model: on the device.
        backend: computes attention.
        kv_caches: one per layer.
        shape: g and q.
        inputs: have what does not change from step to step.
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
        self.gear, self.query_len = shape
        self.model = model
        # without the decorators that a compiler does not see through
        self.model_forward = inspect.unwrap(type(model).forward)
        self.backend = backend
        self.kv_caches = kv_caches
        batch = inputs.batch(*shape)
        self.query_start = batch.query_start
        self.logits_indices = batch.logits_indices
        # views of fixed memory: what a step writes there is read where it is
        self.state = batch.state

    def extra_repr(self) -> str:
        """Tells shapes apart: the compiler names files by this."""
        return f"gear={self.gear}, query_len={self.query_len}"


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
        # arrays would become constants; what they hold is in `lengths`
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
    """`_decode` for a shape, with code of its own: a compiler keeps one result for each code object."""
    name = f"decode_{module.gear}x{module.query_len}"
    code = _decode.__code__.replace(co_name=name, co_qualname=name)
    return types.MethodType(types.FunctionType(code, globals(), name), module)


class CompiledRunner:
    """Computes decoding steps by compiled graphs.

    Args:
        config: gears, query lengths, and the longest sequence that graphs serve.
        model: on `device`.
        backend: computes attention.
        kv_caches: one per layer, made by the backend.
        compiler: of the platform.
        cache: where results are kept.
        block_size: tokens of a KV block.
        device: where everything computes.
        step_state: of the model.
    """

    def __init__(
        self,
        config: GraphConfig,
        model: CausalLM,
        backend: AttentionBackend,
        kv_caches: list[LayerCache],
        compiler: GraphCompiler,
        cache: GraphCache,
        block_size: int,
        device: torch.device,
        step_state: StepState,
    ) -> None:
        self._gears = config.gears
        self._query_lens = config.query_lens
        self._max_seq_len = config.max_seq_len
        self._compiler = compiler
        self._cache = cache
        num_blocks = -(-config.max_seq_len // block_size)
        self._inputs = StaticInputs(config.gears[-1], num_blocks, device, step_state, config.query_lens)
        self._modules = {
            shape: _DecodeModule(model, backend, kv_caches, shape, self._inputs)
            for shape in sorted(itertools.product(config.gears, config.query_lens), key=math.prod, reverse=True)
        }
        self._compiled: dict[Shape, Compiled] = {}

    def capture(self) -> None:
        """Compiles what is not on disk, loads the rest, and captures the graph of each shape.

        Raises:
            ConfigError: the model does not compile, or the device refuses a graph.
        """
        start = time.monotonic()
        reused = self._cache.prepare()
        progress = "Loading compiled graphs" if reused else "Compiling graphs"
        with torch.no_grad():
            for shape in tqdm.tqdm(list(self._modules), desc=progress, unit="graph"):
                try:
                    if not reused:
                        self._compile(shape)
                    self._compiled[shape] = self._load(shape)
                    self._first_call(shape, self._compiled[shape])
                except (RuntimeError, AssertionError) as error:
                    raise ConfigError(
                        f"INFER_MODE=PTA: the decoding graph of {shape[0]} sequences cannot be compiled: {error}. "
                        "Unset INFER_MODE, use smaller gears or set --enforce-eager."
                    ) from error
        self._cache.keep()
        what = "Loaded" if reused else "Compiled"
        logger.info("%s %d graphs in %.2f s", what, len(self._modules), time.monotonic() - start)

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """See `GraphRunner.run`."""
        shape = shape_of(batch, self._query_lens)
        if shape is None or shape[0] > self._gears[-1] or batch.max_seq_len > self._max_seq_len:
            return None
        num_rows, query_len = shape
        gear = self._gears[bisect.bisect_left(self._gears, num_rows)]
        self._inputs.fill(batch, gear)
        shape, lengths = (gear, query_len), padded_lens(batch, gear)
        return self._compiled[shape](*self._arguments(shape), lengths)[: num_rows * query_len]

    def _load(self, shape: Shape) -> Compiled:
        return self._compiler.compile(_method_of(self._modules[shape]), self._cache.directory)

    def _compile(self, shape: Shape) -> None:
        """Writes a shape's result to disk.

        What did the compiling is dropped: it checks in each call that nothing has changed, and compiles again if a
        length is one that it takes for a constant. What is loaded does neither.
        """
        self._first_call(shape, self._load(shape))
        self._compiler.reset()

    def _first_call(self, shape: Shape, compiled: Compiled) -> None:
        gear, query_len = shape
        first = _FIRST_LENGTH + query_len - 1
        compiled(*self._arguments(shape), list(range(first, first + gear)))

    def _arguments(self, shape: Shape) -> list[torch.Tensor]:
        batch = self._inputs.batch(*shape)
        return [batch.input_ids, batch.positions, batch.slot_mapping, batch.block_table, batch.seq_lens]
