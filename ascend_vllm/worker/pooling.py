"""Steps of a pooling model: hidden states of prompts are pooled, and nothing is sampled.

Letters: M slots, T tokens of a step, R rows, S rows whose prompts end in the step, H hidden, P tokens of a prompt.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch

from ascend_vllm.config.model import PoolerConfig
from ascend_vllm.models.blocks import CausalLM
from ascend_vllm.types.step import NewRow, RowResult, SchedulerOutput, StepOutput
from ascend_vllm.worker.block_mover import BlockMover
from ascend_vllm.worker.input_batch import HostBatch, InputBatch, upload
from ascend_vllm.worker.model_runner import ModelForward
from ascend_vllm.worker.sampling.columns import Int64Array


class Gatherer(abc.ABC):
    """Collects hidden states of prompts, which may be computed in chunks.

    Args:
        num_slots: M.
        width: H.
        device: of the hidden states.
    """

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.width = width
        self.device = device

    def enter(self, rows: Sequence[NewRow]) -> None:
        """Prepares the slots of new rows; most subclasses need not do anything."""
        del rows

    @abc.abstractmethod
    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """Collects the states of a step.

        Args:
            batch: of the step.
            slots: [R], its rows.
            hidden: [T, H], of its tokens.

        Returns:
            [N, H] states of the S rows whose prompts end, and [S] their number per row, N in total.
        """


class LastToken(Gatherer):
    """The state of a prompt's last token."""

    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """See `Gatherer.gather`; only the last chunk has states to collect."""
        del slots
        ends = batch.logits_indices
        return hidden[upload(ends, self.device)], np.ones(len(ends), np.int64)


class FirstToken(Gatherer):
    """The state of a prompt's first token."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        super().__init__(num_slots, width, device)
        # [M, H] float32
        self._states = torch.zeros(num_slots, width, device=device)

    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """See `Gatherer.gather`."""
        starts = batch.query_start[:-1].astype(np.int64)
        begins = batch.positions[starts] == 0
        self._states[upload(slots[begins], self.device)] = hidden[upload(starts[begins], self.device)].float()
        ended = batch.sampling_slots
        return self._states[upload(ended, self.device)], np.ones(len(ended), np.int64)


class MeanOfTokens(Gatherer):
    """The mean of the states of a prompt's tokens, added in the order of the tokens however it is chunked."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        super().__init__(num_slots, width, device)
        # [M, H] float32
        self._sums = torch.zeros(num_slots, width, device=device)

    def enter(self, rows: Sequence[NewRow]) -> None:
        """See `Gatherer.enter`."""
        self._sums[upload(np.array([row.slot for row in rows], np.int64), self.device)] = 0.0

    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """See `Gatherer.gather`."""
        slot_of_token = np.repeat(slots, np.diff(batch.query_start))
        self._sums.index_add_(0, upload(slot_of_token, self.device), hidden.float())
        ended = batch.sampling_slots
        # the position of a row's last token is the last one of its prompt
        lengths = (batch.positions[batch.logits_indices] + 1).astype(np.float32)
        sums = self._sums[upload(ended, self.device)]
        return sums / upload(lengths, self.device)[:, None], np.ones(len(ended), np.int64)


