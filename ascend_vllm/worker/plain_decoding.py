"""Decoding steps whose rows need nothing but a sample, on CPU: each is replayed whole, from embedding to token ids.

Reading the weights replaces everything in the processor's caches, so that Python between two steps is slow: in a step
of one row it took 0.2 ms. Here there are two native calls around a tape instead: one gathers the rows' inputs, the
other appends what they sampled. Tokens are the same as without it.

Letters: R rows of a step, H hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.ops.sampling import sample_tokens
from ascend_vllm.ops.tape import Tapes, UnrecordableError
from ascend_vllm.types.step import SchedulerOutput, StepOutput
from ascend_vllm.worker.graph_runner import Forward, StaticInputs
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.sampling.columns import RANDOM, Int64Array
from ascend_vllm.worker.tape_runner import MOST_ROWS


@dataclasses.dataclass(frozen=True, slots=True)
class _Sampled:
    """What a tape writes: [R] int64 token ids, and where they are."""

    tensor: torch.Tensor
    token_ids: Int64Array
    address: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Sampled:
        return cls(tensor, tensor.numpy(), tensor.data_ptr())


class PlainDecoder:
    """Computes decoding steps of rows that sample by temperature, top-k, top-p and min-p only, or greedily.

    It needs the library, a batch that gathers inputs (`InputBatch.decode_inputs`), and a model without step state.

    Args:
        batch: the slots.
        forward: batch → [R, H] of its tokens.
        logits_of: [R, H] → [R, V].
    """

    def __init__(
        self, batch: InputBatch, forward: Forward, logits_of: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        assert batch.decode_inputs is not None
        self._inputs = batch.decode_inputs
        self._params = batch.sampling
        self._forward = forward
        self._logits_of = logits_of
        self._most_rows = min(MOST_ROWS, len(batch.num_tokens))
        blocks_per_row, state = batch.block_table.shape[1], batch.row_state.state
        self._static = StaticInputs(
            self._most_rows, blocks_per_row, torch.device("cpu"), state, gathered=self._inputs
        )
        params = self._params
        self._columns: tuple[npt.NDArray[Any], ...] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.seed,
        )
        # the same of the last step's rows, in the tapes' memory, if they were plain; the version that they are of
        self._of_rows = [np.zeros(self._most_rows, column.dtype) for column in self._columns]
        self._last_rows: tuple[bytes, int] = (b"", -1)
        self._were_plain = False
        self._tapes = Tapes()
        # by R
        self._sampled: dict[int, _Sampled] = {}

    def run(self, step: SchedulerOutput, slots: Int64Array) -> StepOutput | None:
        """Computes a step, and appends what its rows sample.

        Args:
            step: with one pass, in which each row computes a token; its diff has been applied.
            slots: [R], its rows.

        Returns:
            None if the step has too many rows or others than plain ones, or the model uses operators that cannot be
            recorded: nothing has changed then.
        """
        num_rows = len(slots)
        if step.drafts or step.bitmask is not None or num_rows > self._most_rows:
            return None
        if not self._are_plain(slots) or self._inputs.gather(slots) == 0:
            return None
        sampled = self._sampled.get(num_rows)
        if sampled is None:
            sampled = self._record(num_rows)
            if sampled is None:
                return None
        else:
            self._tapes.replay(num_rows)
        self._inputs.append(num_rows, sampled.address)
        # a copy: the next step writes to the same memory, perhaps before these have been read
        token_ids = sampled.token_ids.copy()
        return StepOutput(step_id=step.step_id, slots=slots.astype(np.int32), sampled_token_ids=token_ids[:, None])

    def _are_plain(self, slots: Int64Array) -> bool:
        """Whether rows need nothing but a sample; if so, their parameters are where the tapes read them."""
        rows = (slots.tobytes(), self._params.version)
        if rows != self._last_rows:
            self._last_rows = rows
            self._were_plain = not (self._params.features[slots] & ~RANDOM).any()
            if self._were_plain:
                for of_rows, column in zip(self._of_rows, self._columns, strict=True):
                    of_rows[: len(slots)] = column[slots]
        return self._were_plain

    def _record(self, num_rows: int) -> _Sampled | None:
        batch = self._static.batch(num_rows)
        temperature, top_k, top_p, min_p, seeds = (torch.from_numpy(of_rows[:num_rows]) for of_rows in self._of_rows)
        num_tokens = torch.from_numpy(self._inputs.num_tokens[:num_rows])

        def compute() -> torch.Tensor:
            logits = self._logits_of(self._forward(batch))
            ids: torch.Tensor = sample_tokens(logits, temperature, top_k, top_p, min_p, seeds, num_tokens)
            return ids

        try:
            sampled = _Sampled.of(self._tapes.record(num_rows, compute, math.ceil(self._most_rows / num_rows)))
        except UnrecordableError:
            self._most_rows = 0
            return None
        self._sampled[num_rows] = sampled
        return sampled
