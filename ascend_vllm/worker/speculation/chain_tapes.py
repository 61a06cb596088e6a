"""Whole chains of drafts by tapes, on CPU: passes and choices one after another, without Python in between.

Where rows draft equally many tokens and nothing edits their logits, everything but the tokens is known before the
first pass: positions, lengths, KV slots and the sampler's parameters. So one tape has all of it, each choice being
the next pass's input. Python alone would take about as long as the passes.

Letters: M slots, R rows of a chain, k drafts of each, B maximum blocks of a row, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.logger import init_logger
from ascend_vllm.ops.kept_states import copy_states
from ascend_vllm.ops.sampling import arg_max, sample_tokens
from ascend_vllm.ops.tape import Tapes, UnrecordableError
from ascend_vllm.worker.input_batch import Int32Array
from ascend_vllm.worker.sampling.columns import Int64Array
from ascend_vllm.worker.sampling.plan import SamplingPlan

logger = init_logger(__name__)

# with more rows the overhead of Python calls is negligible
_MOST_ROWS = 64


class _Shape(NamedTuple):
    """What chains of one tape have in common; `draws`: some row samples at random."""

    num_rows: int
    num_drafts: int
    draws: bool

    @property
    def key(self) -> int:
        """Of the tape."""
        return 2 * (self.num_drafts * (_MOST_ROWS + 1) + self.num_rows) + self.draws


class ChainTapes:
    """Records chains, and replays them.

    Args:
        forward: a pass of one token a row: (batch, hidden [R, H] before the tokens) → [R, H].
        best_tokens: hidden [R, H] → [R] int64, the most likely tokens.
        logits: hidden [R, H] → [R, V].
        block_table: [M, B], of the slots.
        block_size: tokens of a block.
        most_drafts: largest k.
    """

    def __init__(
        self,
        forward: Callable[[ForwardBatch, torch.Tensor], torch.Tensor],
        best_tokens: Callable[[torch.Tensor], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor],
        block_table: Int32Array,
        block_size: int,
        most_drafts: int,
    ) -> None:
        self._forward = forward
        self._best_tokens = best_tokens
        self._logits = logits
        self._block_size = block_size
        self._row_blocks = block_table
        num_passes = max(1, most_drafts - 1)
        num_rows = min(len(block_table), _MOST_ROWS)
        self._most_rows = num_rows
        # [k-1, M]: of the tokens of all passes; replays read the first R of each pass
        self._positions = np.zeros((num_passes, num_rows), np.int64)
        self._slot_mapping = np.zeros_like(self._positions)
        self._seq_lens = np.ones((num_passes, num_rows), np.int32)
        # [M, B]; behind a row's blocks there may be blocks of an earlier chain, which are not read
        self._block_table = np.zeros((num_rows, block_table.shape[1]), np.int32)
        self._query_start = np.arange(num_rows + 1, dtype=np.int32)
        # the same memory
        arrays = (self._positions, self._slot_mapping, self._seq_lens, self._block_table, self._query_start)
        self._inputs = [torch.from_numpy(array) for array in arrays]
        self._indices = torch.arange(num_rows)
        # [M] each: temperature, top_k, top_p, min_p
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
        self._filters = [torch.zeros(num_rows, dtype=dtype) for dtype in dtypes]
        # [M]
        self._seeds = torch.zeros(num_rows, dtype=torch.int64)
        # [k, M]: tokens before each draft
        self._num_tokens = np.zeros((most_drafts, num_rows), np.int64)
        self._places = torch.from_numpy(self._num_tokens)
        # [M, H] behind the rows' known tokens; None: no chain has been recorded
        self._hidden: torch.Tensor | None = None
        self._tapes = Tapes()
        # [R] of each choice, written by replays
        self._tokens: dict[_Shape, list[Int64Array]] = {}

    def run(
        self,
        slots: Int64Array,
        hidden: torch.Tensor,
        starts: Int64Array,
        num_tokens: Int64Array,
        num_drafts: int,
        plan: SamplingPlan,
    ) -> Int64Array | None:
        """Drafts tokens.

        Args:
            slots: [R].
            hidden: [R, H], behind the rows' known tokens.
            starts: [R], positions of the first drafts.
            num_tokens: [R], known tokens of the rows.
            num_drafts: k.
            plan: of the rows; it edits no logits.

        Returns:
            [R, k]; None: there are too many rows, or the model uses operators that cannot be recorded.
        """
        num_rows = len(slots)
        if num_rows > self._most_rows:
            return None
        if num_drafts > 1:
            self._fill(slots, starts, num_drafts - 1)
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._most_rows, hidden.shape[1])
        copy_states(self._hidden, hidden)
        if plan.filters is not None and plan.seeds is not None:
            for buffer, values in zip((*self._filters, self._seeds), (*plan.filters, plan.seeds), strict=True):
                buffer[:num_rows] = values
            self._num_tokens[:num_drafts, :num_rows] = num_tokens + np.arange(num_drafts)[:, None]
        shape = _Shape(num_rows, num_drafts, draws=plan.filters is not None)
        if shape in self._tokens:
            self._tapes.replay(shape.key)
        elif not self._record(shape):
            return None
        return np.concatenate(self._tokens[shape]).reshape(num_drafts, num_rows).T

    def _fill(self, slots: Int64Array, starts: Int64Array, num_passes: int) -> None:
        num_rows, size = len(slots), self._block_size
        places = starts + np.arange(num_passes)[:, None]
        self._positions[:num_passes, :num_rows] = places
        blocks = self._row_blocks[slots, places // size].astype(np.int64)
        self._slot_mapping[:num_passes, :num_rows] = blocks * size + places % size
        self._seq_lens[:num_passes, :num_rows] = places + 1
        width = math.ceil((int(places.max()) + 1) / size)
        self._block_table[:num_rows, :width] = self._row_blocks[slots, :width]

    def _record(self, shape: _Shape) -> bool:
        # makes what it keeps for so many rows, which cannot be recorded
        arg_max(self._indices[: shape.num_rows, None].float())
        try:
            growth = math.ceil(self._most_rows / shape.num_rows)
            tokens = self._tapes.record(shape.key, lambda: self._chain(shape), growth)
        except UnrecordableError as error:
            logger.info("Drafts are not replayed from tapes: %s", error)
            self._most_rows = 0
            return False
        self._tokens[shape] = [one.numpy() for one in tokens]
        return True

    def _chain(self, shape: _Shape) -> list[torch.Tensor]:
        assert self._hidden is not None
        hidden = self._hidden[: shape.num_rows]
        tokens = [self._choose(hidden, 0, shape)]
        for number in range(1, shape.num_drafts):
            hidden = self._forward(self._batch(number - 1, tokens[-1]), hidden)
            tokens.append(self._choose(hidden, number, shape))
        return tokens

    def _choose(self, hidden: torch.Tensor, number: int, shape: _Shape) -> torch.Tensor:
        """[R] int64, the n-th draft of each row."""
        if not shape.draws:
            return self._best_tokens(hidden)
        count = shape.num_rows
        filters = [values[:count] for values in self._filters]
        places = self._places[number, :count]
        tokens: torch.Tensor = sample_tokens(self._logits(hidden), *filters, self._seeds[:count], places)
        return tokens

    def _batch(self, number: int, input_ids: torch.Tensor) -> ForwardBatch:
        """The batch of a pass; host values are those of when it is recorded, and nothing recordable reads them."""
        num_rows = len(input_ids)
        positions, slot_mapping, seq_lens, block_table, query_start = self._inputs
        lengths = self._seq_lens[number, :num_rows]
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions[number, :num_rows],
            slot_mapping=slot_mapping[number, :num_rows],
            query_start=query_start[: num_rows + 1],
            seq_lens=seq_lens[number, :num_rows],
            block_table=block_table[:num_rows],
            logits_indices=self._indices[:num_rows],
            query_start_np=self._query_start[: num_rows + 1],
            seq_lens_np=lengths.copy(),
            max_query_len=1,
            max_seq_len=int(lengths.max()),
        )
