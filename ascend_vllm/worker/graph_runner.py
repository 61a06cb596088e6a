"""Decoding by captured graphs: a step is captured once per shape and then replayed with padding.

A shape is a capture size, which is a number of rows, and a query length: the tokens that each row computes, 1 unless
rows have drafts. All graphs read the same static buffers, of which smaller sizes use the first rows, so that a step
needs only a few copies. A padding row computes unused tokens, whose KV is not stored; they attend to the first tokens
of the cache's first block.

Letters: G largest capture size, g capture size of a graph, R rows of a step, Q largest query length, q query length
of a graph, B maximum blocks of a row in a graph, H hidden size.
"""

from __future__ import annotations

import abc
import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import tqdm

from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch
from ascend_vllm.config.graphs import GraphConfig
from ascend_vllm.errors import ConfigError
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.logger import init_logger
from ascend_vllm.ops.decode_inputs import DecodeInputs
from ascend_vllm.platforms.interface import DeviceGraph, GraphRecorder

logger = init_logger(__name__)

# batch → [T, H] of its tokens
Forward = Callable[[ForwardBatch], torch.Tensor]

# rows, and tokens per row
Shape = tuple[int, int]

# KV slot of padding tokens: not stored
_NOWHERE = -1


def padded_len(query_len: int) -> int:
    """Length of a padding row, in tokens. With drafts it has one computed token before its query, as real rows do."""
    return query_len if query_len == 1 else query_len + 1


def shape_of(batch: ForwardBatch, query_lens: Sequence[int]) -> Shape | None:
    """Rows and query length of a step, if graphs of these query lengths can compute it; otherwise None.

    All rows must have the same query length. The first chunk of a prompt is not a decoding step, however short it is.
    """
    num_rows, query_len = len(batch.seq_lens_np), batch.max_query_len
    if query_len == 1:
        return (num_rows, 1)
    if query_len not in query_lens or batch.input_ids.shape[0] != num_rows * query_len:
        return None
    return (num_rows, query_len) if batch.seq_lens_np.min() > query_len else None


