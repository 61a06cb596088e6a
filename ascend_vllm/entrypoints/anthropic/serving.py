"""POST /v1/messages: requests in Anthropic's format, served as chat requests.

A request becomes a chat request; prompt, parsers, limits and sampling are those of /v1/chat/completions. Only the
answer is shaped here: content blocks, and a stream of events that open and close them.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ascend_vllm.entrypoints.anthropic.protocol import (
    CountTokensRequest,
    MessagesRequest,
    error_of,
)
from ascend_vllm.entrypoints.http.errors import json_response, to_http_error
from ascend_vllm.entrypoints.http.long_answers import make_answer, num_tokens
from ascend_vllm.entrypoints.http.request_ids import make_response_id
from ascend_vllm.entrypoints.http.streaming import encode_json
from ascend_vllm.entrypoints.http.validation import read_by
from ascend_vllm.entrypoints.openai.chat_tools import ChoiceParser
from ascend_vllm.entrypoints.openai.prompts import Prompt
from ascend_vllm.entrypoints.openai.protocol_chat import ChatCompletionRequest
from ascend_vllm.entrypoints.openai.protocol_common import UsageCounter
from ascend_vllm.entrypoints.openai.request_limits import check_number
from ascend_vllm.entrypoints.openai.serving_base import Events
from ascend_vllm.entrypoints.openai.serving_chat import ServingChat
from ascend_vllm.outputs import CompletionOutput, RequestOutput

# key for arguments of a tool call that are not a JSON object, for example truncated; recommended by Anthropic
_INVALID_JSON = "INVALID_JSON"


def error_response(error: BaseException) -> Response:
    """The answer to a request that failed before its response began, in Anthropic's format."""
    status, body = to_http_error(error)
    return json_response(error_of(body), status)


class ServingMessages:
    """Answers requests for messages as chat requests."""

    def __init__(self, chat: ServingChat) -> None:
        self._chat = chat

    async def create(self, request: MessagesRequest, http: Request) -> Response:
        """The answer to one request.

        Raises:
            RequestError: the request is wrong.
            pydantic.ValidationError: its tools do not fit each other.
        """
        chat_request = await self._to_chat(request, http)
        prompt = await self._chat.prepare(chat_request, http)
        max_tokens = self._chat.max_tokens(chat_request, len(prompt.token_ids))
        response_id = make_response_id(chat_request, "chatcmpl", http)
        answer = _Answer(self._chat, chat_request, response_id, prompt)
        parts = self._chat.engine_requests(chat_request, response_id, http, [prompt], [max_tokens])
        if request.stream:
            return await self._chat.generate_stream(parts, http, answer.encode, answer.stream)
        outputs = await self._chat.generate_whole(parts, http)
        answer.usage.add(0, outputs[0])
        return await make_answer(num_tokens(outputs), lambda: json_response(answer.complete(outputs[0].outputs[0])))

    async def count_tokens(self, request: CountTokensRequest, http: Request) -> Response:
        """The number of a conversation's prompt tokens.

        Raises:
            RequestError: the request is wrong.
            pydantic.ValidationError: its tools do not fit each other.
        """
        prompt = await self._chat.prepare(await self._to_chat(request, http), http)
        count = len(prompt.token_ids)
        return json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def _to_chat(self, request: CountTokensRequest, http: Request) -> ChatCompletionRequest:
        """The chat request, made off the event loop if its body is long; raises as `count_tokens`."""
        settings = self._chat.settings
        check_number(request.num_blocks, settings.max_model_len)
        chat = await read_by(http, lambda _body: request.to_chat())
        if settings.parsers.reasoning is None:
            # nothing separates reasoning from the answer, so that it cannot be limited
            chat.thinking_token_budget = None
        return chat


