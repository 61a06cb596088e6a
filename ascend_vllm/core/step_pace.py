"""How long running answers pause for prompts.

With chunked prefill pieces of prompts are as small as --max-decode-pause-ms needs, by how long steps take. Without it
whole prompts come before rows that decode, but not again and again: as long as prompts keep coming, rows decode in
between.
"""

from __future__ import annotations

# weight of the newest step in the pace: a step that was held up once does not count for long
_NEWEST = 0.5
# rows that have waited so long for whole prompts decode before more of them are taken in
_MOST_WAIT_S = 0.05


class StepPace:
    """Turns seconds into tokens.

    A step's whole duration is put down to its prompt tokens, though a part of it does not depend on them. Pieces
    settle nevertheless where a step lasts as long as it may: a smaller piece looks slower, and is no smaller then.

    Args:
        max_pause_s: seconds that a step may take in which rows decode; None: any.
        multiple_of: pieces have a multiple of so many tokens, and so many at least.

    Attributes:
        last_prompt_latency_s: from when the last step with prompts was handed out until it had been computed.

    Example::

        pace = StepPace(0.25, 16)
        pace.note(1.0, 3.0, 500)  # 4 ms a token
        pace.most_tokens(512)  # 48: a multiple of 16
    """

    def __init__(self, max_pause_s: float | None, multiple_of: int) -> None:
        self._max_pause_s = max_pause_s
        self._multiple_of = multiple_of
        # seconds; 0: unknown
        self._token_s = 0.0
        self._last_end = 0.0
        self.last_prompt_latency_s = 0.0
        # when the first step of whole prompts was handed out that rows have waited for since they decoded
        self._passing_since: float | None = None

    def lets_prompts_pass(self, now: float) -> bool:
        """Whether whole prompts come before the rows that decode; `now` is in seconds of time.monotonic()."""
        return self._passing_since is None or now - self._passing_since <= _MOST_WAIT_S

    def note_turn(self, now: float, *, passes: bool) -> None:
        """Takes in whether a step is one of whole prompts that rows must wait for which could decode."""
        if not passes:
            self._passing_since = None
        elif self._passing_since is None:
            self._passing_since = now

    def note(self, made_at: float, end: float, num_prompt_tokens: int) -> None:
        """Takes in a step.

        Args:
            made_at: when it was handed out, in seconds of time.monotonic(); it may have waited for the one before.
            end: when it had been computed.
            num_prompt_tokens: tokens of the prompts, or pieces of prompts, in it.
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
        pieces = int(self._max_pause_s / self._token_s) // self._multiple_of
        return min(budget, max(1, pieces) * self._multiple_of)
