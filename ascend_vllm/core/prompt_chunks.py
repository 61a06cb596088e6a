"""How prompts share steps with each other and with decoding rows.

Scored prompts (those with log-probabilities) are always computed in chunks: each of their tokens needs the logits of
the whole vocabulary, so a step with many of them would delay other requests. Other prompts are cut into chunks with
chunked prefill only.

By default one prompt at a time is cut, and its chunk takes all of the budget that decoding rows leave. With
--max-num-partial-prefills above 1 prompts share that evenly; prompts longer than --long-prefill-token-threshold get
at most that many tokens a step, and at most --max-long-partial-prefills of them are computed at a time, so that
shorter ones overtake them (vLLM's flags with vLLM's meaning).

With chunked prefill chunks are made as small as --max-decode-pause-ms requires, given how long steps take. Without it
whole prompts come before decoding rows, but if prompts keep coming rows decode in between.
"""

from __future__ import annotations

from ascend_vllm.config.scheduler import SchedulerConfig

# weight of the newest step in the moving average of seconds per token
_NEW_WEIGHT = 0.5
# after waiting so long for whole prompts, decoding rows come before further prompts
_MOST_WAIT_S = 0.05


class PromptLimits:
    """Counts the prompts of one step; each step with prompts has its own.

    Args:
        config: limits.
        num_prompts: running and waiting prompts that may be in the step.
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
    """Limits the prompt tokens of a step so that decoding rows do not pause longer than allowed.

    A step's whole duration is divided by its prompt tokens, though a part of it does not depend on them. Chunks still
    converge to the size at which a step takes `max_pause_s`, because the seconds per token grow as chunks shrink.

    Args:
        max_pause_s: seconds that a step with decoding rows may take; None: no limit.
        multiple_of: chunks are multiples of this many tokens, and not smaller.

    Attributes:
        last_prompt_latency_s: from handing out the last step with prompts to its outputs.

    Example::

        controller = ChunkSizeController(0.25, 16)
        controller.note(1.0, 3.0, 500)  # 4 ms a token
        controller.most_tokens(512)  # 48: a multiple of 16
    """

    def __init__(self, max_pause_s: float | None, multiple_of: int) -> None:
        self._max_pause_s = max_pause_s
        self._multiple_of = multiple_of
        # moving average, seconds per prompt token; 0: unknown
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
        """Records a step's duration.

        Args:
            made_at: when it was handed out, seconds of time.monotonic(); it may have waited for an earlier step.
            end: when its outputs arrived.
            num_prompt_tokens: tokens of its prompts or chunks.
        """
        begin, self._last_end = max(made_at, self._last_end), end
        if num_prompt_tokens:
            self.last_prompt_latency_s = end - made_at
            token_s = (end - begin) / num_prompt_tokens
            self._token_s = token_s if self._token_s == 0 else self._token_s + _NEW_WEIGHT * (token_s - self._token_s)

    def most_tokens(self, budget: int) -> int:
        """Prompt tokens that a step with decoding rows may compute, at most `budget`."""
        if self._max_pause_s is None or self._token_s == 0:
            return budget
        chunks = int(self._max_pause_s / self._token_s) // self._multiple_of
        return min(budget, max(1, chunks) * self._multiple_of)
