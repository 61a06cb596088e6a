"""Decoding by tapes, on CPU: a step of R rows is recorded when it comes for the first time and replayed from then on.

What is computed is the same to the last bit, as are the kernels and what they read. Tapes are the CPU's counterpart
of the graphs in `worker.graph_runner`; recording costs no more than the step itself, so that there is one for each
number of rows, and none is padded.

Letters: R rows of a step, H hidden size.
"""

from __future__ import annotations

import torch

from ascend_vllm.attention.backend import ForwardBatch
from ascend_vllm.logger import init_logger
from ascend_vllm.ops.tape import Tapes, UnrecordableError
from ascend_vllm.worker.graph_runner import Forward, StaticInputs

logger = init_logger(__name__)

# with more rows what is computed takes so long that calling it does not matter
MOST_ROWS = 64


class TapeRunner:
    """Records decoding steps, and replays them.

    Args:
        forward: what is recorded.
        max_num_seqs: most rows of a step.
        blocks_per_row: most KV blocks of a row.
    """

    def __init__(self, forward: Forward, max_num_seqs: int, blocks_per_row: int) -> None:
        self._forward = forward
        self._most_rows = min(max_num_seqs, MOST_ROWS)
        self._inputs = StaticInputs(self._most_rows, blocks_per_row, torch.device("cpu"))
        self._tapes = Tapes()
        # by R: [R, H], what every replay writes
        self._hidden: dict[int, torch.Tensor] = {}

    def capture(self) -> None:
        """Nothing: a step is recorded when it comes for the first time."""

    def run(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Computes a decoding step.

        Returns:
            [R, H], valid until the next run; None if there are prompts or too many rows, or the model computes
            with something else than kernels.
        """
        num_rows = batch.input_ids.shape[0]
        if batch.max_query_len > 1 or num_rows > self._most_rows:
            return None
        self._inputs.fill(batch, num_rows)
        hidden = self._hidden.get(num_rows)
        if hidden is None:
            return self._record(num_rows)
        self._tapes.replay(num_rows)
        return hidden

    def _record(self, num_rows: int) -> torch.Tensor | None:
        batch = self._inputs.batch(num_rows)
        try:
            hidden = self._tapes.record(num_rows, lambda: self._forward(batch))
        except UnrecordableError as error:
            logger.info("Decoding is not replayed from tapes: %s", error)
            self._most_rows = 0
            return None
        self._hidden[num_rows] = hidden
        return hidden
