"""How prompts share steps with each other and with decoding rows.

Scored prompts (those with log-probabilities) are always computed in chunks: each of their tokens needs the logits of
the whole vocabulary, so a step with many of them would delay other requests. Other prompts are cut into chunks with
chunked prefill only.

By default one prompt at a time is cut, and its chunk takes all of the budget that decoding rows leave. With
--max-num-partial-prefills above 1 prompts share that evenly; prompts longer than --long-prefill-token-threshold get
at most that many tokens a step, and at most --max-long-partial-prefills of them are computed at a time, so that
shorter ones overtake them (vLLM's flags with vLLM's meaning).

With chunked prefill chunks are made as small as --max-decode-pause-ms requires, given how long steps take. Without it
whole prompts come before decoding rows, but if prompts keep coming rows decode in between. With mixed_steps prompts
are computed beside decoding rows while steps are long: as many as a pause allows, and at least one.
"""

from __future__ import annotations

import math

from ascend_vllm.config.scheduler import SchedulerConfig

# weight of the newest step in moving averages: of seconds per token, and of how these grow with the context
_NEW_WEIGHT, _NEW_TREND_WEIGHT = 0.5, 0.1
# contexts that differ by less than this many tokens say little of how they do
_TREND_TOKENS = 256
# the next step's token is not taken to be cheaper than this share of the last steps'
_LEAST_SHARE = 0.25
# steps that take less are short
_LONG_STEP_S = 0.01
# after waiting so long for whole prompts, decoding rows come before further prompts
_MOST_WAIT_S = 0.05


