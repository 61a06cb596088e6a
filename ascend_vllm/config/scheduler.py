"""The scheduler's section of the configuration."""

from __future__ import annotations

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True):
    """Limits and policy of the scheduler.

    Attributes:
        max_num_batched_tokens: most tokens of a step.
        max_num_seqs: most running sequences; also the number of slots. Others wait.
        max_model_len: most tokens of a sequence, prompt and output together.
        enable_chunked_prefill: prompts may be cut to fit the step's budget, and run beside decodes.
        max_num_queued_reqs: waiting requests beyond which new ones are refused (503); None: no limit.
        max_num_queued_tokens: prompt tokens without an answer yet, beyond which new requests are refused (503).
        num_scheduler_steps: forward steps of one scheduler call while all rows decode.
        multi_step_stream_outputs: the tokens of such a call are streamed one by one.
        stream_interval: tokens that are gathered before a stream goes on; the first one never waits.
        policy: "fcfs" or "priority".
        preemption_mode: "recompute", "swap", or None: beam searches and sequences of n > 1 are swapped, others
            recomputed.
        delay_factor: prompts wait for this many times the duration of the last prompt step.
        max_num_partial_prefills: most prompts that are cut at a time.
        max_long_partial_prefills: most of them that are long.
        long_prefill_token_threshold: tokens beyond which a prompt is long, and most tokens of it a step; 0: none is.
        async_scheduling: the next step is made while one runs.
        max_decode_pause_s: seconds that a step may take in which prompts are read beside decoding rows, whose pieces
            are as small as that needs; None: any.
        max_scored_tokens: prompt tokens whose log-probabilities a step computes; prompts that ask for more are cut,
            also without chunked prefill.
        queue_timeout_s: seconds a request may wait for its first step before it is refused (503); None: for ever.
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