class _Answer:
    """Formats one request's outputs.

    Attributes:
        usage: counts tokens.
    """

    def __init__(
        self, serving: ServingChat, request: ChatCompletionRequest, response_id: str, prompt: Prompt
    ) -> None:
        settings = serving.settings
        self._id = response_id
        self._model = serving.model_name
        self._parser: ChoiceParser | None = settings.parsers.make(request, prompt.text or "")
        self._shows_cached = settings.enable_prompt_tokens_details
        self._writer = _BlockWriter()
        self.usage = UsageCounter(1, shows_cached=True)

    def complete(self, generated: CompletionOutput) -> dict[str, Any]:
        """The whole answer of a final output."""
        self.usage.count(0, generated)
        content = self._blocks(generated.text)
        return self._message(content, self._stop_reason(generated), _stop_sequence(generated))

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None = None, stop_sequence: str | None = None
    ) -> dict[str, Any]:
        """The whole answer, also sent in the first event of a stream."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._message_usage(),
        }

    def _blocks(self, text: str) -> list[dict[str, Any]]:
        parser = self._parser
        if parser is None:
            return [{"type": "text", "text": text}]
        parser.feed(text, final=True)
        blocks: list[dict[str, Any]] = []
        if parser.reasoning:
            blocks.append({"type": "thinking", "thinking": parser.reasoning, "signature": _signature()})
        calls = [_tool_use(call) for call in parser.tool_calls]
        if parser.content.strip() or not (blocks or calls):
            blocks.append({"type": "text", "text": parser.content})
        return blocks + calls

    def _stop_reason(self, generated: CompletionOutput) -> str:
        if generated.finish_reason == "length":
            return "max_tokens"
        if _stop_sequence(generated) is not None:
            return "stop_sequence"
        return "tool_use" if self._parser is not None and self._parser.has_called else "end_turn"

    def _message_usage(self) -> dict[str, int]:
        """Tokens so far; with --enable-prompt-tokens-details cached ones are counted separately."""
        total = self.usage.total()
        num_input, num_output = total.prompt_tokens, total.completion_tokens
        if not self._shows_cached or total.prompt_tokens_details is None:
            return {"input_tokens": num_input, "output_tokens": num_output}
        num_cached = total.prompt_tokens_details.cached_tokens
        return {
            # as in Anthropic's API, without the cached ones
            "input_tokens": num_input - num_cached,
            "output_tokens": num_output,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
        }

    def encode(self, _prompt_index: int, output: RequestOutput) -> bytes:
        """The events of the next output; none while a parser holds back text. See `ServingBase.generate_stream`."""
        events = []
        if not self.usage.started:
            self.usage.add(0, output)
            events.append(_event("message_start", {"type": "message_start", "message": self._message([])}))
        for generated in output.outputs:
            self.usage.count(0, generated)
            finished = generated.finish_reason is not None
            if self._parser is None:
                events.append(self._writer.add({"content": generated.text}))
            else:
                deltas = self._parser.feed(generated.text, final=finished)
                events.extend(self._writer.add(delta) for delta in deltas)
            if finished:
                events += [self._writer.finish(), self._end_events(generated)]
        return b"".join(events)

    async def stream(self, events: Events) -> AsyncGenerator[bytes, None]:
        """The answer's events, as `encode` made them; errors are sent as events."""
        try:
            async for _, data in events:
                if data:
                    yield data
        except Exception as error:
            yield _event("error", error_of(to_http_error(error).body))

    def _end_events(self, generated: CompletionOutput) -> bytes:
        delta = {"stop_reason": self._stop_reason(generated), "stop_sequence": _stop_sequence(generated)}
        fields = {"type": "message_delta", "delta": delta, "usage": self._message_usage()}
        return _event("message_delta", fields) + _event("message_stop", {"type": "message_stop"})


class _BlockWriter:
    """Makes events of content blocks from the deltas of a chat stream. One block is open at a time.

    No block has white space only, unless it is the only one: that would be an error if the client sent it back.
    """

    def __init__(self) -> None:
        self._index = -1
        self._blanks: list[str] = []  # white space held back at the beginning of a text
        self._type: str | None = None  # of the open block
        self._head = b""  # of its deltas, up to their text

    def add(self, delta: dict[str, Any]) -> bytes:
        """The events of a delta: reasoning, text, or part of a tool call."""
        if delta.get("tool_calls"):
            return b"".join(self._call_events(call) for call in delta["tool_calls"])
        if delta.get("reasoning"):
            return self._text_event("thinking", "thinking_delta", "thinking", delta["reasoning"])
        text: str = delta.get("content", "")
        if self._type == "text":
            return self._text_event("text", "text_delta", "text", text) if text else b""
        self._blanks.append(text)
        return self._pop_blanks() if text.strip() else b""

    def finish(self) -> bytes:
        """The last events: a text of white space if there is no other block, and the end of the open block."""
        return (self._pop_blanks() if self._index < 0 and any(self._blanks) else b"") + self.close()

    def _pop_blanks(self) -> bytes:
        """The events of a text that begins with what was held back."""
        return self._text_event("text", "text_delta", "text", "".join(self._blanks))

    def close(self) -> bytes:
        """The events that end the open block, if one is open."""
        self._blanks = []
        if self._type is None:
            return b""
        events = b""
        if self._type == "thinking":
            delta = {"type": "signature_delta", "signature": _signature()}
            events = _event(
                "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}
            )
        self._type = None
        return events + _event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _call_events(self, call: dict[str, Any]) -> bytes:
        function = call["function"]
        events = b""
        if function.get("name"):
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            events = self._open("tool_use", block, "input_json_delta", "partial_json")
        arguments = function.get("arguments")
        return events + (self._head + encode_json(arguments) + b"}}\n\n" if arguments else b"")

    def _text_event(self, block_type: str, delta_type: str, key: str, text: str) -> bytes:
        events = b""
        if self._type != block_type:
            events = self._open(block_type, {"type": block_type, key: ""}, delta_type, key)
        return events + self._head + encode_json(text) + b"}}\n\n"

    def _open(self, block_type: str, block: dict[str, Any], delta_type: str, key: str) -> bytes:
        """Start a block; encodes the part that all its deltas share."""
        events = self.close()
        self._type, self._index = block_type, self._index + 1
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (self._index, delta_type.encode(), key.encode())
        )
        fields = {"type": "content_block_start", "index": self._index, "content_block": block}
        return events + _event("content_block_start", fields)


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(fields))


def _signature() -> str:
    """The signature of a thinking block, which clients expect; it is not checked here."""
    return secrets.token_hex(16)


def _stop_sequence(generated: CompletionOutput) -> str | None:
    return generated.stop_reason if isinstance(generated.stop_reason, str) else None


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call as a content block."""
    arguments = call["function"]["arguments"]
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        value = {_INVALID_JSON: arguments}
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": value}
