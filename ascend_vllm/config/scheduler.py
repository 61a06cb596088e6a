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
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    enable_chunked_prefill: bool = False
    max_num_queued_reqs: int | None = None
