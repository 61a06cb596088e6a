"""Request, answer and events of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import model_validator

from ascend_vllm.entrypoints.http.streaming import encode_json
from ascend_vllm.entrypoints.openai.protocol_common import ChunkWriter, GenerationRequest, TokenId, Usage
from ascend_vllm.outputs import PositionLogprobs


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool = True
    prompt_embeds: Any = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> CompletionRequest:
        if self.logprobs is not None and self.logprobs < 0:
            raise ValueError("`logprobs` must be a positive value.")
        return self

    def requested_logprobs(self) -> int | None:
        """`logprobs`; 0 returns only those of the sampled tokens."""
        return self.logprobs

    def requested_prompt_logprobs(self) -> int | None:
        """`prompt_logprobs`, else `logprobs` if `echo` shows those of the prompt too."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def effective_max_tokens(self) -> int:
        """`max_tokens`, 16 when absent or null."""
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def echo_only(self) -> bool:
        """Whether to return only the prompt: one token is generated and dropped."""
        return bool(self.echo) and self.max_tokens == 0


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a choice; all lists have one entry per token."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: Sequence[dict[str, float] | None] | msgspec.Raw = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One generated text.

    Attributes:
        prompt_logprobs: per prompt token, None for the first; None if not requested.
        sentence_length: characters of `text`.
        cum_log_probs: sum of the generated tokens' log-probabilities, if they were computed.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Sequence[PositionLogprobs | None] | msgspec.Raw | None = None
    sentence_length: int
    cum_log_probs: float | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/completions without streaming."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str


class CompletionChunkWriter(ChunkWriter):
    """Events of a /v1/completions stream."""

    OBJECT = "text_completion"
    NULL_USAGE = True
    PLAIN_END = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'

    def text_event(self, index: int, text: str) -> bytes:
        """A chunk with text only, of a choice that goes on."""
        return self._choice_heads[index] + b'"text":' + encode_json(text) + self._plain_tail

    def event(
        self,
        index: int,
        text: str,
        logprobs: Any,
        finish_reason: str | None,
        stop_reason: int | str | None,
        usage: Usage | None,
        extra: dict[str, Any],
    ) -> bytes:
        """A chunk with everything; `extra` are further keys of the choice."""
        fields = {
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            **extra,
        }
        return self._choice_heads[index] + encode_json(fields)[1:] + self._tail(usage, finish_reason is not None)
