"""Steps of a pipeline stage that is not the last one."""

from __future__ import annotations

import numpy as np
import torch

from ascend_vllm.distributed.stage_link import StageLink
from ascend_vllm.types.step import SchedulerOutput, StepOutput
from ascend_vllm.worker.block_mover import BlockMover
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.model_runner import ModelForward


class StageRunner:
    """Runs the steps of a pipeline stage before the last, whose runner is a `ModelRunner` or a `PoolingRunner`.

    Nothing is sampled here. The tokens that the last stage sampled come with a later step.

    Args:
        forward: through this stage's layers.
        link: to the next stage.
        mover: copies blocks of the layers' caches.
        batch: empty slots.
        device: of the model.

    Attributes:
        forward: as given.
    """

    def __init__(
        self, forward: ModelForward, link: StageLink, mover: BlockMover, batch: InputBatch, device: torch.device
    ) -> None:
        self.forward = forward
        self._link = link
        self._mover = mover
        self._batch = batch
        self._device = device

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Applies the step's diff, computes its tokens and sends their hidden states to the next stage.

        Returns:
            An empty output: the last stage returns the results.

        Raises:
            ValueError: the step does not fit its rows.
        """
        if step.sampled:
            slots, token_ids = np.array(step.sampled, np.int64).T
            self._batch.append_received(slots, token_ids)
        if step.block_moves:
            self._mover.move(step.block_moves)
        self._batch.apply(step)
        if step.slots:
            slots, num_scheduled = np.array(step.slots, np.int64), np.array(step.num_scheduled_tokens, np.int64)
            batch = self._batch.build(slots, num_scheduled).to_device(self._device)
            self._link.send(self.forward(batch))
            self._batch.advance(slots, num_scheduled)
        return StepOutput(step.step_id, np.zeros(0, np.int32), np.zeros((0, 1), np.int64))

    def compute_largest(self, step: SchedulerOutput) -> None:
        """See `ModelRunner.compute_largest`."""
        self.execute(step)
        self.execute(SchedulerOutput(step.step_id, [row.slot for row in step.new_rows], [], [], [], []))
