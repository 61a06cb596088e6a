"""The engine's log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ascend_vllm.entrypoints.http.long_answers import encode_rows
from ascend_vllm.entrypoints.openai.protocol_chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionLogprobs
from ascend_vllm.outputs import Logprob, PositionLogprobs

if TYPE_CHECKING:
    from ascend_vllm.engine.tokenization import Tokenizer

T = TypeVar("T")

# JSON has no infinity; vLLM's value for "impossible"
_IMPOSSIBLE = -9999.0

# most tokens whose log-probabilities are encoded together with the answer; longer lists are encoded in advance
_SHORT = 512

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _token_text(token_id: int, entry: Logprob, as_token_ids: bool) -> str:
    return f"token_id:{token_id}" if as_token_ids or entry.decoded_token is None else entry.decoded_token


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    text_offset: int,
    as_token_ids: bool,
    tokenizer: Tokenizer | None = None,
) -> CompletionLogprobs:
    """Log-probabilities of /v1/completions.

    Args:
        token_ids: the generated tokens, preceded by the prompt's with `echo`.
        positions: per token, entries of the token itself and the most likely ones; None for a prompt's first token.
        text_offset: number of characters before the first token.
        as_token_ids: show tokens as ``token_id:123``.
        tokenizer: for the text of a prompt's first token.
    """
    result = CompletionLogprobs([], [], [], [])
    top_logprobs: list[dict[str, float] | None] = []
    top: dict[str, float] | None
    for token_id, entries in zip(token_ids, positions, strict=True):
        if entries is None:
            token, logprob, top = _first_text(token_id, as_token_ids, tokenizer), None, None
        else:
            token = _token_text(token_id, entries[token_id], as_token_ids)
            logprob = max(entries[token_id].logprob, _IMPOSSIBLE)
            top = {token: logprob}
            # the engine returns the token itself and the requested number of most likely ones
            for other_id, entry in entries.items():
                top.setdefault(_token_text(other_id, entry, as_token_ids), max(entry.logprob, _IMPOSSIBLE))
        result.text_offset.append(text_offset)
        result.token_logprobs.append(logprob)
        result.tokens.append(token)
        top_logprobs.append(top)
        text_offset += len(token)
    result.top_logprobs = shown_positions(top_logprobs)
    return result


def _first_text(token_id: int, as_token_ids: bool, tokenizer: Tokenizer | None) -> str:
    """Text of a token without log-probabilities; "" for an incomplete UTF-8 character."""
    text = None if tokenizer is None else tokenizer.token_text(token_id)
    if text is not None and _REPLACEMENT in text:
        text = ""
    return _token_text(token_id, Logprob(0.0, None, text), as_token_ids)


def shown_positions(positions: Sequence[T]) -> Sequence[T] | msgspec.Raw:
    """A list with one entry per token for an answer; a long one is encoded as JSON in advance."""
    return positions if len(positions) <= _SHORT else encode_rows(positions)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[PositionLogprobs | None] | None:
    """A prompt's log-probabilities for an answer: infinities, which JSON lacks, are replaced."""
    if positions is None:
        return None
    return [
        None
        if entries is None
        else {
            token_id: dataclasses.replace(entry, logprob=max(entry.logprob, _IMPOSSIBLE))
            for token_id, entry in entries.items()
        }
        for entries in positions
    ]


def chat_logprobs(
    token_ids: list[int], positions: list[PositionLogprobs], num_top: int, as_token_ids: bool
) -> ChatLogprobs:
    """Log-probabilities of /v1/chat/completions; further arguments as for `completion_logprobs`.

    Args:
        num_top: most likely tokens to show at each position.
    """
    content: list[ChatTokenLogprob] = []
    for token_id, entries in zip(token_ids, positions, strict=True):
        token = _token_text(token_id, entries[token_id], as_token_ids)
        best = sorted(entries.items(), key=lambda item: -item[1].logprob)[:num_top]
        content.append(
            ChatTokenLogprob(
                token,
                max(entries[token_id].logprob, _IMPOSSIBLE),
                _token_bytes(token, entries[token_id]),
                [_top_logprob(_token_text(i, entry, as_token_ids), entry) for i, entry in best],
            )
        )
    return ChatLogprobs(content)


def _top_logprob(token: str, entry: Logprob) -> ChatTopLogprob:
    return ChatTopLogprob(token, max(entry.logprob, _IMPOSSIBLE), _token_bytes(token, entry))


def _token_bytes(token: str, entry: Logprob) -> list[int]:
    """UTF-8 bytes of a token's text, even if it is shown as ``token_id:123``."""
    text = token if entry.decoded_token is None else entry.decoded_token
    return list(text.encode(errors="replace"))
