"""How often each token occurs in the rows with penalties, in a table on the device that the sampler's op keeps up.

Letters: M slots, V vocabulary, S sampling rows of a step, C rows with penalties.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.ops.fused_sampling import MAX_COUNT, ONLY_IN_PROMPT
from ascend_vllm.worker.input_batch import InputBatch, upload_all
from ascend_vllm.worker.sampling.columns import Int64Array

_NOBODY = -1


class TokenCounts:
    """The table, and what of each slot's sequence it has.

    A row's counts are uploaded when the row enters. Afterwards each step names the one token that the row got since.

    Args:
        batch: the slots.
        device: of the table.
    """

    def __init__(self, batch: InputBatch, device: torch.device) -> None:
        self._batch = batch
        self._device = device
        # [M, V] int16, device: see `edit_and_sample`; allocated for the first row with penalties
        self._table: torch.Tensor | None = None
        # [M] int64, host: `SamplingColumns.entered` of the row that is counted, and its number of counted tokens
        self._entered = np.full(len(batch.num_tokens), _NOBODY)
        self._num_counted = np.zeros(len(batch.num_tokens), np.int64)
        self.unused = torch.zeros(1, batch.sampling.vocab_size, dtype=torch.int16, device=device)

    def bring_up(self, slots: Int64Array, num_tokens: Int64Array, num_steps: int) -> tuple[torch.Tensor, Int64Array]:
        """Counts the tokens of rows up to the last but one.

        Args:
            slots: [C], each at most once.
            num_tokens: [C] tokens of each.
            num_steps: tokens that each is going to sample, all but the last of which the device counts by itself.

        Returns:
            The table, and [C] the last token of each row, which is to be counted; -1: it has been.
        """
        batch, table = self._batch, self._table
        if table is None:
            shape = len(batch.num_tokens), batch.sampling.vocab_size
            table = self._table = torch.zeros(shape, dtype=torch.int16, device=self._device)
        missing = num_tokens - self._num_counted[slots]
        stale = (self._entered[slots] != batch.sampling.entered[slots]) | (missing < 0) | (missing > 1)
        if stale.any():
            counts = self._count_all(slots[stale], num_tokens[stale])
            table.index_copy_(0, *upload_all((slots[stale], counts), self._device))
        self._entered[slots] = batch.sampling.entered[slots]
        self._num_counted[slots] = num_tokens + num_steps - 1
        return table, np.where(stale | (missing == 0), -1, batch.token_ids[slots, num_tokens - 1])

    def at_positions(self, slots: Int64Array, num_tokens: Int64Array) -> torch.Tensor:
        """[C, V] int16, device: counts for a single step, of slots that may be repeated.

        Args:
            slots: [C].
            num_tokens: [C] tokens of each that count, drafts included.
        """
        return upload_all([self._count_all(slots, num_tokens)], self._device)[0]

    def _count_all(self, slots: Int64Array, num_tokens: Int64Array) -> npt.NDArray[np.int16]:
        # a loop over rows that enter, or have drafts
        lengths = zip(slots.tolist(), num_tokens.tolist(), strict=True)
        return np.stack([self._count(slot, length) for slot, length in lengths])

    def _count(self, slot: int, length: int) -> npt.NDArray[np.int16]:
        """[V]"""
        batch = self._batch
        vocab_size, tokens = batch.sampling.vocab_size, batch.token_ids[slot, :length]
        prompt_len = int(batch.prompt_lens[slot])
        prompt, output = (part[(part >= 0) & (part < vocab_size)] for part in np.split(tokens, [prompt_len]))
        counts = np.bincount(output, minlength=vocab_size).clip(max=MAX_COUNT).astype(np.int16)
        counts[prompt[counts[prompt] == 0]] = ONLY_IN_PROMPT
        return counts
