"""Steps of a pooling model: prompts in, pooled hidden states out. Nothing is sampled.

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
from ascend_vllm.worker.ragged import Int64Array
from ascend_vllm.worker.stage_runner import StageForward


class Gatherer(abc.ABC):
    """Collects hidden states of prompts, which may come in pieces.

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
        """Rows have got their slots; what was in these before is void, which most collectors need not know."""
        del rows

    @abc.abstractmethod
    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """Takes in a step.

        Args:
            batch: of the step.
            slots: [R], its rows.
            hidden: [T, H], of its tokens.

        Returns:
            [N, H] states of the S rows that end, and [S] how many each of them has, N together.
        """


class LastToken(Gatherer):
    """The state of a prompt's last token."""

    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """See `Gatherer.gather`; pieces before the last one need nothing."""
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
    """The mean of the states of a prompt's tokens; added up in the order of the tokens, whatever the pieces are."""

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
        # where the last of a row's tokens stands, there its prompt ends
        lengths = (batch.positions[batch.logits_indices] + 1).astype(np.float32)
        sums = self._sums[upload(ended, self.device)]
        return sums / upload(lengths, self.device)[:, None], np.ones(len(ended), np.int64)


class EveryToken(Gatherer):
    """The states of all of a prompt's tokens."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        super().__init__(num_slots, width, device)
        # by slot, of prompts that are not complete
        self._pieces: dict[int, list[torch.Tensor]] = {}

    def enter(self, rows: Sequence[NewRow]) -> None:
        """See `Gatherer.enter`."""
        for row in rows:
            self._pieces.pop(row.slot, None)

    def gather(self, batch: HostBatch, slots: Int64Array, hidden: torch.Tensor) -> tuple[torch.Tensor, Int64Array]:
        """See `Gatherer.gather`."""
        ended = set(batch.sampling_slots.tolist())
        complete: list[torch.Tensor] = []
        counts: list[int] = []
        # a turn per row: prompts are of all lengths, and each brings far more memory than the turn costs
        for slot, first, last in zip(
            slots.tolist(), batch.query_start[:-1].tolist(), batch.query_start[1:].tolist(), strict=True
        ):
            piece = hidden[first:last]
            if slot not in ended:
                self._pieces.setdefault(slot, []).append(piece.clone())
                continue
            pieces = [*self._pieces.pop(slot, []), piece]
            complete += pieces
            counts.append(sum(map(len, pieces)))
        states = torch.cat(complete) if complete else hidden[:0]
        return states, np.array(counts, np.int64)


_GATHERERS: dict[str, type[Gatherer]] = {"LAST": LastToken, "CLS": FirstToken, "MEAN": MeanOfTokens}


def make_gatherer(config: PoolerConfig, num_slots: int, width: int, device: torch.device) -> Gatherer:
    """What collects the states that a pooler reads."""
    kind = EveryToken if config.task.startswith("token_") else _GATHERERS[config.seq_pooling_type]
    return kind(num_slots, width, device)


class PoolingRunner:
    """Runs steps of a pooling model; the counterpart of `ModelRunner`.

    Args:
        model: with a pooler, on `device`.
        forward: through its layers.
        mover: copies their blocks.
        batch: empty slots.
        gatherer: collects the hidden states that the pooler reads.
        device: where everything computes.

    Raises:
        ValueError: the model has no pooler.
    """

    def __init__(
        self,
        model: CausalLM,
        forward: StageForward,
        mover: BlockMover,
        batch: InputBatch,
        gatherer: Gatherer,
        device: torch.device,
    ) -> None:
        if model.pooler is None:
            raise ValueError("the model has no pooler")
        self._model = model
        self._pooler = model.pooler
        self._forward = forward
        self._mover = mover
        self._batch = batch
        self._gatherer = gatherer
        self._device = device
        # [M] bool and int64, host: parameters of the rows; 0 dimensions: all
        self._use_activation = np.zeros(gatherer.num_slots, np.bool_)
        self._dimensions = np.zeros(gatherer.num_slots, np.int64)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> StepOutput:
        """Applies the step's diff, computes its tokens and pools the prompts that end.

        Raises:
            ValueError: the step does not fit its rows.
        """
        self._mover.move(step.block_moves)
        self._batch.apply(step)
        if step.new_rows:
            self._enter(step.new_rows)
        output = StepOutput(step.step_id, np.zeros(0, np.int32), np.zeros((0, 1), np.int64))
        if not step.slots:
            return output
        slots, num_scheduled = np.array(step.slots, np.int64), np.array(step.num_scheduled_tokens, np.int64)
        host_batch = self._batch.build(slots, num_scheduled)
        hidden = self._forward(host_batch.to_device(self._device))
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
        """Results of the rows in some slots, [S], which have so many states, [S], each."""
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
        # a turn per request that ends: each result goes its own way
        return [
            RowResult(slot, result[: size or None])
            for slot, result, size in zip(slots.tolist(), results, dimensions.tolist(), strict=True)
        ]