class PromptLimits:
    """Counts the prompts of one step; each step with prompts has its own.

    Args:
        config: limits.
        num_prompts: running and waiting prompts that may be in the step.

    Attributes:
        most_whole: tokens beyond which the step takes no further whole prompt; None: no limit.
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
        self._num_whole = 0
        self.most_whole: int | None = None

    def is_long(self, num_missing: int) -> bool:
        """Whether a prompt that misses `num_missing` tokens counts as long."""
        return 0 < self._threshold < num_missing

    def allows_another_long(self) -> bool:
        """Whether the step may compute another long prompt."""
        return self._num_long < self._max_long

    @property
    def allows_scored(self) -> bool:
        """Whether the step may compute another scored prompt."""
        return self._num_scored_left > 0

    def take(self, num_missing: int, budget: int, *, is_scored: bool) -> int:
        """Tokens of a prompt that the step computes; 0: it must wait.

        Args:
            num_missing: tokens that are not computed yet.
            budget: tokens that the step may still compute.
            is_scored: whether its log-probabilities are wanted.
        """
        if is_scored:
            num_missing = min(num_missing, self._num_scored_left)
        count = self._take(num_missing, budget) if self._cuts_prompts else self._take_whole(num_missing, budget)
        if is_scored:
            self._num_scored_left -= count
        return count

    def _take_whole(self, num_missing: int, budget: int) -> int:
        num_whole = self._num_whole + num_missing
        if num_missing > budget or (self._num_whole and self.most_whole is not None and num_whole > self.most_whole):
            return 0
        self._num_whole = num_whole
        return num_missing

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
    """Limits the prompt tokens of a step so that decoding rows do not pause longer than allowed.

    A step's whole duration is divided by its prompt tokens, though a part of it does not depend on them. Chunks still
    converge to the size at which a step takes `max_pause_s`, because the seconds per token grow as chunks shrink.
    They also grow with the tokens that a token attends to: along a line through the last steps' means, whose slope is
    that of least squares with exponentially falling weights.

    Args:
        max_pause_s: seconds that a step with decoding rows may take; None: no limit.
        multiple_of: chunks are multiples of this many tokens, and not smaller.

    Attributes:
        last_prompt_latency_s: from handing out the last step with prompts to its outputs.
        last_step_s: seconds that the last step took.
        since_last_s: seconds from the outputs of the step before it to its own.

    Example::

        controller = ChunkSizeController(0.25, 16)
        controller.note(1.0, 3.0, 500, 125_000)  # 4 ms a token, which attends to 250
        controller.most_tokens(512, 500)  # 48: a multiple of 16
    """

    def __init__(self, max_pause_s: float | None, multiple_of: int) -> None:
        self._max_pause_s = max_pause_s
        self._multiple_of = multiple_of
        # moving averages: seconds per prompt token, 0: unknown; and the tokens that it attends to
        self._token_s = 0.0
        self._context = 0.0
        self._trend = _Trend()
        self._last_end = 0.0
        self.last_prompt_latency_s = 0.0
        self.last_step_s = self.since_last_s = 0.0
        # when the first step of whole prompts was made that decoding rows have waited for; None: they do not wait
        self._waiting_since: float | None = None

    @property
    def steps_are_long(self) -> bool:
        """Whether the time to schedule a step, and what operators cost beside their work, hardly matter."""
        return self.last_step_s >= _LONG_STEP_S

    @property
    def token_s(self) -> float:
        """Seconds of the last steps with prompts, per token of these; 0: there was none."""
        return self._token_s

    def prompts_come_first(self, now: float) -> bool:
        """Whether whole prompts come before decoding rows; `now` is in seconds of time.monotonic()."""
        return self._waiting_since is None or now - self._waiting_since <= _MOST_WAIT_S

    def note_order(self, now: float, *, rows_wait: bool) -> None:
        """Records whether running rows wait for whole prompts in the step made at `now`."""
        if not rows_wait:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def note(self, made_at: float, end: float, num_prompt_tokens: int, num_pairs: int) -> None:
        """Records a step's duration.

        Args:
            made_at: when it was handed out, seconds of time.monotonic(); it may have waited for an earlier step.
            end: when its outputs arrived.
            num_prompt_tokens: tokens of its prompts or chunks.
            num_pairs: the sum, over these, of the tokens that each attends to.
        """
        begin = max(made_at, self._last_end)
        self.since_last_s, self._last_end = end - self._last_end, end
        self.last_step_s = end - begin
        if num_prompt_tokens:
            self.last_prompt_latency_s = end - made_at
            token_s, context = (end - begin) / num_prompt_tokens, num_pairs / num_prompt_tokens
            weight = 1.0 if self._token_s == 0 else _NEW_WEIGHT
            self._token_s += weight * (token_s - self._token_s)
            self._context += weight * (context - self._context)
            self._trend.note(context, token_s)

    def most_tokens(self, budget: int, num_computed: int) -> int:
        """Prompt tokens that a step with decoding rows may compute.

        Args:
            budget: their limit.
            num_computed: tokens before the chunk, of the prompt with the most.
        """
        if self._max_pause_s is None or self._token_s == 0:
            return budget
        slope = self._trend.slope
        first_s = self._token_s + slope * (num_computed - self._context)
        first_s = max(first_s, _LEAST_SHARE * self._token_s)
        # the n for which n (first_s + slope n / 2) is the pause: a chunk's tokens attend to n / 2 of its own
        root = math.sqrt(first_s * first_s + 2 * slope * self._max_pause_s)
        chunks = int(2 * self._max_pause_s / (first_s + root)) // self._multiple_of
        return min(budget, max(1, chunks) * self._multiple_of)


class _Trend:
    """How much the seconds of a token grow with the tokens that it attends to."""

    def __init__(self) -> None:
        self._is_empty = True
        self._mean_context = self._mean_s = 0.0
        self._variance = self._covariance = 0.0

    def note(self, context: float, token_s: float) -> None:
        """Adds a step."""
        weight = 1.0 if self._is_empty else _NEW_TREND_WEIGHT
        self._is_empty = False
        from_mean, from_mean_s = context - self._mean_context, token_s - self._mean_s
        self._mean_context += weight * from_mean
        self._mean_s += weight * from_mean_s
        # the exponentially weighted forms of Welford's updates
        self._variance = (1 - weight) * (self._variance + weight * from_mean * from_mean)
        self._covariance = (1 - weight) * (self._covariance + weight * from_mean * from_mean_s)

    @property
    def slope(self) -> float:
        """Seconds per token and token attended to, at least 0."""
        return max(0.0, self._covariance / (self._variance + _TREND_TOKENS**2))
