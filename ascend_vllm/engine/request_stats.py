"""What happened to requests in one step of the engine; filled by the output processor, read by the metrics."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class FinishedSequence:
    """A sequence that ended.

    Attributes:
        reason: "stop", "length", "abort" or "error".
        num_generation_tokens: tokens it got.
    """

    reason: str
    num_generation_tokens: int


@dataclasses.dataclass(slots=True)
class FinishedRequest:
    """A request whose last sequence ended. Times are in seconds; None: it never got that far.

    Attributes:
        num_prompt_tokens: length of the prompt.
        n: sequences asked for.
        max_tokens: limit asked for, after clamping to the model's.
        e2e_s: arrival to last token.
        queue_s: arrival to first being scheduled.
        prefill_s: scheduled to first token.
        decode_s: first to last token.
        inference_s: scheduled to last token.
        mean_token_s: decode time per token after the first; None below two tokens.
        best_of: sequences generated.
        max_num_generation_tokens: of its longest sequence.
        num_computed_prompt_tokens: of the prompt, without those that came from the prefix cache.
        num_preemptions: how often its sequences made room for others.
    """

    num_prompt_tokens: int
    n: int
    max_tokens: int
    e2e_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    inference_s: float | None
    mean_token_s: float | None
    best_of: int
    max_num_generation_tokens: int
    num_computed_prompt_tokens: int
    num_preemptions: int


@dataclasses.dataclass(slots=True)
class StepStats:
    """All of one step.

    Attributes:
        num_prompt_tokens: of prompts whose first token came in this step; a prompt of n sequences counts once.
        num_generation_tokens: sampled tokens.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        num_queue_timeouts: requests that waited for too long and were refused.
        first_token_s: per request, arrival to first token.
        inter_token_s: (seconds per token, tokens) per sequence that had a token before.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_queue_timeouts: int = 0
    first_token_s: list[float] = dataclasses.field(default_factory=list)
    inter_token_s: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    finished_sequences: list[FinishedSequence] = dataclasses.field(default_factory=list)
    finished_requests: list[FinishedRequest] = dataclasses.field(default_factory=list)
