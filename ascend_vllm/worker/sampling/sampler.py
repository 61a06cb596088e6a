"""From logits to token ids.

Order of application (vLLM's): log-probabilities of the raw logits are set aside; then allowed ids, min_tokens,
logit bias, penalties; then arg-max, or temperature, min_p, top-k, top-p and a draw. With
``processed_logprobs`` log-probabilities are taken at the end instead.

Letters: S sampling rows of a step, M slots, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ascend_vllm.ops.sampling import apply_penalties, sample_tokens
from ascend_vllm.types.step import StepLogprobs
from ascend_vllm.worker.input_batch import InputBatch, upload
from ascend_vllm.worker.ragged import Int64Array
from ascend_vllm.worker.sampling import columns
from ascend_vllm.worker.sampling.logprobs import filtered_logprobs, report

RAW_LOGPROBS = "raw_logprobs"
PROCESSED_LOGPROBS = "processed_logprobs"


class Sampler:
    """Samples one token for each of some slots.

    Args:
        batch: the slots; their parameters and tokens so far are read from it.
        logprobs_mode: "raw_logprobs" or "processed_logprobs".
        device: where the logits are.
    """

    def __init__(self, batch: InputBatch, logprobs_mode: str, device: torch.device) -> None:
        self._device = device
        self._batch = batch
        self._params = batch.sampling
        self._raw = logprobs_mode == RAW_LOGPROBS
        # [M, L+1] int32: the slots' tokens, where the penalties' kernel reads them
        self._token_ids = upload(batch.token_ids, device)
        # [up to M, V] float32, grown when needed and kept: fresh pages each step cost more than the arithmetic
        self._float_logits = torch.empty(0)
        # number of rows → arguments of sample_tokens that make all of them greedy
        self._greedy_filters: dict[int, tuple[torch.Tensor, ...]] = {}

    def sample(self, logits: torch.Tensor, slots: Int64Array) -> tuple[torch.Tensor, StepLogprobs | None]:
        """Draws the next token of each row.

        Args:
            logits: [S, V], any float dtype; may be changed.
            slots: [S].

        Returns:
            [S] int64 ids, and log-probabilities if a row asked for them.
        """
        features = self._params.features[slots]
        needed = int(np.bitwise_or.reduce(features))
        if needed == 0:
            return self._greedy(logits), None
        asking = np.flatnonzero(features & columns.LOGPROBS)
        logprobs = None
        if self._raw and len(asking):
            logprobs = torch.log_softmax(self._rows(logits, asking).float(), dim=-1)
        logits = self._edit(logits, slots, features, needed)
        if not self._raw and len(asking):
            logprobs = self._processed(self._rows(logits, asking).float(), slots[asking])
        ids = self._draw(logits, slots) if needed & columns.RANDOM else self._greedy(logits)
        if logprobs is None:
            return ids, None
        num_logprobs = min(int(self._params.num_logprobs[slots].max()), logits.shape[-1])
        return ids, report(logprobs, asking, ids, num_logprobs, len(slots))

    def _edit(
        self, logits: torch.Tensor, slots: Int64Array, features: npt.NDArray[np.int32], needed: int
    ) -> torch.Tensor:
        """Masks, biases and penalties, on the rows that have them. Masks are exact in any dtype."""
        if needed & (columns.LOGIT_BIAS | columns.PENALTIES):
            logits = self._as_float(logits)
        if needed & columns.ALLOWED_IDS:
            self._keep_allowed(logits, slots, np.flatnonzero(features & columns.ALLOWED_IDS))
        if needed & columns.MIN_TOKENS:
            self._forbid_end(logits, slots, np.flatnonzero(features & columns.MIN_TOKENS))
        if needed & columns.LOGIT_BIAS:
            rows, ids, values = self._params.logit_bias.gather(slots)
            index = self._upload(rows), self._upload(ids)
            logits[index] += self._upload(values)
        if needed & columns.PENALTIES:
            self._penalise(logits, slots)
        return logits

    def _as_float(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dtype == torch.float32:
            return logits
        if len(self._float_logits) < len(logits):
            self._float_logits = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        return self._float_logits[: len(logits)].copy_(logits)

    def _keep_allowed(self, logits: torch.Tensor, slots: Int64Array, rows: Int64Array) -> None:
        index, ids, _ = self._params.allowed_ids.gather(slots[rows])
        kept = self._upload(rows[index]), self._upload(ids)
        values = logits[kept]
        logits[self._upload(rows)] = -torch.inf
        logits[kept] = values

    def _forbid_end(self, logits: torch.Tensor, slots: Int64Array, rows: Int64Array) -> None:
        batch, row_slots = self._batch, slots[rows]
        generated = batch.num_tokens[row_slots] - batch.prompt_lens[row_slots]
        rows = rows[generated < self._params.min_tokens[row_slots]]
        index, ids, _ = self._params.stop_ids.gather(slots[rows])
        logits[self._upload(rows[index]), self._upload(ids)] = -torch.inf

    def _penalise(self, logits: torch.Tensor, slots: Int64Array) -> None:
        batch, params = self._batch, self._params
        apply_penalties(
            logits,
            self._token_ids,
            self._upload(slots),
            self._upload(batch.prompt_lens[slots].astype(np.int32)),
            self._upload(batch.num_tokens[slots].astype(np.int32)),
            self._upload(params.repetition_penalty[slots]),
            self._upload(params.frequency_penalty[slots]),
            self._upload(params.presence_penalty[slots]),
        )

    def _filters(self, slots: Int64Array) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Temperature, top-k, top-p and min_p of some slots."""
        params = self._params
        return (
            self._upload(params.temperature[slots]),
            self._upload(params.top_k[slots]),
            self._upload(params.top_p[slots]),
            self._upload(params.min_p[slots]),
        )

    def _draw(self, logits: torch.Tensor, slots: Int64Array) -> torch.Tensor:
        # keyed by seed and place in the sequence: a row's draws depend on nothing else in the batch, nor on
        # how its prompt was cut, nor on whether it was preempted
        ids: torch.Tensor = sample_tokens(
            logits,
            *self._filters(slots),
            self._upload(self._params.seed[slots]),
            self._upload(self._batch.num_tokens[slots]),
        )
        return ids

    def _greedy(self, logits: torch.Tensor) -> torch.Tensor:
        # the op's arg-max, not torch's: the lowest id wins on ties in both, and on CPU it is ten times as fast
        num_rows = len(logits)
        filters = self._greedy_filters.get(num_rows)
        if filters is None:
            zeros = torch.zeros(num_rows, device=self._device)
            none = zeros.long()
            filters = self._greedy_filters[num_rows] = (zeros, zeros.int(), zeros + 1, zeros, none, none)
        ids: torch.Tensor = sample_tokens(logits, *filters)
        return ids

    def _processed(self, logits: torch.Tensor, slots: Int64Array) -> torch.Tensor:
        return filtered_logprobs(logits, *self._filters(slots))

    def _rows(self, logits: torch.Tensor, rows: Int64Array) -> torch.Tensor:
        return logits if len(rows) == len(logits) else logits[self._upload(rows)]

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return upload(array, self._device)
