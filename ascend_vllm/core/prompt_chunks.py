"""How prompts share steps with one another, and with rows that decode.

Prompts whose log-probabilities are asked for are always cut into chunks: each of their tokens takes the logits of the
whole vocabulary, and others would wait for as many of them as a step has room for. All others are cut with chunked
prefill only.

By default one prompt at a time is cut, and it takes all that decoding rows leave of the step. With
--max-num-partial-prefills above 1 that is shared evenly between the prompts at hand; prompts longer than
--long-prefill-token-threshold take at most that many tokens a step, and at most --max-long-partial-prefills of them
are under way at a time, so that shorter ones pass them (vLLM's flags and their meaning).

With chunked prefill chunks are as small as --max-decode-pause-ms needs, by how long steps take. Without it whole
prompts come before rows that decode, but not again and again: as long as prompts keep coming, rows decode in between.
"""

from __future__ import annotations

from ascend_vllm.config.scheduler import SchedulerConfig

# weight of the newest step in the pace: a step that was held up once does not count for long
_NEWEST = 0.5
# rows that have waited so long for whole prompts decode before more of them are taken in
_MOST_WAIT_S = 0.05


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


class ChunkSizeController:
    """How many prompt tokens a step may compute so that rows that decode pause no longer than they may.

    A step's whole duration is put down to its prompt tokens, though a part of it does not depend on them. Chunks
    settle nevertheless where a step lasts as long as it may: a smaller chunk looks slower, and is no smaller then.

    Args:
        max_pause_s: seconds that a step may take in which rows decode; None: any.
        multiple_of: chunks have a multiple of so many tokens, and so many at least.

    Attributes:
        last_prompt_latency_s: from when the last step with prompts was handed out until it had been computed.

    Example::

        controller = ChunkSizeController(0.25, 16)
        controller.note(1.0, 3.0, 500)  # 4 ms a token
        controller.most_tokens(512)  # 48: a multiple of 16
    """

    def __init__(self, max_pause_s: float | None, multiple_of: int) -> None:
        self._max_pause_s = max_pause_s
        self._multiple_of = multiple_of
        # seconds; 0: unknown
        self._token_s = 0.0
        self._last_end = 0.0
        self.last_prompt_latency_s = 0.0
        # when the first step of whole prompts was made that decoding rows have waited for; None: they do not wait
        self._waiting_since: float | None = None

    def prompts_come_first(self, now: float) -> bool:
        """Whether whole prompts come before decoding rows; `now` is in seconds of time.monotonic()."""
        return self._waiting_since is None or now - self._waiting_since <= _MOST_WAIT_S

    def note_order(self, now: float, *, rows_wait: bool) -> None:
        """Records whether running rows wait for whole prompts in the step made at `now`."""
        if not rows_wait:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def note(self, made_at: float, end: float, num_prompt_tokens: int) -> None:
        """Takes in a step.

        Args:
            made_at: when it was handed out, in seconds of time.monotonic(); it may have waited for the one before.
            end: when it had been computed.
            num_prompt_tokens: tokens of the prompts, or chunks of prompts, in it.
        """
        begin, self._last_end = max(made_at, self._last_end), end
        if num_prompt_tokens:
            self.last_prompt_latency_s = end - made_at
            token_s = (end - begin) / num_prompt_tokens
            self._token_s = token_s if self._token_s == 0 else self._token_s + _NEWEST * (token_s - self._token_s)

    def most_tokens(self, budget: int) -> int:
        """Prompt tokens that a step with decoding rows may compute, of those that it has left."""
        if self._max_pause_s is None or self._token_s == 0:
            return budget
        chunks = int(self._max_pause_s / self._token_s) // self._multiple_of
        return min(budget, max(1, chunks) * self._multiple_of)