class StaticInputs:
    """The buffers that graphs read.

    Args:
        num_rows: G.
        num_blocks: B.
        device: of the buffers.
        step_state: of the model; each step writes its values before `fill`.
        query_lens: of the graphs, 1 among them.
        gathered: on CPU, has the buffers, so that what was gathered there need not be copied; None: they are new.
    """

    def __init__(
        self,
        num_rows: int,
        num_blocks: int,
        device: torch.device,
        step_state: StepState,
        query_lens: Sequence[int] = (1,),
        gathered: DecodeInputs | None = None,
    ) -> None:
        self._step_state = step_state
        num_tokens = num_rows * max(query_lens)
        if gathered is None:
            # [G*Q] int64 each
            self.input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self.slot_mapping = torch.full((num_tokens,), _NOWHERE, dtype=torch.int64, device=device)
            # [G] int32
            self.seq_lens = torch.ones(num_rows, dtype=torch.int32, device=device)
            # [G, B] int32
            self.block_table = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=device)
        else:
            by_token = (gathered.input_ids, gathered.positions, gathered.slot_mapping)
            self.input_ids, self.positions, self.slot_mapping = (
                torch.from_numpy(array[:num_tokens]) for array in by_token
            )
            self.seq_lens = torch.from_numpy(gathered.seq_lens[:num_rows])
            self.block_table = torch.from_numpy(gathered.block_table[:num_rows])
        # q → [G+1] int32: 0, q, 2q, …
        self._query_start_np = {
            query_len: np.arange(num_rows + 1, dtype=np.int32) * np.int32(query_len) for query_len in query_lens
        }
        self._query_start = {
            query_len: torch.from_numpy(starts).to(device) for query_len, starts in self._query_start_np.items()
        }
        self._indices = torch.arange(num_tokens, dtype=torch.int64, device=device)
        filled = (self.input_ids, self.positions, self.slot_mapping, self.seq_lens, self.block_table)
        # numpy's copies of so little keep the GIL. Torch's release it, and then wait until another thread, which
        # handles the last step's outputs, has finished.
        self._is_on_host = device.type == "cpu"
        self._filled: list[Any] = [buffer.numpy() if self._is_on_host else buffer for buffer in filled]

    def batch(self, size: int, query_len: int = 1) -> ForwardBatch:
        """The batch of a shape: views of the buffers, with rows of the minimum length."""
        num_tokens, seq_len = size * query_len, padded_len(query_len)
        return ForwardBatch(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            slot_mapping=self.slot_mapping[:num_tokens],
            query_start=self._query_start[query_len][: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.block_table[:size],
            logits_indices=self._indices[:num_tokens],
            query_start_np=self._query_start_np[query_len][: size + 1],
            seq_lens_np=np.full(size, seq_len, np.int32),
            max_query_len=query_len,
            max_seq_len=seq_len,
            state=self._step_state.views(size, num_tokens),
        )

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copies a step into the buffers, and pads it.

        Args:
            batch: R rows with the same query length, one of the graphs'.
            size: g, R or more.
        """
        if batch.input_ids.data_ptr() == self.input_ids.data_ptr():
            # the inputs were gathered here
            return
        num_rows, query_len = len(batch.seq_lens_np), batch.max_query_len
        num_tokens = num_rows * query_len
        # after a row's blocks there may be blocks of an earlier step: they are not read
        parts = (batch.input_ids, batch.positions, batch.slot_mapping, batch.seq_lens, batch.block_table)
        for buffer, part in zip(self._filled, parts, strict=True):
            buffer[tuple(map(slice, part.shape))] = part.numpy() if self._is_on_host else part
        if size > num_rows:
            self.positions[num_tokens : size * query_len].zero_()
            self.slot_mapping[num_tokens : size * query_len].fill_(_NOWHERE)
            self.seq_lens[num_rows:size].fill_(padded_len(query_len))
            self.block_table[num_rows:size, :1].zero_()
            self._step_state.pad(slice(num_rows, size), slice(num_tokens, size * query_len))


class PaddedGraphs(abc.ABC):
    """Computes decoding steps by graphs of fixed shapes, with padding.

    Args:
        config: capture sizes, query lengths, and the maximum length of sequences in a graph.
        block_size: tokens of a KV block.
        device: of the model.
        step_state: of the model.
    """

    def __init__(self, config: GraphConfig, block_size: int, device: torch.device, step_state: StepState) -> None:
        self._capture_sizes = config.capture_sizes
        self.query_lens = config.query_lens
        self._max_seq_len = config.max_seq_len
        num_blocks = -(-config.max_seq_len // block_size)
        self._inputs = StaticInputs(config.capture_sizes[-1], num_blocks, device, step_state, config.query_lens)
        # in descending order of their tokens
        self._shapes = sorted(itertools.product(config.capture_sizes, config.query_lens), key=math.prod, reverse=True)

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Computes a decoding step by a graph.

        Returns:
            [R*q, H], valid until the next run; None if there is no graph for the step: it has prompts, more rows than
            the largest size or a sequence that is too long.
        """
        shape = shape_of(batch, self.query_lens)
        if shape is None or shape[0] > self._capture_sizes[-1] or batch.max_seq_len > self._max_seq_len:
            return None
        num_rows, query_len = shape
        size = self._capture_sizes[bisect.bisect_left(self._capture_sizes, num_rows)]
        self._inputs.fill(batch, size)
        # on the host: with this step's tokens, then of padding rows
        lengths = [*batch.seq_lens_np.tolist(), *[padded_len(query_len)] * (size - num_rows)]
        return self._compute((size, query_len), lengths)[: num_rows * query_len]

    @abc.abstractmethod
    def _compute(self, shape: Shape, lengths: list[int]) -> torch.Tensor:
        """[g*q, H] of the buffers' first rows, whose lengths are [g]."""


@dataclasses.dataclass(frozen=True, slots=True)
class _CapturedGraph:
    graph: DeviceGraph
    # [g*q, H], written by replays
    hidden: torch.Tensor


class GraphRunner(PaddedGraphs):
    """Replays captured graphs for decoding steps.

    Where layers have declared step state, there are two graphs of each shape: one for steps whose state is plain.

    Args:
        config: see `PaddedGraphs`, as the next three.
        block_size: tokens of a KV block.
        device: of the model.
        step_state: of the model.
        backend: computes attention.
        forward: the function to capture.
        recorder: captures it.
    """

    def __init__(
        self,
        config: GraphConfig,
        block_size: int,
        device: torch.device,
        step_state: StepState,
        backend: AttentionBackend,
        forward: Forward,
        recorder: GraphRecorder,
    ) -> None:
        super().__init__(config, block_size, device, step_state)
        self._backend = backend
        self._forward = forward
        self._recorder = recorder
        self._step_state = step_state
        # in descending order of their memory
        is_plain = (False, True) if step_state.specs else (True,)
        self._kinds = list(itertools.product(self._shapes, is_plain))
        # by shape, and whether the step state is plain
        self._captured: dict[tuple[Shape, bool], _CapturedGraph] = {}

    def capture(self, *, only_largest: bool = False) -> None:
        """Captures the graphs, the largest first, so that the others fit in its memory.

        Args:
            only_largest: to measure that memory.

        Raises:
            ConfigError: a graph cannot be captured.
        """
        start = time.monotonic()
        kinds = self._kinds[:1] if only_largest else self._kinds
        for shape, is_plain in tqdm.tqdm(kinds, desc="Capturing graphs", unit="graph", disable=only_largest):
            self._step_state.is_plain = is_plain
            try:
                self._captured[shape, is_plain] = self._capture_graph(shape)
            except RuntimeError as error:
                raise ConfigError(
                    f"The decoding graph of {shape[0]} sequences cannot be captured: {error}. Use fewer or smaller "
                    "capture sizes, a smaller --max-num-seqs or --gpu-memory-utilization, or --enforce-eager."
                ) from error
        if not only_largest:
            logger.info("Captured %d graphs in %.2f s", len(kinds), time.monotonic() - start)

    def output_bytes(self) -> int:
        """Size of the outputs of all graphs but the largest, in bytes."""
        row = self._captured[self._kinds[0]].hidden[0]
        return sum(math.prod(shape) for shape, _ in self._kinds[1:]) * row.nbytes

    def _compute(self, shape: Shape, lengths: list[int]) -> torch.Tensor:
        arguments = self._backend.replay_arguments(lengths, shape[1])
        if arguments is None:
            raise RuntimeError(f"attention backend {self._backend.name} cannot be replayed")
        captured = self._captured[shape, self._step_state.is_plain]
        captured.graph.replay(arguments)
        return captured.hidden

    def _capture_graph(self, shape: Shape) -> _CapturedGraph:
        batch = self._inputs.batch(*shape)
        # earlier steps may have left other lengths
        self._inputs.seq_lens.fill_(batch.max_seq_len)
        # initialisation in the first call of an operator must not become part of the graph
        self._forward(batch)
        outputs: list[torch.Tensor] = []
        graph = self._recorder.capture(lambda: outputs.append(self._forward(batch)))
        return _CapturedGraph(graph, outputs[0])
