"""How many tokens of which prompts a step takes.

Prompts whose log-probabilities are asked for are always cut: each of their tokens takes the logits of the whole
vocabulary, and others would wait for as many of them as a step has room for. All others are cut with chunked prefill
only.

By default one prompt at a time is cut, and it takes all that decoding rows leave of the step. With
--max-num-partial-prefills above 1 that is shared evenly between the prompts at hand; prompts longer than
--long-prefill-token-threshold take at most that many tokens a step, and at most --max-long-partial-prefills of them
are under way at a time, so that shorter ones pass them (vLLM's flags and their meaning).
"""

from __future__ import annotations

from ascend_vllm.config.scheduler import SchedulerConfig


class PromptLimits:
    """Counts the prompts of one step; made anew for each step that has any.

    Args:
        config: limits.
        num_prompts: prompts that might take part in the step, running and waiting ones.
    """

    def __init__(self, config: SchedulerConfig, num_prompts: int) -> None:
        self._cuts_prompts = config.enable_chunked_prefill
        self._num_scored_left = config.max_scored_tokens
        self._max_partial = config.max_num_partial_prefills
        self._max_long = config.max_long_partial_prefills
        self._threshold = config.long_prefill_token_threshold
        sharing = max(1, min(self._max_partial, num_prompts))
        self._share = max(1, config.max_num_batched_tokens // sharing)
        self._num_partial = 0
        self._num_long = 0

    def is_long(self, num_missing: int) -> bool:
        """Whether a prompt of which so many tokens are missing counts as long."""
        return 0 < self._threshold < num_missing

    def allows_another_long(self) -> bool:
        """Whether one more long prompt may be under way."""
        return self._num_long < self._max_long

    @property
    def allows_scored(self) -> bool:
        """Whether one more prompt may be scored."""
        return self._num_scored_left > 0

    def take(self, num_missing: int, budget: int, *, is_scored: bool) -> int:
        """Tokens a prompt gets of what the step has left; 0: it must wait.

        Args:
            num_missing: tokens that it misses.
            budget: what the step has left.
            is_scored: its log-probabilities are asked for.
        """
        if is_scored:
            num_missing = min(num_missing, self._num_scored_left)
        count = self._take(num_missing, budget) if self._cuts_prompts else num_missing if num_missing <= budget else 0
        if is_scored:
            self._num_scored_left -= count
        return count

    def _take(self, num_missing: int, budget: int) -> int:
        is_long = self.is_long(num_missing)
        count = min(num_missing, budget, self._share)
        if is_long:
            count = min(count, self._threshold)
        if count < num_missing:
            if self._num_partial == self._max_partial:
                return 0
            self._num_partial += 1
        self._num_long += is_long
        return count
