"""Decoding by tapes, on CPU: the first step of a shape (R rows with q tokens each) is recorded, later ones replay it.

Results are bitwise the same as without tapes, since the kernels and their inputs are the same. Tapes are the CPU's
counterpart of the graphs in `worker.graph_runner`. Recording costs no more than the step itself, so that there is a
tape for each shape, and no padding.

Letters: R rows of a step, q tokens of each, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.logger import init_logger
from ascend_vllm.ops.decode_inputs import DecodeInputs
from ascend_vllm.ops.tape import Tapes, UnrecordableError
from ascend_vllm.worker.graph_runner import Forward, Shape, StaticInputs, shape_of

logger = init_logger(__name__)

# with more rows the overhead of Python calls is negligible
MOST_ROWS = 64


class TapeRunner:
    """Records decoding steps, and replays them.

    Args:
        forward: the function to record.
        max_num_seqs: maximum rows of a step.
        blocks_per_row: maximum KV blocks of a row.
        step_state: of the model.
        query_lens: tokens that each row of a recorded step may have, 1 among them.
        gathered: has the inputs of most steps, which are read where they are; None, or with too little room: they
            are copied.
    """

    def __init__(
        self,
        forward: Forward,
        max_num_seqs: int,
        blocks_per_row: int,
        step_state: StepState,
        query_lens: Sequence[int] = (1,),
        gathered: DecodeInputs | None = None,
    ) -> None:
        self._forward = forward
        self._most_rows = min(max_num_seqs, MOST_ROWS)
        self.query_lens = query_lens
        if gathered is not None and len(gathered.input_ids) < self._most_rows * max(query_lens):
            gathered = None
        self._inputs = StaticInputs(
            self._most_rows, blocks_per_row, torch.device("cpu"), step_state, query_lens, gathered
        )
        self._tapes = Tapes()
        self._step_state = step_state
        # by R and q, and whether the step state is plain: [R*q, H], written by replays
        self._hidden: dict[tuple[Shape, bool], torch.Tensor] = {}

    def capture(self) -> None:
        """Does nothing: the first step of each shape is recorded when it runs."""

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Computes a decoding step.

        Returns:
            [R*q, H], valid until the next run; None if there are prompts or too many rows, or the model uses
            operators that cannot be recorded.
        """
        shape = shape_of(batch, self.query_lens)
        if shape is None or shape[0] > self._most_rows:
            return None
        self._inputs.fill(batch, shape[0])
        kind = (shape, self._step_state.is_plain)
        hidden = self._hidden.get(kind)
        if hidden is None:
            return self._record(*kind)
        self._tapes.replay(_key(*kind))
        return hidden

    def _record(self, shape: Shape, is_plain: bool) -> torch.Tensor | None:
        batch = self._inputs.batch(*shape)
        growth = math.ceil(self._most_rows * max(self.query_lens) / math.prod(shape))
        try:
            hidden = self._tapes.record(_key(shape, is_plain), lambda: self._forward(batch), growth)
        except UnrecordableError as error:
            logger.info("Decoding is not replayed from tapes: %s", error)
            self._most_rows = 0
            return None
        self._hidden[shape, is_plain] = hidden
        return hidden


def _key(shape: Shape, is_plain: bool) -> int:
    """The number of a shape's tape; there is one more for steps whose step state is not plain."""
    num_rows, query_len = shape
    return 2 * (query_len * (MOST_ROWS + 1) + num_rows) + (not is_plain)
