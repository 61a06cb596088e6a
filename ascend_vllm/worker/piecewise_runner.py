"""Steps with prompts by graphs of the pieces between attention calls, as vLLM's piecewise graphs.

What attention computes depends on the number of rows and their lengths; everything else only on the number of
tokens. So a forward pass is captured as a graph for each piece between two attention calls, at some numbers of
tokens, to which steps are padded. A replay launches piece, attention, piece and so on, instead of every operator.
Padding tokens belong to a row of their own, whose keys are not stored and which attention leaves out.

Letters: T tokens, R rows of a step, L attention layers, H hidden size.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import tqdm

from ascend_vllm.attention.backend import AttentionBackend, ForwardBatch, QueryKeyValue, Splitter
from ascend_vllm.distributed.collectives import Collectives
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.logger import init_logger
from ascend_vllm.platforms.interface import DeviceGraph, GraphRecorder
from ascend_vllm.worker.model_runner import ModelForward

logger = init_logger(__name__)

# KV slot of padding tokens: not stored
_NOWHERE = -1

# metadata of a step of t tokens → [t, N*D]
_Attend = Callable[[Any], torch.Tensor]


class _Memory:
    """Inputs and outputs of attention, which the layers and graphs use one after another.

    Args:
        num_tokens: of the largest step.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._tensors: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def take(self, place: int, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of this shape, [T, …], and dtype; the same memory for each place and width."""
        width = math.prod(like.shape[1:])
        key = (place, width, like.dtype)
        if key not in self._tensors:
            self._tensors[key] = like.new_zeros(self._num_tokens, width)
        return self._tensors[key][: like.shape[0]].view(like.shape)


class _LayerSplitter(Splitter):
    """Notes the attention calls of a pass.

    Args:
        memory: of the inputs and outputs.
        end_piece: called in front of each attention call.

    Attributes:
        calls: of each layer, what computes attention and where its result belongs: [T, N*D].
    """

    def __init__(self, memory: _Memory, end_piece: Callable[[], None]) -> None:
        self._memory = memory
        self._end_piece = end_piece
        self.calls: list[tuple[_Attend, torch.Tensor]] = []

    def keep(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> QueryKeyValue:
        """See `Splitter.keep`."""
        take = self._memory.take
        return take(1, query).copy_(query), take(2, key).copy_(key), take(3, value).copy_(value)

    def split(self, attend: _Attend, query: torch.Tensor) -> torch.Tensor:
        """See `Splitter.split`."""
        output = self._memory.take(0, query.flatten(1))
        self.calls.append((attend, output))
        self._end_piece()
        return output


class _StaticInputs:
    """The buffers that graphs read.

    Args:
        num_tokens: of the largest step.
        num_rows: most rows of a step.
        device: of the buffers.
        step_state: of the model.
    """

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device, step_state: StepState) -> None:
        self._step_state = step_state
        # [num_tokens] int64 each
        self._input_ids, self._positions = torch.zeros(2, num_tokens, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((num_tokens,), _NOWHERE, dtype=torch.int64, device=device)
        # int32; behind the rows of a step there are empty ones, and padding tokens are in the first of them
        self._query_start = torch.zeros(num_rows + 2, dtype=torch.int32, device=device)
        self._seq_lens = torch.ones(num_rows + 1, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(num_rows + 1, 1, dtype=torch.int32, device=device)

    def batch(self, size: int) -> ForwardBatch:
        """The batch of a number of tokens: views of the buffers. Only `AttentionBackend.prepare_split` takes it."""
        num_rows = len(self._seq_lens)
        return ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            slot_mapping=self._slot_mapping[:size],
            query_start=self._query_start,
            seq_lens=self._seq_lens,
            block_table=self._block_table,
            logits_indices=self._positions[:size],
            query_start_np=np.zeros(num_rows + 1, np.int32),
            seq_lens_np=np.ones(num_rows, np.int32),
            max_query_len=size,
            max_seq_len=size,
            state=self._step_state.views(num_rows, size),
        )

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copies a step into the buffers, and pads it to so many tokens."""
        num_tokens, num_rows = len(batch.input_ids), len(batch.seq_lens)
        self._input_ids[:num_tokens] = batch.input_ids
        self._positions[:num_tokens] = batch.positions
        self._slot_mapping[:num_tokens] = batch.slot_mapping
        self._query_start[: num_rows + 1] = batch.query_start
        self._query_start[num_rows + 1 :] = size
        self._seq_lens[:num_rows] = batch.seq_lens
        self._seq_lens[num_rows:] = 1
        if size > num_tokens:
            self._positions[num_tokens:size] = 0
            self._slot_mapping[num_tokens:size] = _NOWHERE
            self._step_state.pad(slice(num_rows, len(self._seq_lens)), slice(num_tokens, size))


@dataclasses.dataclass(frozen=True, slots=True)
class _CapturedPass:
    # L+1: in front of the first attention call, between two of them, behind the last
    pieces: list[DeviceGraph]
    # L
    calls: list[tuple[_Attend, torch.Tensor]]
    # [T, H], written by the last piece
    hidden: torch.Tensor


class PiecewiseRunner:
    """Replays pieces of captured forward passes for steps with prompts.

    Where layers have declared step state, there are two captures of each size: one for steps whose state is plain.

    Args:
        sizes: `GraphConfig.piece_sizes`, at least one.
        max_num_rows: of a step.
        device: of the model.
        step_state: of the model.
        backend: computes attention, and can be split.
        forward: the pass to capture.
        recorder: captures it.
        collectives: of the model's ranks, which all capture the same sizes.

    Attributes:
        query_lens: see `StepGraphs`. Steps of one token a row have graphs of their own.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        max_num_rows: int,
        device: torch.device,
        step_state: StepState,
        backend: AttentionBackend,
        forward: ModelForward,
        recorder: GraphRecorder,
        collectives: Collectives,
    ) -> None:
        self._sizes = sizes
        self.query_lens = range(2, sizes[-1] + 1)
        self._backend = backend
        self._forward = forward
        self._recorder = recorder
        self._step_state = step_state
        self._collectives = collectives
        self._device = device
        self._memory = _Memory(sizes[-1])
        self._inputs = _StaticInputs(sizes[-1], max_num_rows, device, step_state)
        # in descending order of their memory
        is_plain = (False, True) if step_state.specs else (True,)
        self._kinds = list(itertools.product(reversed(self._sizes), is_plain))
        # by size, and whether the step state is plain
        self._captured: dict[tuple[int, bool], _CapturedPass] = {}

    def capture(self, *, only_largest: bool = False) -> None:
        """Captures the graphs, the largest first; none if one cannot be captured, which is logged.

        Args:
            only_largest: to measure its memory.
        """
        start = time.monotonic()
        kinds = self._kinds[:1] if only_largest else self._kinds
        for size, is_plain in tqdm.tqdm(kinds, desc="Capturing pieces", unit="size", disable=only_largest):
            failure = ""
            self._step_state.is_plain = is_plain
            try:
                self._captured[size, is_plain] = self._capture_pass(size)
            except RuntimeError as error:
                failure = str(error)
            # a rank that runs eagerly beside others that replay would have fewer tokens in its collectives
            num_failed = self._collectives.all_reduce(torch.tensor([float(bool(failure))], device=self._device))
            if num_failed.item() > 0:
                self._captured.clear()
                logger.warning(
                    "Steps with prompts run operator by operator: graphs of %d tokens cannot be captured (%s)",
                    size,
                    failure or "by another worker",
                )
                return
        if not only_largest:
            num_graphs = sum(len(each.pieces) for each in self._captured.values())
            sizes = ", ".join(map(str, self._sizes))
            logger.info(
                "Captured %d pieces of steps with prompts of up to %s tokens in %.2f s",
                num_graphs,
                sizes,
                time.monotonic() - start,
            )

    def output_bytes(self) -> int:
        """Size of the outputs of all sizes but the largest, in bytes."""
        if not self._captured:
            return 0
        row = self._captured[self._kinds[0]].hidden[0]
        return sum(size for size, _ in self._kinds[1:]) * row.nbytes

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Computes a step.

        Returns:
            [T, H], valid until the next run; None if there is no graph for so many tokens.
        """
        num_tokens = len(batch.input_ids)
        if not self._captured or num_tokens > self._sizes[-1]:
            return None
        size = self._sizes[bisect.bisect_left(self._sizes, num_tokens)]
        self._inputs.fill(batch, size)
        metadata = self._backend.prepare(batch)
        captured = self._captured[size, self._step_state.is_plain]
        captured.pieces[0].replay({})
        for (attend, output), piece in zip(captured.calls, captured.pieces[1:], strict=True):
            output[:num_tokens] = attend(metadata)
            piece.replay({})
        return captured.hidden[:num_tokens]

    def _capture_pass(self, size: int) -> _CapturedPass:
        # initialisation in the first call of an operator must not become part of a graph
        self._split_pass(size, lambda: None)
        done: list[tuple[_LayerSplitter, torch.Tensor]] = []
        pieces = self._recorder.capture_pieces(lambda end_piece: done.append(self._split_pass(size, end_piece)))
        ((splitter, hidden),) = done
        return _CapturedPass(pieces, splitter.calls, hidden)

    def _split_pass(self, size: int, end_piece: Callable[[], None]) -> tuple[_LayerSplitter, torch.Tensor]:
        batch, splitter = self._inputs.batch(size), _LayerSplitter(self._memory, end_piece)
        return splitter, self._forward(batch, self._backend.prepare_split(batch, splitter))
