"""One step on the device: diff in, batch, forward, logits, samples, output."""

from __future__ import annotations

import numpy as np
import torch

from ascend_vllm.attention.backend import AttentionBackend
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.types.step import SchedulerOutput, StepLogprobs, StepOutput
from ascend_vllm.worker.block_mover import BlockMover
from ascend_vllm.worker.input_batch import InputBatch
from ascend_vllm.worker.ragged import Int64Array
from ascend_vllm.worker.sampling.columns import LOGPROBS
from ascend_vllm.worker.sampling.sampler import Sampler


class ModelRunner:
    """Runs steps; the only owner of the slots.

    Args:
        model: on `device`.
        backend: serves all layers of the model.
        kv_caches: one per layer, of the backend's shape.
        mover: copies their blocks.
        batch: empty slots.
        logprobs_mode: "raw_logprobs" or "processed_logprobs".
        device: where everything computes.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: AttentionBackend,
        kv_caches: list[torch.Tensor],
        mover: BlockMover,
        batch: InputBatch,
        logprobs_mode: str,
        device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self._kv_caches = kv_caches
        self._mover = mover
        self._batch = batch
        self._sampler = Sampler(batch, logprobs_mode, device)
        self._device = device

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Applies the step's diff, computes its tokens and samples.

        With num_steps > 1 the rows that sampled go on, one token a time; the others stop after the first
        forward. The scheduler has given them room for that: blocks, and max_model_len.

        Raises:
            ValueError: the step does not fit its rows, or asks for log-probabilities of several steps.
        """
        self._mover.move(step.block_moves)
        self._batch.apply(step)
        if not step.slots:
            return _nothing_sampled(step.step_id)
        slots = np.array(step.slots, np.int64)
        num_scheduled = np.array(step.num_scheduled_tokens, np.int64)
        if step.num_steps > 1 and (self._batch.sampling.features[slots] & LOGPROBS).any():
            raise ValueError("log-probabilities are given for one step at a time, and num_steps is above 1")
        slots, token_ids, logprobs = self._forward_and_sample(slots, num_scheduled)
        if len(slots) == 0:
            return _nothing_sampled(step.step_id)
        sampled = token_ids[:, None]
        if step.num_steps > 1:
            one_each = np.ones_like(slots)
            more = [self._forward_and_sample(slots, one_each)[1] for _ in range(step.num_steps - 1)]
            sampled = np.stack([token_ids, *more], axis=1)
        return StepOutput(
            step_id=step.step_id,
            slots=slots.astype(np.int32),
            sampled_token_ids=sampled,
            logprobs=logprobs,
        )

    def _forward_and_sample(
        self, slots: Int64Array, num_scheduled: Int64Array
    ) -> tuple[Int64Array, Int64Array, StepLogprobs | None]:
        """Computes the rows' next tokens; returns the slots that sampled and their ids, both [S]."""
        host_batch = self._batch.build(slots, num_scheduled)
        batch = host_batch.to_device(self._device)
        metadata = self._backend.prepare(batch)
        hidden = self._model.forward(batch, self._kv_caches, self._backend, metadata)
        self._batch.advance(slots, num_scheduled)
        sampling_slots = host_batch.sampling_slots
        if len(sampling_slots) == 0:
            return sampling_slots, sampling_slots, None
        if len(sampling_slots) < len(hidden):
            hidden = hidden[batch.logits_indices]
        logits = self._model.compute_logits(hidden)
        sampled, logprobs = self._sampler.sample(logits, sampling_slots)
        token_ids = sampled.cpu().numpy()
        self._batch.append(sampling_slots, token_ids)
        return sampling_slots, token_ids, logprobs


def _nothing_sampled(step_id: int) -> StepOutput:
    return StepOutput(step_id=step_id, slots=np.zeros(0, np.int32), sampled_token_ids=np.zeros((0, 1), np.int64))
