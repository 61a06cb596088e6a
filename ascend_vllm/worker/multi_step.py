"""Several decoding passes in one step: sampled ids are fed back on the device, without waiting for them on the host.

Everything that does not depend on the sampled tokens is computed before the first pass: positions, lengths and KV
slots of all passes. Between passes only the ids change, and rows that a stop id ended are masked. The ids are fetched
after all passes have been launched. If the device shares the host's memory, there is nothing to wait for, and ended
rows are removed from the batch.

Letters: R rows of the step, r rows that have not ended, N passes, B maximum blocks of a row, W maximum stop ids of a
row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.attention.backend import NO_STATE, ForwardBatch
from ascend_vllm.types.step import StepLogprobs
from ascend_vllm.worker.input_batch import InputBatch, place_values, upload, upload_all
from ascend_vllm.worker.sampling.columns import MASKS, Int64Array
from ascend_vllm.worker.sampling.logprobs import collect
from ascend_vllm.worker.sampling.plan import SamplingPlan
from ascend_vllm.worker.sampling.sampler import Sampled, Sampler

# padding of stop ids: no id of a vocabulary
_NO_ID = -1


@dataclasses.dataclass(frozen=True, slots=True)
class _HostRows:
    """Data of the rows before the first pass, on the host."""

    # [R]
    slots: Int64Array
    # [R] passes until the row ends by its length
    num_passes: Int64Array
    # [N, R] int64: tokens of the row in each pass, without the one that it samples; constant after its end
    num_tokens: Int64Array
    # [N, R] int64: KV slot of each pass; -1 after the row's end
    slot_mapping: Int64Array
    # [R, B] int32
    block_table: npt.NDArray[np.int32]
    # [R, W] int64
    stop_ids: Int64Array
    # [N, R] bool: whether a stop id that the pass samples ends the row
    may_stop: npt.NDArray[np.bool_]

    def counts(self, sampled: Int64Array) -> Int64Array:
        """Number of sampled ids, of [R, N], that each row has up to its end, the last one included."""
        stops = (sampled[:, :, None] == self.stop_ids[:, None, :]).any(2) & self.may_stop.T
        first = np.where(stops.any(1), stops.argmax(1) + 1, sampled.shape[1])
        counts: Int64Array = np.minimum(first, self.num_passes)
        return counts


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that have not ended, on the device; see `_HostRows`."""

    # [r] host: their indices in the step
    index: Int64Array
    plan: SamplingPlan
    # [r+1] int32 and [N, r] int32, host: query_start and seq_lens
    query_start_np: npt.NDArray[np.int32]
    seq_lens_np: npt.NDArray[np.int32]
    # [N, r] int64
    num_tokens: torch.Tensor
    # [N, r] int64
    positions: torch.Tensor
    # [N, r] int32
    seq_lens: torch.Tensor
    # [N, r] int64
    slot_mapping: torch.Tensor
    # [r, B] int32
    block_table: torch.Tensor
    # [r+1] int32
    query_start: torch.Tensor
    # [r] int64
    logits_indices: torch.Tensor
    # [r, W] int64; None if no row has any
    stop_ids: torch.Tensor | None
    # [N, r] bool
    may_stop: torch.Tensor
    # [r] bool: rows that a stop id has ended
    stopped: torch.Tensor
    # see ForwardBatch; the same in all passes
    state: Mapping[str, torch.Tensor]

    def batch(self, number: int, input_ids: torch.Tensor, max_seq_len: int) -> ForwardBatch:
        """The batch of a pass."""
        slot_mapping = self.slot_mapping.select(0, number)
        return ForwardBatch(
            input_ids=input_ids,
            positions=self.positions.select(0, number),
            slot_mapping=slot_mapping if self.stop_ids is None else slot_mapping.masked_fill(self.stopped, -1),
            query_start=self.query_start,
            seq_lens=self.seq_lens.select(0, number),
            block_table=self.block_table,
            logits_indices=self.logits_indices,
            query_start_np=self.query_start_np,
            seq_lens_np=self.seq_lens_np[number],
            max_query_len=1,
            max_seq_len=max_seq_len,
            state=self.state,
        )

    def stop(self, number: int, token_ids: torch.Tensor) -> None:
        """Marks the rows that are ended by the ids that a pass sampled, [r]."""
        if self.stop_ids is not None:
            hits = (self.stop_ids == token_ids[:, None]).any(1)
            self.stopped.logical_or_(hits.logical_and_(self.may_stop.select(0, number)))


