"""Log-probabilities of prompts, for the rows that ask for them.

Letters: T tokens of a step, H hidden, V vocabulary, P prompt tokens of a row that a step tells of, K most likely
tokens reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from ascend_vllm.types.step import NewRow, PromptLogprobs, SchedulerOutput
from ascend_vllm.worker.input_batch import HostBatch, InputBatch, upload
from ascend_vllm.worker.sampling.logprobs import LogprobTensors, filtered_logits, report

# logits of so many tokens are held at a time: those of a whole prompt would need gigabytes
_TOKENS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, slots=True)
class _Wish:
    """What a row asks for.

    Attributes:
        num_logprobs: K.
        start: first prompt token to tell of.
        end: the prompt's length.
    """

    num_logprobs: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class PromptReport:
    """Of P prompt tokens of a row, still on the device.

    Attributes:
        slot: of the row.
        start: index of the first of them in the prompt.
        parts: of at most _TOKENS_AT_ONCE tokens each.
    """

    slot: int
    start: int
    parts: list[LogprobTensors]

    def fetch(self) -> PromptLogprobs:
        """The same on the host."""
        return PromptLogprobs(
            self.slot,
            self.start,
            np.concatenate([part.token_ids.cpu().numpy() for part in self.parts]).astype(np.int32),
            np.concatenate([part.logprobs.cpu().numpy() for part in self.parts]),
            np.concatenate([part.ranks.cpu().numpy() for part in self.parts]).astype(np.int32),
        )


class PromptScorer:
    """Tells how likely the tokens of prompts are, each given those before it.

    They are the model's own probabilities, whatever a row's sampling parameters are, unless `processed`. A row's
    prompt may come in pieces; nothing is left of a row's wish when its prompt has been computed, so that decoding
    costs nothing.

    Args:
        batch: the slots.
        compute_logits: [T, H] → [T, V].
        device: where it computes.
        tells_logits: the logits themselves are told in place of log-probabilities.
        processed: they are told after the row's temperature, min_p, top-k and top-p, as vLLM 0.6.3 does it; no
            penalty, bias or mask concerns a prompt.
    """

    def __init__(
        self,
        batch: InputBatch,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        *,
        tells_logits: bool = False,
        processed: bool = False,
    ) -> None:
        self._tells_logits = tells_logits
        self._processed = processed
        self._batch = batch
        self._compute_logits = compute_logits
        self._device = device
        # by slot
        self._wishes: dict[int, _Wish] = {}

    def apply(self, step: SchedulerOutput) -> None:
        """Takes note of the rows that leave and enter with a step."""
        if self._wishes:
            for slot in step.freed_slots:
                self._wishes.pop(slot, None)
        for row in step.new_rows:
            self._enter(row)

    def score(self, host_batch: HostBatch, slots: np.ndarray, hidden: torch.Tensor) -> list[PromptReport]:
        """Log-probabilities of the prompt tokens behind those that a step computed.

        Args:
            host_batch: of the step.
            slots: [R] int64, its rows.
            hidden: [T, H], of the step's tokens.
        """
        if not self._wishes:
            return []
        reports = []
        # only rows that ask, while they compute their prompts, are worth a turn
        for row in np.flatnonzero(np.isin(slots, list(self._wishes))).tolist():
            slot = int(slots[row])
            wish = self._wishes[slot]
            first, last = host_batch.query_start[row : row + 2].tolist()
            computed = int(host_batch.positions[first])
            # the token at position p tells of the one behind it
            start, end = max(computed + 1, wish.start), min(computed + 1 + last - first, wish.end)
            if start < end:
                offset = first + start - computed - 1
                parts = self._parts(hidden[offset : offset + end - start], slot, start, wish.num_logprobs)
                reports.append(PromptReport(slot, start, parts))
            if end == wish.end:
                del self._wishes[slot]
        return reports

    def _parts(self, hidden: torch.Tensor, slot: int, start: int, num_logprobs: int) -> list[LogprobTensors]:
        """Reports of the tokens from `start` on, of which `hidden`, [P, H], are the states before each."""
        ids = self._batch.token_ids[slot, start : start + len(hidden)].astype(np.int64)
        token_ids = upload(ids, self._device)
        pieces = [slice(first, first + _TOKENS_AT_ONCE) for first in range(0, len(hidden), _TOKENS_AT_ONCE)]
        return [self._part(hidden[piece], token_ids[piece], slot, num_logprobs) for piece in pieces]

    def _part(self, hidden: torch.Tensor, token_ids: torch.Tensor, slot: int, num_logprobs: int) -> LogprobTensors:
        """Of [T] tokens; the logits are gone when it returns, so that the next ones take their memory."""
        logits = self._compute_logits(hidden)
        if self._processed:
            logits = filtered_logits(logits.float(), *self._filters(slot))
        return report(logits, token_ids, num_logprobs, tells_logits=self._tells_logits)

    def _filters(self, slot: int) -> tuple[torch.Tensor, ...]:
        """[1] each: temperature, top_k, top_p, min_p of a row."""
        params = self._batch.sampling
        columns = (params.temperature, params.top_k, params.top_p, params.min_p)
        return tuple(upload(column[slot : slot + 1], self._device) for column in columns)

    def _enter(self, row: NewRow) -> None:
        num_logprobs = row.sampling_params.prompt_logprobs
        start = max(1, row.num_prompt_logprobs)
        if num_logprobs is not None and start < row.num_prompt_tokens:
            self._wishes[row.slot] = _Wish(num_logprobs, start, row.num_prompt_tokens)
        else:
            self._wishes.pop(row.slot, None)
