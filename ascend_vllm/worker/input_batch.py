"""The worker's state of the running rows: persistent slots, from which each step's batch is built.

Letters: M slots, L maximum tokens of a sequence, B maximum blocks of a sequence, R rows of a step, T tokens of a
step, S sampling rows of a step, P positions at which they sample: one per row, and one for each draft.

All arrays are on the host, where a step's indices are computed. `upload` makes tensors of them, which share their
memory on CPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.attention.backend import NO_STATE, ForwardBatch
from ascend_vllm.layers.step_state import StepState
from ascend_vllm.ops.decode_inputs import DecodeInputs
from ascend_vllm.types.step import PADDING_TOKEN, REJECTED_TOKEN, NewRow, SchedulerOutput
from ascend_vllm.worker.row_state import RowState
from ascend_vllm.worker.sampling.columns import Int64Array, SamplingColumns, ragged_arange

Int32Array = npt.NDArray[np.int32]


# of tensors that are uploaded together, in bytes: operators read memory in blocks of at most this size
_ALIGNMENT = 512


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor on a device: copied asynchronously, or on CPU not copied."""
    return upload_all([array], device)[0]


def upload_all(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Several arrays as tensors, with one asynchronous copy; on CPU they are not copied.

    The source of the copy is pinned memory: copies from other memory would block the host, or might read it after it
    has been reused. The tensors share one allocation on the device.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(-(-(starts[-1] + array.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    staging = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    staging_np = staging.numpy()
    for start, array in zip(starts, arrays, strict=False):
        staging_np[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    memory = staging.to(device, non_blocking=True)
    return [
        # from_numpy of an empty array gives torch's dtype
        memory[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def place_values(
    row_state: RowState, values: dict[str, npt.NDArray[Any]], device: torch.device
) -> Mapping[str, torch.Tensor]:
    """Writes a step's values to the memory of the step state; returns the tensors for `ForwardBatch.state`."""
    uploaded = dict(zip(values, upload_all(list(values.values()), device), strict=True))
    return row_state.state.write(uploaded)


@dataclasses.dataclass(frozen=True, slots=True)
class HostBatch:
    """A step's batch on the host: the fields of ForwardBatch, and the slots that sample."""

    # [T] int64
    input_ids: Int64Array
    # [T] int64
    positions: Int64Array
    # [T] int64
    slot_mapping: Int64Array
    # [R+1] int32
    query_start: Int32Array
    # [R] int32
    seq_lens: Int32Array
    # [R, ceil(max_seq_len / block_size)] int32
    block_table: Int32Array
    # [P] int64
    logits_indices: Int64Array
    # [S] int64
    sampling_slots: Int64Array
    # [S] int64: number of positions at which each of them samples; None: one
    num_places: Int64Array | None
    max_query_len: int
    max_seq_len: int
    # name → [T, …] or [R, …]; None: no layer has declared step state
    row_values: dict[str, npt.NDArray[Any]] | None
    row_state: RowState

    def to_device(self, device: torch.device, *, only_outputs: bool = False) -> ForwardBatch:
        """The batch as tensors.

        Args:
            device: of the tensors.
            only_outputs: hidden states are wanted of no tokens but `logits_indices`. With step state that is not
                plain they are computed for all tokens, as layers with such state expect.
        """
        input_ids, positions, slot_mapping, query_start, seq_lens, block_table, logits_indices = upload_all(
            (
                self.input_ids,
                self.positions,
                self.slot_mapping,
                self.query_start,
                self.seq_lens,
                self.block_table,
                self.logits_indices,
            ),
            device,
        )
        output_indices = None
        is_plain = self.row_values is None or self.row_state.state.is_plain
        if only_outputs and is_plain and len(self.logits_indices) < len(self.input_ids):
            output_indices = logits_indices if len(self.logits_indices) else query_start[:1].long()
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=block_table,
            logits_indices=logits_indices,
            query_start_np=self.query_start,
            seq_lens_np=self.seq_lens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            output_indices=output_indices,
            state=NO_STATE if self.row_values is None else place_values(self.row_state, self.row_values, device),
        )


class InputBatch:
    """State of every slot: tokens, computed length, KV blocks, sampling parameters.

    The large arrays come from calloc, so that a slot needs no memory until it is used.

    Args:
        num_slots: M, the scheduler's max_num_seqs.
        max_model_len: L.
        block_size: tokens of a KV block.
        vocab_size: rows of the embedding.
        step_state: declared by the model's layers; None: there is none.
        max_drafts: most drafts of a row in a step.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        step_state: StepState | None = None,
        max_drafts: int = 0,
    ) -> None:
        self.block_size = block_size
        self.row_state = RowState(step_state or StepState(0, 0, torch.device("cpu")), num_slots)
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        # [M, L+1] int32, host: prompt, then output; undefined after num_tokens. One more than L, for the token that
        # is sampled after a sequence of maximum length.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        # [M, B] int32, host: KV blocks in order; undefined after num_blocks
        self.block_table = np.zeros((num_slots, max_blocks), np.int32)
        # [M] int64, host
        self.prompt_lens = np.zeros(num_slots, np.int64)
        # [M] int64, host
        self.num_blocks = np.zeros(num_slots, np.int64)
        # [M] int64, host: number of tokens at which the row ends
        self.max_num_tokens = np.zeros(num_slots, np.int64)
        # [2, M] int64, host: the next two, in one array because every step reads both
        self._lengths = np.zeros((2, num_slots), np.int64)
        # [M] int64, host: tokens whose KV is in the cache
        self.num_computed_tokens = self._lengths[0]
        # [M] int64, host: tokens known, sampled ones included
        self.num_tokens = self._lengths[1]
        # [M] int64, host: drafts after them, in `token_ids`, that the current step computes; None: no row has any
        self.num_drafts: Int64Array | None = None
        # [M] bool, host: rows that may have drafts later, see `NewRow.may_draft`
        self.may_draft = np.zeros(num_slots, np.bool_)
        # whether any of them may, in a step or not
        self._any_may_draft = False
        self.sampling = SamplingColumns(num_slots, vocab_size)
        # 0, 1, … M: query_start of decoding rows
        self._starts_of_one_each = np.arange(num_slots + 1, dtype=np.int32)
        # 0, 1, …: logits_indices of steps that sample at each token
        self._every_token = np.arange(num_slots * (1 + max_drafts))
        # gathers the inputs of steps without prompts; None: the library is missing
        self.decode_inputs: DecodeInputs | None = None
        if DecodeInputs.is_available():
            columns = (self.num_blocks, self.num_computed_tokens, self.num_tokens)
            self.decode_inputs = DecodeInputs(self.token_ids, self.block_table, *columns, block_size, 1 + max_drafts)

    def apply(self, step: SchedulerOutput) -> None:
        """Updates the slots by a step's diff.

        The loops are over rows that enter, leave or grow by a block, not over all rows of the step.

        Raises:
            ValueError: a row is longer than a slot, or a replaced block does not exist.
        """
        for slot in step.freed_slots:
            self.sampling.clear(slot)
            self.may_draft[slot] = False
        for row in step.new_rows:
            self._enter(row)
        if step.forks:
            self._fork(*np.array(step.forks, np.int64).T)
        if step.freed_slots or step.new_rows:
            self._any_may_draft = bool(self.may_draft.any())
        for slot, block_ids in step.new_blocks:
            self._append_blocks(slot, block_ids)
        if step.replaced_blocks:
            self._replace_blocks(*np.array(step.replaced_blocks, np.int64).T)
        self.num_drafts = None
        if step.drafts:
            self._place_drafts(step.drafts)

    def may_any_draft(self, slots: Int64Array) -> bool:
        """Whether any of these rows may have drafts later."""
        return self._any_may_draft and bool(self.may_draft[slots].any())

    def build(self, slots: Int64Array, num_scheduled: Int64Array) -> HostBatch:
        """Builds the batch in which the slots compute their next tokens.

        Args:
            slots: [R], each at most once.
            num_scheduled: [R] tokens of each, 1 or more, all of them known or drafts.

        Returns:
            The batch, valid until the next one is built.

        Raises:
            ValueError: a row is to compute more tokens than it has, or than its blocks hold.
        """
        if self.decode_inputs is not None and self.num_drafts is None and len(slots) == num_scheduled.sum():
            max_seq_len = self.decode_inputs.gather(slots)
            if max_seq_len > 0:
                inputs, starts = self.decode_inputs, self._starts_of_one_each
                return self._gathered_batch(inputs, slots, num_scheduled, max_seq_len, starts)
        computed, known = self._lengths.take(slots, axis=1)
        if self.num_drafts is not None:
            drafts = self.num_drafts[slots]
            if (batch := self._drafting_batch(slots, computed, known, drafts, num_scheduled)) is not None:
                return batch
            known = known + drafts
        seq_lens = computed + num_scheduled
        missing = known - seq_lens
        max_query_len, max_seq_len = int(num_scheduled.max()), int(seq_lens.max())
        if missing.min() < 0 or (seq_lens > self.num_blocks[slots] * self.block_size).any():
            raise ValueError("the step does not fit its rows: " + self.describe(slots, seq_lens))
        if max_query_len == 1:
            token_slots, positions = slots, computed
            query_start = self._starts_of_one_each[: len(slots) + 1]
        else:
            query_start = np.zeros(len(slots) + 1, np.int32)
            num_scheduled.cumsum(out=query_start[1:])
            token_slots = np.repeat(slots, num_scheduled)
            positions = np.repeat(computed - query_start[:-1], num_scheduled) + np.arange(len(token_slots))
        samples = np.flatnonzero(missing == 0)
        logits_indices = query_start[samples + 1].astype(np.int64) - 1
        num_places = None
        if self.num_drafts is not None:
            num_places = 1 + self.num_drafts[slots[samples]]
            logits_indices = ragged_arange(logits_indices + 1 - num_places, num_places)
        blocks = self.block_table[token_slots, positions // self.block_size].astype(np.int64)
        return HostBatch(
            input_ids=self.token_ids[token_slots, positions].astype(np.int64),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            block_table=self.block_table[slots, : -(-max_seq_len // self.block_size)],
            logits_indices=logits_indices,
            sampling_slots=slots[samples],
            num_places=num_places,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            row_values=None if self.row_state.is_empty else self.row_state.gather(slots, num_scheduled),
            row_state=self.row_state,
        )

    def _gathered_batch(
        self,
        inputs: DecodeInputs,
        slots: Int64Array,
        num_scheduled: Int64Array,
        max_seq_len: int,
        query_start: Int32Array,
        num_places: Int64Array | None = None,
    ) -> HostBatch:
        """The batch of rows that sample at each token that they compute, whose inputs have been gathered."""
        num_rows, num_tokens = len(slots), int(query_start[len(slots)])
        return HostBatch(
            input_ids=inputs.input_ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            slot_mapping=inputs.slot_mapping[:num_tokens],
            query_start=query_start[: num_rows + 1],
            seq_lens=inputs.seq_lens[:num_rows],
            block_table=inputs.block_table[:num_rows, : -(-max_seq_len // self.block_size)],
            logits_indices=self._every_token[:num_tokens],
            sampling_slots=slots,
            num_places=num_places,
            max_query_len=1 if num_places is None else int(num_places.max()),
            max_seq_len=max_seq_len,
            row_values=None if self.row_state.is_empty else self.row_state.gather(slots, num_scheduled),
            row_state=self.row_state,
        )

    def _drafting_batch(
        self,
        slots: Int64Array,
        computed: Int64Array,
        known: Int64Array,
        drafts: Int64Array,
        num_scheduled: Int64Array,
    ) -> HostBatch | None:
        """The batch of rows that compute their last tokens and drafts; None: some compute others, or it cannot."""
        inputs = self.decode_inputs
        if inputs is None or num_scheduled.sum() > len(inputs.input_ids):
            return None
        if not ((known - computed == 1) & (num_scheduled - drafts == 1)).all():
            return None
        max_seq_len = inputs.gather_several(slots, computed, num_scheduled)
        if max_seq_len == 0:
            return None
        return self._gathered_batch(
            inputs, slots, num_scheduled, max_seq_len, inputs.query_start, num_places=num_scheduled
        )

    def advance(self, slots: Int64Array, num_scheduled: Int64Array) -> None:
        """Records that a batch of `build` has been computed."""
        self.num_computed_tokens[slots] += num_scheduled

    def append(self, slots: Int64Array, token_ids: Int64Array) -> None:
        """Adds one sampled token to each of some slots."""
        ends = self.num_tokens[slots]
        self.token_ids[slots, ends] = token_ids
        self.num_tokens[slots] = ends + 1

    def append_received(self, slots: Int64Array, token_ids: Int64Array) -> None:
        """Adds tokens that the last pipeline stage sampled, [n] each, in the order of `slots`, which may be repeated.

        Tokens computed after a rejected draft count as not computed.
        """
        order = slots.argsort(kind="stable")
        rows, counts = np.unique(slots, return_counts=True)
        self.token_ids[slots[order], ragged_arange(self.num_tokens[rows], counts)] = token_ids[order]
        self.num_tokens[rows] += counts
        self.num_computed_tokens[rows] = np.minimum(self.num_computed_tokens[rows], self.num_tokens[rows] - 1)

    def accept(self, slots: Int64Array, num_places: Int64Array, sampled: Int64Array) -> Int64Array:
        """Adds the sampled tokens of rows with drafts, up to the first one that differs from the draft.

        Args:
            slots: [S], whose drafts have been computed.
            num_places: [S] number of positions at which each sampled.
            sampled: [P], in order of position.

        Returns:
            [S, N] as `StepOutput.sampled_token_ids` has it.
        """
        inputs, most = self.decode_inputs, int(num_places.max())
        if inputs is not None and most * len(slots) <= len(inputs.input_ids):
            return inputs.accept(slots, num_places, sampled, REJECTED_TOKEN, PADDING_TOKEN)
        numbers = np.arange(most)
        has_place = numbers < num_places[:, None]
        table = np.full(has_place.shape, PADDING_TOKEN)
        table[has_place] = sampled
        ends = self.num_tokens[slots]
        # clipped for rows without drafts at the end of the table
        places = np.minimum(ends[:, None] + numbers[:-1], self.token_ids.shape[1] - 1)
        is_right = (table[:, :-1] == self.token_ids[slots[:, None], places]) & has_place[:, 1:]
        counts = 1 + is_right.cumprod(axis=1).sum(axis=1)
        is_taken = numbers < counts[:, None]
        # -1 where all tokens were forbidden: the row ends, but the next step may already be scheduled
        taken = table[is_taken].clip(min=0)
        self.token_ids[np.repeat(slots, counts), ragged_arange(ends, counts)] = taken
        self.num_tokens[slots] = ends + counts
        self.num_computed_tokens[slots] = ends + counts - 1
        table[has_place & ~is_taken] = REJECTED_TOKEN
        return table

    def append_several(self, slots: Int64Array, token_ids: Int64Array, counts: Int64Array) -> None:
        """Adds sampled tokens to rows with one token to compute, and as many to their computed tokens.

        Args:
            slots: [R], each at most once.
            token_ids: [R, N].
            counts: [R] number of them that each row gets, 1 … N.
        """
        places = ragged_arange(self.num_tokens[slots], counts)
        taken = np.arange(token_ids.shape[1]) < counts[:, None]
        self.token_ids[np.repeat(slots, counts), places] = token_ids[taken]
        self._lengths[:, slots] += counts

    def describe(self, slots: Int64Array, seq_lens: Int64Array) -> str:
        """Describes rows, [R], and the lengths, [R], up to which a step computes them, for an error message."""
        rows = [
            f"slot {slot}: to be computed from {self.num_computed_tokens[slot]} up to {end}, "
            f"{self.num_tokens[slot]} tokens known, {self.num_blocks[slot]} blocks of {self.block_size}"
            for slot, end in zip(slots, seq_lens, strict=True)
        ]
        return "; ".join(rows)

    def _enter(self, row: NewRow) -> None:
        length = len(row.token_ids)
        if length > self._max_model_len:
            raise ValueError(
                f"request {row.request_id} has {length} tokens, a slot holds max_model_len={self._max_model_len}"
            )
        self.token_ids[row.slot, :length] = row.token_ids
        self.num_tokens[row.slot] = length
        self.prompt_lens[row.slot] = row.num_prompt_tokens
        self.num_computed_tokens[row.slot] = row.num_computed_tokens
        # one more than max_model_len: a sequence of maximum length samples a last token
        self.max_num_tokens[row.slot] = min(row.max_num_tokens, self._max_model_len + 1)
        self.num_blocks[row.slot] = 0
        self.may_draft[row.slot] = row.may_draft
        self._append_blocks(row.slot, row.block_ids)
        self.sampling.set(row)
        if not self.row_state.is_empty:
            self.row_state.enter(row)

    def _fork(self, targets: Int64Array, sources: Int64Array, token_ids: Int64Array) -> None:
        """Copies rows up to their computed tokens, and appends a token to each copy."""
        ends = self.num_computed_tokens[sources]
        moved = targets != sources
        # indexed assignments read all sources before they write
        to, of = targets[moved], sources[moved]
        if len(to):
            width, num_blocks = int(ends[moved].max()), int(self.num_blocks[of].max())
            self.token_ids[to, :width] = self.token_ids[of, :width]
            self.block_table[to, :num_blocks] = self.block_table[of, :num_blocks]
            columns = (self.prompt_lens, self.num_blocks, self.max_num_tokens, self.num_computed_tokens)
            for column in (*columns, self.may_draft):
                column[to] = column[of]
            self.sampling.copy(of, to)
            self.row_state.copy(of, to)
        self.token_ids[targets, ends] = token_ids
        self.num_tokens[targets] = ends + 1

    def _place_drafts(self, drafts: Sequence[tuple[int, list[int]]]) -> None:
        self.num_drafts = np.zeros_like(self.num_tokens)
        # a loop, since the lists have different lengths
        for slot, token_ids in drafts:
            end = self.num_tokens[slot]
            if end + len(token_ids) > self._max_model_len:
                raise ValueError(
                    f"slot {slot} has {end} tokens and {len(token_ids)} drafts, it holds "
                    f"max_model_len={self._max_model_len}"
                )
            self.token_ids[slot, end : end + len(token_ids)] = token_ids
            self.num_drafts[slot] = len(token_ids)

    def _replace_blocks(self, slots: Int64Array, indices: Int64Array, block_ids: Int64Array) -> None:
        wrong = np.flatnonzero((indices < 0) | (indices >= self.num_blocks[slots]))
        if len(wrong):
            slot, index = slots[wrong[0]], indices[wrong[0]]
            raise ValueError(
                f"slot {slot} has {self.num_blocks[slot]} blocks, the step replaces the one of index {index}"
            )
        self.block_table[slots, indices] = block_ids

    def _append_blocks(self, slot: int, block_ids: list[int]) -> None:
        first = int(self.num_blocks[slot])
        self.block_table[slot, first : first + len(block_ids)] = block_ids
        self.num_blocks[slot] = first + len(block_ids)
