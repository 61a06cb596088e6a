"""Parameters of a request to a pooling model: `PoolingParams`, with vLLM's fields."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

# embed: one vector; classify: one value per label; token_*: the same for every token of the prompt
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Pooling parameters of one request.

    Args:
        use_activation: normalise an embedding to length 1, or turn a head's outputs into probabilities. None: the
            configuration of the model's pooler.
        dimensions: entries of an embedding to return, for Matryoshka models; None: all.
        task: result to compute; None: the engine's task.
        skip_reading_prefix_cache: compute the whole prompt without the prefix cache. None: only if the pooler needs
            every token.
        truncate_prompt_tokens: keep this many tokens at the end of the prompt; -1: as many as the model takes.

    Raises:
        ValueError: a value is out of range; the message names the field.

    Example::

        PoolingParams(dimensions=256)
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    task: PoolingTask | None = None
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in POOLING_TASKS:
            raise ValueError(f"task must be one of {', '.join(POOLING_TASKS)}, got {self.task!r}.")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < -1:
            raise ValueError(
                f"truncate_prompt_tokens must be greater than or equal to -1, got {self.truncate_prompt_tokens}."
            )