class MultiStepDecoder:
    """Runs several decoding passes in a step.

    Args:
        batch: the slots.
        sampler: of the same slots.
        forward: batch → logits of its tokens, [T, V].
        device: of the model.
        host_memory: tensors on the device are in host memory.
    """

    def __init__(
        self,
        batch: InputBatch,
        sampler: Sampler,
        forward: Callable[[ForwardBatch], torch.Tensor],
        device: torch.device,
        *,
        host_memory: bool,
    ) -> None:
        self._batch = batch
        self._sampler = sampler
        self._forward = forward
        self._device = device
        self._host_memory = host_memory

    def run(self, slots: Int64Array, num_steps: int) -> tuple[Int64Array, StepLogprobs | None]:
        """Decodes up to num_steps tokens of each row; a row ends at a stop id or at its max_num_tokens.

        Args:
            slots: [R], each at most once; each has one token to compute.
            num_steps: N.

        Returns:
            [R, N] sampled ids, undefined after a row's end, and log-probabilities of the same shape, if requested.

        Raises:
            ValueError: a row has another number of tokens to compute, or too few blocks.
        """
        host = self._look_ahead(slots, num_steps)
        passes = self._run_passes(host)
        token_ids = np.zeros((len(slots), num_steps), np.int64)
        if self._host_memory:
            for number, (index, _, sampled) in enumerate(passes):
                token_ids[index, number] = sampled.token_ids.numpy()
        else:
            # each pass has all rows; one copy, since each waits for the device
            ids = torch.stack([sampled.token_ids for _, _, sampled in passes], dim=1).cpu()
            token_ids[:, : len(passes)] = ids.numpy()
        counts = host.counts(token_ids[:, : len(host.num_tokens)])
        # -1 where all tokens were forbidden: the row ends, but the next step may already be scheduled
        self._batch.append_several(slots, token_ids.clip(min=0), counts)
        reports = [(index[asking], sampled.logprobs) for index, asking, sampled in passes]
        return token_ids, collect(reports, len(slots), num_steps)

    def _run_passes(self, host: _HostRows) -> list[tuple[Int64Array, Int64Array, Sampled]]:
        """Of each pass: the rows' indices in the step, those that requested log-probabilities, the sampled tokens."""
        rows = self._upload(host, np.arange(len(host.slots)))
        newest = self._batch.token_ids[host.slots, host.num_tokens[0] - 1].astype(np.int64)
        input_ids = upload(newest, self._device)
        # of all rows; those of later passes may be shorter
        max_seq_lens: list[int] = host.num_tokens.max(axis=1).tolist()
        passes = []
        for number, max_seq_len in enumerate(max_seq_lens):
            batch = rows.batch(number, input_ids, max_seq_len)
            num_tokens = rows.num_tokens.select(0, number)
            # a variable for the logits would keep their memory allocated during the next pass
            sampled = self._sampler.sample(self._forward(batch), rows.plan, num_tokens, number)
            passes.append((rows.index, rows.plan.asking, sampled))
            if number + 1 == len(max_seq_lens):
                break
            input_ids = sampled.token_ids
            if rows.plan.needed & MASKS:
                input_ids = input_ids.clamp(min=0)
            self._sampler.remember(rows.plan, input_ids, num_tokens)
            rows.stop(number, input_ids)
            if self._host_memory:
                staying = np.flatnonzero(~rows.stopped.numpy() & (host.num_passes[rows.index] > number + 1))
                if len(staying) == 0:
                    break
                if len(staying) < len(rows.index):
                    rows = self._upload(host, rows.index[staying])
                    input_ids = input_ids[torch.from_numpy(staying)]
        return passes

    def _look_ahead(self, slots: Int64Array, num_steps: int) -> _HostRows:
        batch = self._batch
        known = batch.num_tokens[slots]
        num_passes = np.minimum(batch.max_num_tokens[slots] - known, num_steps).clip(min=1)
        longest = known + num_passes - 1
        if (batch.num_computed_tokens[slots] != known - 1).any():
            raise ValueError("a row of a step with num_steps > 1 misses one token: " + batch.describe(slots, known))
        block_size = batch.block_size
        if (longest > batch.num_blocks[slots] * block_size).any():
            raise ValueError("blocks of a step with num_steps > 1 do not last: " + batch.describe(slots, longest))
        numbers = np.arange(num_passes.max())[:, None]
        num_tokens = known + np.minimum(numbers, num_passes - 1)
        positions = num_tokens - 1
        block_table = batch.block_table[slots, : -(-int(longest.max()) // block_size)]
        blocks = block_table[np.arange(len(slots)), positions // block_size].astype(np.int64)
        # a stop id ends the row if it has at least min_tokens with it
        earliest = batch.prompt_lens[slots] + batch.sampling.min_tokens[slots]
        return _HostRows(
            slots=slots,
            num_passes=num_passes,
            num_tokens=num_tokens,
            slot_mapping=np.where(numbers < num_passes, blocks * block_size + positions % block_size, -1),
            block_table=block_table,
            stop_ids=batch.sampling.stop_ids.padded(slots, _NO_ID),
            may_stop=num_tokens + 1 >= earliest,
        )

    def _upload(self, host: _HostRows, index: Int64Array) -> _Rows:
        """Uploads the rows of `index`, none of which has ended."""
        device, num_rows = self._device, len(index)
        num_tokens_np = host.num_tokens.take(index, axis=1)
        num_tokens, slot_mapping, block_table, stop_ids, may_stop = upload_all(
            (
                num_tokens_np,
                host.slot_mapping.take(index, axis=1),
                host.block_table[index],
                host.stop_ids[index],
                host.may_stop.take(index, axis=1),
            ),
            device,
        )
        row_state, state = self._batch.row_state, NO_STATE
        if not row_state.is_empty:
            values = row_state.gather(host.slots[index], np.ones(num_rows, np.int64))
            state = place_values(row_state, values, device)
        one_each = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        return _Rows(
            index=index,
            plan=self._sampler.plan(host.slots[index], len(host.num_tokens)),
            query_start_np=np.arange(num_rows + 1, dtype=np.int32),
            seq_lens_np=num_tokens_np.astype(np.int32),
            num_tokens=num_tokens,
            positions=num_tokens - 1,
            seq_lens=num_tokens.int(),
            slot_mapping=slot_mapping,
            block_table=block_table,
            query_start=one_each,
            logits_indices=one_each[:-1].long(),
            stop_ids=stop_ids if stop_ids.shape[1] else None,
            may_stop=may_stop,
            stopped=torch.zeros(num_rows, dtype=torch.bool, device=device),
            state=state,
        )
