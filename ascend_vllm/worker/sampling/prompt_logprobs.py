"""Log-probabilities of prompts, for the rows that request them.

Letters: T tokens of a step, H hidden, V vocabulary, P prompt tokens of a row that a step reports, K most likely
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

# number of tokens whose logits are computed at once: those of a long prompt would need gigabytes
_CHUNK_TOKENS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """The prompt log-probabilities that a row requests.

    Attributes:
        num_logprobs: K.
        start: index of the first prompt token to report.
        end: the prompt's length.
    """

    num_logprobs: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class PromptReport:
    """Log-probabilities of P prompt tokens of a row, on the device.

    Attributes:
        slot: of the row.
        start: index of the first token in the prompt.
        parts: chunks of at most _CHUNK_TOKENS tokens.
    """

    slot: int
    start: int
    parts: list[LogprobTensors]

    def fetch(self) -> PromptLogprobs:
        """Copies the report to the host."""
        return PromptLogprobs(
            self.slot,
            self.start,
            np.concatenate([part.token_ids.cpu().numpy() for part in self.parts]).astype(np.int32),
            np.concatenate([part.logprobs.cpu().numpy() for part in self.parts]),
            np.concatenate([part.ranks.cpu().numpy() for part in self.parts]).astype(np.int32),
        )


class PromptScorer:
    """Computes the log-probability of each prompt token, given those before it.

    They do not depend on the row's sampling parameters unless `processed`. Prompts may be computed in chunks. A row's
    request is removed when its prompt has been computed, so that decoding steps have no overhead.

    Args:
        batch: the slots.
        compute_logits: [n, H] and which of the step's tokens these are → [n, V].
        device: of the model.
        reports_logits: report logits instead of log-probabilities.
        processed: apply the row's temperature, min_p, top-k and top-p first, as vLLM 0.6.3 does; penalties, biases
            and masks do not apply to prompts.

    Attributes:
        requests: by slot; without any there is nothing to do.
    """

    def __init__(
        self,
        batch: InputBatch,
        compute_logits: Callable[[torch.Tensor, slice], torch.Tensor],
        device: torch.device,
        *,
        reports_logits: bool = False,
        processed: bool = False,
    ) -> None:
        self._reports_logits = reports_logits
        self._processed = processed
        self._batch = batch
        self._compute_logits = compute_logits
        self._device = device
        self.requests: dict[int, _Request] = {}

    def apply(self, step: SchedulerOutput) -> None:
        """Updates the requests by the rows that a step frees and adds."""
        for slot in step.freed_slots:
            self.requests.pop(slot, None)
        for row in step.new_rows:
            self._enter(row)

    def score(self, host_batch: HostBatch, slots: np.ndarray, hidden: torch.Tensor) -> list[PromptReport]:
        """Log-probabilities of the prompt tokens that follow those of a step.

        Args:
            host_batch: of the step.
            slots: [R] int64, its rows.
            hidden: [T, H], of the step's tokens.
        """
        reports = []
        # a loop over the rows with requests, of which there are few
        for row in np.flatnonzero(np.isin(slots, list(self.requests))).tolist():
            slot = int(slots[row])
            request = self.requests[slot]
            first, last = host_batch.query_start[row : row + 2].tolist()
            computed = int(host_batch.positions[first])
            # the hidden state at position p gives the token at p + 1
            start, end = max(computed + 1, request.start), min(computed + 1 + last - first, request.end)
            if start < end:
                offset = first + start - computed - 1
                tokens = range(offset, offset + end - start)
                parts = self._parts(hidden, tokens, slot, start, request.num_logprobs)
                reports.append(PromptReport(slot, start, parts))
            if end == request.end:
                del self.requests[slot]
        return reports

    def _parts(
        self, hidden: torch.Tensor, tokens: range, slot: int, start: int, num_logprobs: int
    ) -> list[LogprobTensors]:
        """Reports of the P prompt tokens from `start` on; `tokens` are those of the step before each of them."""
        ids = self._batch.token_ids[slot, start : start + len(tokens)].astype(np.int64)
        token_ids = upload(ids, self._device)
        parts = []
        for first in range(0, len(tokens), _CHUNK_TOKENS):
            chunk = tokens[first : first + _CHUNK_TOKENS]
            places = slice(chunk.start, chunk.stop)
            parts.append(self._part(hidden, places, token_ids[first : first + _CHUNK_TOKENS], slot, num_logprobs))
        return parts

    def _part(
        self, hidden: torch.Tensor, places: slice, token_ids: torch.Tensor, slot: int, num_logprobs: int
    ) -> LogprobTensors:
        """Report of some tokens. The logits are freed on return, so that the next chunk can use their memory."""
        logits = self._compute_logits(hidden[places], places)
        if self._processed:
            logits = filtered_logits(logits.float(), *self._filters(slot))
        return report(logits, token_ids, num_logprobs, reports_logits=self._reports_logits)

    def _filters(self, slot: int) -> tuple[torch.Tensor, ...]:
        """[1] each: temperature, top_k, top_p, min_p of a row."""
        params = self._batch.sampling
        columns = (params.temperature, params.top_k, params.top_p, params.min_p)
        return tuple(upload(column[slot : slot + 1], self._device) for column in columns)

    def _enter(self, row: NewRow) -> None:
        num_logprobs = row.sampling_params.prompt_logprobs
        start = max(1, row.num_prompt_logprobs)
        if num_logprobs is not None and start < row.num_prompt_tokens:
            self.requests[row.slot] = _Request(num_logprobs, start, row.num_prompt_tokens)
        else:
            self.requests.pop(row.slot, None)
