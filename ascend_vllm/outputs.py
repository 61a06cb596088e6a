"""Outputs of the engine: `RequestOutput` and its parts, with vLLM's names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ascend_vllm.lora.request import LoRARequest


@dataclasses.dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 + number of vocabulary entries more likely than it.
        decoded_token: the token's text at this position.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# token id → log-probability, at one position: the token itself first, then the most likely ones
PositionLogprobs = dict[int, Logprob]


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One generated sequence of a request.

    Attributes:
        index: order of creation among the request's sequences; with best_of above n and with beam search the rank,
            0 is the best.
        text: the text so far, or its new part (RequestOutputKind.DELTA).
        token_ids: likewise, with the stop token.
        cumulative_logprob: sum of the sampled tokens' log-probabilities; None unless logprobs were requested or
            decide which sequences are returned.
        logprobs: one entry per token of token_ids; None unless requested.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for the end-of-sequence token.
        lora_request: None; the request's output has it.
        num_drafts: tokens that speculative decoding has drafted for it so far and the model has verified.
        num_accepted_drafts: those of them that were right, and are among its tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    num_drafts: int = 0
    num_accepted_drafts: int = 0

    def finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None


@dataclasses.dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of time.monotonic(); None: not yet, or not measured.

    Attributes:
        time_in_queue: seconds from arrival to first being scheduled.
        scheduler_time, model_forward_time, model_execute_time: vLLM 0.6.3's fields, not measured: None.
    """

    arrival_time: float
    last_token_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None
    finished_time: float | None = None
    scheduler_time: float | None = None
    model_forward_time: float | None = None
    model_execute_time: float | None = None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """State of a request after a step.

    Attributes:
        request_id: the id it was added with.
        prompt: the prompt's text; None when token ids were given.
        prompt_token_ids: the prompt's ids.
        prompt_logprobs: per prompt token, None for the first; None unless requested. With
            RequestOutputKind.DELTA only the first output has them.
        outputs: the sequences; with RequestOutputKind.DELTA only those with new tokens.
        finished: whether all sequences have ended.
        metrics: times.
        lora_request: the adapter that it was computed with.
        encoder_prompt, encoder_prompt_token_ids, kv_transfer_params: None, not supported.
        num_cached_tokens: prompt tokens found in the prefix cache.
        pooled: of a pooling request, the data of its `PoolingRequestOutput`; float32.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    pooled: npt.NDArray[np.float32] | None = None


@dataclasses.dataclass(slots=True)
class BeamSearchSequence:
    """One sequence of `LLM.beam_search`.

    Attributes:
        tokens: ids of the prompt and the generated ones, with the end-of-sequence token.
        cum_logprob: sum of the generated tokens' log-probabilities.
        text: text of all tokens, also special ones; None without a tokenizer.
        finish_reason: "stop" or "length".
        stop_reason: the stop token id that ended it; None for the end-of-sequence token.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True)
class BeamSearchOutput:
    """What `LLM.beam_search` returns for a prompt.

    Attributes:
        sequences: one per beam, the best first.
    """

    sequences: list[BeamSearchSequence]


@dataclasses.dataclass(slots=True)
class PoolingOutput:
    """The pooler's result for a prompt.

    Attributes:
        data: float32, [D] for the prompt or [P, D] for its P tokens: a torch tensor from `LLM`, a numpy array from
            `AsyncLLM`, whose process does not import torch.
    """

    data: Any


@dataclasses.dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Length of the embedding."""
        return len(self.embedding)


@dataclasses.dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of a prompt's labels; with use_activation=False the head's outputs."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


@dataclasses.dataclass(slots=True)
class ScoringOutput:
    """Similarity or relevance score of two texts."""

    score: float


O = TypeVar("O")  # noqa: E741 - as in vLLM


@dataclasses.dataclass(slots=True)
class PoolingRequestOutput(Generic[O]):
    """Result of a pooling request.

    Attributes:
        request_id: the id it was added with.
        outputs: the result.
        prompt_token_ids: the prompt's ids.
        finished: always True.
        num_cached_tokens: prompt tokens found in the prefix cache.
    """

    request_id: str
    outputs: O
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Result of `LLM.embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Result of `LLM.classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Result of `LLM.score`."""
