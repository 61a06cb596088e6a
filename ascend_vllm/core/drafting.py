"""Speculative decoding in the core: which rows have drafts, how many, and how many of them were right.

Drafts are proposed by a worker after each step (worker/speculation) and arrive with the step's output. A row with
drafts computes them after its last token in its next step (`RowKind.tokens_wanted`); how far it has advanced is known
only with the step's output, so that no step is made while another one with drafts is under way.
"""

from __future__ import annotations

from collections.abc import Sequence

from ascend_vllm.config.speculation import SpeculativeConfig
from ascend_vllm.core.request import Request
from ascend_vllm.types.messages import DraftStats
from ascend_vllm.types.step import NO_DRAFT, StepOutput


class Drafting:
    """The drafts of all rows.

    Args:
        config: None: nothing is drafted.

    Attributes:
        max_drafts: most drafts that a step asks for per row; 0: none.
        num_lookahead_tokens: see `SpeculativeConfig`.
    """

    def __init__(self, config: SpeculativeConfig | None) -> None:
        self._config = config
        self.max_drafts = 0 if config is None else config.num_speculative_tokens
        self.num_lookahead_tokens = 0 if config is None else config.num_lookahead_tokens
        self._stats: DraftStats | None = None
        if config is not None:
            self._stats = DraftStats(num_accepted_at=[0] * config.num_speculative_tokens)

    @property
    def stats(self) -> DraftStats | None:
        """Totals since the start; None: nothing is drafted."""
        return self._stats

    def enrol(self, request: Request, num_running: int) -> None:
        """Decides whether a new request has drafts.

        Args:
            request: with its kind.
            num_running: rows that run now.
        """
        config = self._config
        if config is None or not request.kind.may_draft:
            return
        if config.disable_by_batch_size is None or num_running < config.disable_by_batch_size:
            request.drafts_up_to = config.max_model_len - config.num_speculative_tokens
            self._set_drafts(request, [])

    def take(self, rows: Sequence[Request], output: StepOutput) -> None:
        """Takes the drafts that arrive with a step's output.

        Args:
            rows: [S] that sampled in the step, with the tokens that they got.
            output: of the step.
        """
        if self._config is None:
            return
        if output.drafts is None:
            for row in rows:
                self._set_drafts(row, [])
            return
        counts = (output.drafts != NO_DRAFT).sum(axis=1).tolist()
        # one iteration per row: each has a list of its own
        for row, drafts, count in zip(rows, output.drafts.tolist(), counts, strict=True):
            self._set_drafts(row, drafts[:count])

    def count(self, num_drafts: int, num_accepted: int) -> None:
        """Counts the drafts of a row in a step, the first `num_accepted` of which were right."""
        stats = self._stats
        if stats is None:
            return
        stats.num_drafts += 1
        stats.num_draft_tokens += num_drafts
        stats.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            stats.num_accepted_at[position] += 1

    def _set_drafts(self, row: Request, drafts: list[int]) -> None:
        has_drafts = self.max_drafts > 0 and row.num_tokens <= row.drafts_up_to
        row.drafts = drafts if has_drafts else []
        row.may_run_ahead = row.kind.may_run_ahead and not has_drafts