class EveryToken(Gatherer):
    """The states of all of a prompt's tokens."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        super().__init__(num_slots, width, device)
        # by slot, of prompts that are not complete
        self._chunks: dict[int, list[torch.Tensor]] = {}

    def enter(self, rows: Sequence[NewRow]) -> None:
        """See `Gatherer.enter`."""
        for row in rows:
            self._chunks.pop(row.slot, None)

    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """See `Gatherer.gather`."""
        ended = set(batch.sampling_slots.tolist())
        complete: list[torch.Tensor] = []
        counts: list[int] = []
        # a loop over rows, since prompts have different lengths; copying the states costs far more than the loop
        for slot, first, last in zip(
            slots.tolist(), batch.query_start[:-1].tolist(), batch.query_start[1:].tolist(), strict=True
        ):
            chunk = hidden[first:last]
            if slot not in ended:
                self._chunks.setdefault(slot, []).append(chunk.clone())
                continue
            chunks = [*self._chunks.pop(slot, []), chunk]
            complete += chunks
            counts.append(sum(map(len, chunks)))
        states = torch.cat(complete) if complete else hidden[:0]
        return states, np.array(counts, np.int64)


_GATHERERS: dict[str, type[Gatherer]] = {"LAST": LastToken, "CLS": FirstToken, "MEAN": MeanOfTokens}


def make_gatherer(config: PoolerConfig, num_slots: int, width: int, device: torch.device) -> Gatherer:
    """Makes the object that collects the states for a pooler."""
    kind = EveryToken if config.task.startswith("token_") else _GATHERERS[config.seq_pooling_type]
    return kind(num_slots, width, device)


class PoolingRunner:
    """Runs steps of a pooling model; the counterpart of `ModelRunner`.

    Args:
        model: with a pooler, on `device`.
        forward: the pass through its layers.
        mover: copies KV blocks.
        batch: empty slots.
        gatherer: collects the hidden states for the pooler.
        device: of the model.

    Attributes:
        forward: as given.

    Raises:
        ValueError: the model has no pooler.
    """

    def __init__(
        self,
        model: CausalLM,
        forward: ModelForward,
        mover: BlockMover,
        batch: InputBatch,
        gatherer: Gatherer,
        device: torch.device,
    ) -> None:
        if model.pooler is None:
            raise ValueError("the model has no pooler")
        self._model = model
        self._pooler = model.pooler
        self.forward = forward
        self._mover = mover
        self._batch = batch
        self._gatherer = gatherer
        self._device = device
        # [M] bool and int64, host: parameters of the rows; 0 dimensions: all
        self._use_activation = np.zeros(gatherer.num_slots, np.bool_)
        self._dimensions = np.zeros(gatherer.num_slots, np.int64)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Applies the step's diff, computes its tokens and pools the prompts that end in it.

        Raises:
            ValueError: the step does not fit its rows.
        """
        if step.block_moves:
            self._mover.move(step.block_moves)
        self._batch.apply(step)
        if step.new_rows:
            self._enter(step.new_rows)
        output = StepOutput(step.step_id, np.zeros(0, np.int32), np.zeros((0, 1), np.int64))
        if not step.slots:
            return output
        slots, num_scheduled = np.array(step.slots, np.int64), np.array(step.num_scheduled_tokens, np.int64)
        host_batch = self._batch.build(slots, num_scheduled)
        hidden = self.forward(host_batch.to_device(self._device))
        self._batch.advance(slots, num_scheduled)
        states, counts = self._gatherer.gather(host_batch, slots, hidden)
        if len(counts):
            output.results = self._pool(host_batch.sampling_slots, states, counts)
        return output

    def compute_largest(self, step: SchedulerOutput) -> None:
        """See `ModelRunner.compute_largest`."""
        self.execute(step)
        self.execute(SchedulerOutput(step.step_id, [row.slot for row in step.new_rows], [], [], [], []))

    def _enter(self, rows: Sequence[NewRow]) -> None:
        self._gatherer.enter(rows)
        for row in rows:
            params = row.pooling_params
            if params is None:
                raise ValueError(f"request {row.request_id} is to be sampled, but the model pools")
            self._use_activation[row.slot] = bool(params.use_activation)
            self._dimensions[row.slot] = params.dimensions or 0

    def _pool(self, slots: Int64Array, states: torch.Tensor, counts: Int64Array) -> list[RowResult]:
        """Results of the rows in `slots`, [S], of which each has `counts`, [S], states."""
        dimensions = self._dimensions[slots]
        use_activation = np.repeat(self._use_activation[slots], counts)
        limits: torch.Tensor | None = None
        if dimensions.any():
            limits = upload(np.where(dimensions == 0, self._gatherer.width, dimensions), self._device)
        pooled = self._pooler.forward(self._model.output_states(states), upload(use_activation, self._device), limits)
        results = pooled.cpu().numpy()
        if self._pooler.config.task.startswith("token_"):
            parts = np.split(results, np.cumsum(counts)[:-1])
            return [RowResult(slot, part) for slot, part in zip(slots.tolist(), parts, strict=True)]
        # a loop, since the results have different lengths
        return [
            RowResult(slot, result[: size or None])
            for slot, result, size in zip(slots.tolist(), results, dimensions.tolist(), strict=True)
        ]
