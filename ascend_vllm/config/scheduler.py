"""The scheduler's section of the configuration."""

from __future__ import annotations

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits and policy of the scheduler.

    Attributes:
        max_num_batched_tokens: maximum tokens of a step.
        max_num_seqs: maximum running sequences, which is also the number of batch slots; others wait.
        max_model_len: maximum tokens of a sequence, prompt and output together.
        enable_chunked_prefill: whether prompts may be split to fit the step's budget, and run beside decodes.
        mixed_steps: whether whole prompts run beside decodes, too, where steps take long.
        max_num_queued_reqs: waiting requests beyond which new ones are rejected (503); None: no limit.
        max_num_queued_tokens: prompt tokens without an answer yet, beyond which new requests are rejected (503).
        num_scheduler_steps: forward passes of a step while all rows decode.
        multi_step_stream_outputs: whether the tokens of such a step are streamed one by one.
        stream_interval: number of tokens that are streamed together; the first one is streamed at once.
        policy: "fcfs" or "priority".
        preemption_mode: "recompute", "swap", or None: beam searches and sequences of n > 1 are swapped, others
            recomputed.
        delay_factor: prompts are delayed by this many times the duration of the last prompt step.
        max_num_partial_prefills: maximum prompts that are split at a time.
        max_long_partial_prefills: maximum of them that are long.
        long_prefill_token_threshold: tokens beyond which a prompt is long, and its maximum tokens in a step; 0: no
            prompt is long.
        async_scheduling: whether the next step is scheduled while one runs.
        max_decode_pause_s: maximum duration of a step with prompts and decoding rows, kept by the size of the chunks
            or, of whole prompts, by their number; None: no limit.
        max_scored_tokens: maximum prompt tokens whose log-probabilities a step computes; prompts with more are split,
            even without chunked prefill.
        queue_timeout_s: how long a request may wait for its first step before it is rejected (503); None: no limit.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool = False
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    num_scheduler_steps: int = 1
    multi_step_stream_outputs: bool = True
    stream_interval: int = 1
    policy: str = "fcfs"
    preemption_mode: str | None = None
    delay_factor: float = 0.0
    max_num_partial_prefills: int = 1
    max_long_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    async_scheduling: bool = False
    max_decode_pause_s: float | None = None
    max_scored_tokens: int = 128
    queue_timeout_s: float | None = None
    mixed_steps: bool = False
