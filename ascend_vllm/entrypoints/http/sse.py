"""Server-sent events: the hot path of a streaming server.

All events of a choice differ only in the token's text. The rest is encoded once, so that only the text is serialised
for each token.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ascend_vllm.entrypoints.openai.protocol_common import Usage

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


def error_event(body: dict[str, Any]) -> bytes:
    """The event of an error after the stream began; `DONE` follows it."""
    return b"data: " + encode_json(body) + b"\n\n"


class _ChunkWriter:
    """The parts that all events of one stream share.

    Args:
        object_type: the chunks' `object`.
        num_choices: choices of the whole request.
        usage_key: chunks without usage have ``"usage": null``.
        usage_follows: the stream ends with a usage chunk, which has the fingerprint; otherwise each choice's last
            chunk has it.
    """

    def __init__(
        self,
        object_type: str,
        response_id: str,
        created: int,
        model: str,
        fingerprint: str,
        num_choices: int,
        usage_key: bool,
        usage_follows: bool,
    ) -> None:
        head = {"id": response_id, "object": object_type, "created": created, "model": model}
        self._head = b"data: " + encode_json(head)[:-1] + b',"choices":['
        self._choice_heads = [b'%b{"index":%d,' % (self._head, index) for index in range(num_choices)]
        self._fingerprint = b',"system_fingerprint":' + encode_json(fingerprint)
        self._end = b"]" if usage_follows else b"]" + self._fingerprint
        self._no_usage = b',"usage":null' if usage_key else b""

    def _tail(self, usage: Usage | None, finished: bool = False) -> bytes:
        """The end of a chunk, after the last choice's closing brace."""
        end = self._end if finished else b"]"
        return end + (self._no_usage if usage is None else b',"usage":' + encode_json(usage)) + b"}\n\n"

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the usage of the whole request."""
        return self._head + b"]" + self._fingerprint + b',"usage":' + encode_json(usage) + b"}\n\n"


class CompletionChunkWriter(_ChunkWriter):
    """Events of a /v1/completions stream."""

    def __init__(
        self, response_id: str, created: int, model: str, fingerprint: str, num_choices: int, usage_follows: bool
    ) -> None:
        super().__init__(
            "text_completion", response_id, created, model, fingerprint, num_choices, True, usage_follows
        )
        self._plain_tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self._tail(None)

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


class ChatChunkWriter(_ChunkWriter):
    """Events of a /v1/chat/completions stream."""

    def __init__(
        self, response_id: str, created: int, model: str, fingerprint: str, num_choices: int, usage_follows: bool
    ) -> None:
        kind = "chat.completion.chunk"
        super().__init__(kind, response_id, created, model, fingerprint, num_choices, usage_follows, usage_follows)
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail(None)

    def text_event(self, index: int, text: str) -> bytes:
        """A chunk with text only, of a choice that goes on."""
        return self._choice_heads[index] + b'"delta":{"content":' + encode_json(text) + self._plain_tail

    def event(self, index: int, delta: dict[str, Any], usage: Usage | None, extra: dict[str, Any]) -> bytes:
        """A chunk with everything; `extra` are further keys of the choice beside its delta."""
        fields = {"delta": delta, "logprobs": None, "finish_reason": None, **extra}
        finished = fields["finish_reason"] is not None
        return self._choice_heads[index] + encode_json(fields)[1:] + self._tail(usage, finished)

    def opening_event(self, index: int, role: str, usage: Usage | None, prompt_token_ids: list[int] | None) -> bytes:
        """A choice's first chunk: its role, and the prompt's token ids if they were requested."""
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + encode_json(prompt_token_ids)
        choice = {"delta": {"role": role, "content": ""}, "logprobs": None, "finish_reason": None}
        tail = self._tail(usage)
        return self._choice_heads[index] + encode_json(choice)[1:] + tail[:1] + ids + tail[1:]
