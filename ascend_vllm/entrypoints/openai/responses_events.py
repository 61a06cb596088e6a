"""Builds the output items of a response, and the events that report their progress.

The order of a stream: ``response.created``, ``response.in_progress``, then for each item its addition, the deltas of
its text, and its end, at last the response as a whole: ``response.completed``, or ``response.incomplete`` if the
output was cut off. Every event has a number, and there is no ``[DONE]``.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ascend_vllm.entrypoints.http.streaming import encode_json
from ascend_vllm.entrypoints.openai.protocol_chat import ChatTokenLogprob
from ascend_vllm.entrypoints.openai.protocol_responses import ResponsesResponse
from ascend_vllm.entrypoints.openai.responses_input import is_json_object

_TEXT, _REASONING, _CALL = "message", "reasoning", "function_call"

_TEXT_DELTA = "response.output_text.delta"
# constant part of a text delta's event, encoded once: most events of a stream are text deltas
_TEXT_DELTA_HEAD = b'event: %b\ndata: {"type":"%b","content_index":0,"logprobs":[],' % ((_TEXT_DELTA.encode(),) * 2)


class OutputItems:
    """The output items of one response, built from the deltas of a `ChoiceParser`.

    Args:
        streamed: make events. Otherwise they are empty, and reasoning items that were not cut off have no status, as
            in vLLM.

    Attributes:
        items: `output` of the response so far.
        reasoning: the reasoning so far.
    """

    def __init__(self, streamed: bool = True) -> None:
        self.items: list[dict[str, Any]] = []
        self.reasoning = ""
        self._streamed = streamed
        self._open = ""  # type of the unfinished item; "": there is none
        self._chunks: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []
        self._has_logprobs = False
        self._sequence_number = 0
        self._text_head = b""  # constant part of the current text's events

    def whole(self, name: str, response: ResponsesResponse) -> bytes:
        """An event that contains the whole response, such as ``response.completed``."""
        return self._event(name, response=response)

    def add(self, delta: dict[str, Any], logprobs: Sequence[ChatTokenLogprob] | None = None) -> list[bytes]:
        """Add a delta of a `ChoiceParser`; returns its events, encoded.

        Args:
            delta: has one of `reasoning`, `content` and `tool_calls`.
            logprobs: of the tokens of a content delta; None: not requested.
        """
        if "tool_calls" in delta:
            return [event for call in delta["tool_calls"] for event in self._add_call(call)]
        if "reasoning" in delta:
            return self._add_reasoning(delta["reasoning"])
        return self._add_text(delta["content"], logprobs)

    def close(self, is_cut: bool = False) -> list[bytes]:
        """Finish the current item; returns its events.

        Args:
            is_cut: whether the output was cut off here, so that the item is incomplete, unless it is a call with all
                of its arguments.
        """
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item, text = self.items[-1], "".join(self._chunks)
        status = "incomplete" if is_cut else "completed"
        if kind == _CALL:
            item |= {"arguments": text, "status": "completed" if is_json_object(text) else status}
            events = [self._event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        elif kind == _REASONING:
            self.reasoning += text
            part = {"text": text, "type": "reasoning_text"}
            item |= {"content": [part], "status": status if self._streamed or is_cut else None}
            done = self._event("response.reasoning_text.done", content_index=0, text=text)
            events = [done, self._event("response.content_part.done", content_index=0, part=part)]
        else:
            part = _text_part(text, self._logprobs if self._has_logprobs else None)
            item |= {"content": [part], "status": status}
            done = self._event("response.output_text.done", content_index=0, logprobs=[], text=text)
            events = [done, self._event("response.content_part.done", content_index=0, part=part)]
        return [*events, self._event("response.output_item.done", item=dict(item))]

    def _add_text(self, text: str, logprobs: Sequence[ChatTokenLogprob] | None) -> list[bytes]:
        events: list[bytes] = []
        if self._open != _TEXT:
            events = self._begin(
                _TEXT, {"id": _item_id("msg"), "content": [], "role": "assistant"} | _begun(_TEXT) | {"phase": None}
            )
            part = _text_part("", [])
            events.append(self._event("response.content_part.added", content_index=0, part=part))
            self._logprobs = []
            self._has_logprobs = logprobs is not None
            place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
            self._text_head = _TEXT_DELTA_HEAD + encode_json(place)[1:-1] + b',"delta":'
        self._chunks.append(text)
        if not logprobs:
            events.append(
                b'%b%b,"sequence_number":%d}\n\n' % (self._text_head, encode_json(text), self._next_number())
            )
            return events
        self._logprobs.extend(logprobs)
        # in a delta event they have no `bytes`
        shown = [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in entry.top_logprobs],
            }
            for entry in logprobs
        ]
        events.append(self._event(_TEXT_DELTA, content_index=0, delta=text, logprobs=shown))
        return events

    def _add_reasoning(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        if self._open != _REASONING:
            nothing = {"content": None, "encrypted_content": None}
            events = self._begin(_REASONING, {"id": _item_id("rs"), "summary": []} | _begun(_REASONING) | nothing)
            part = {"text": "", "type": "reasoning_text"}
            events.append(self._event("response.content_part.added", content_index=0, part=part))
        self._chunks.append(text)
        events.append(self._event("response.reasoning_text.delta", content_index=0, delta=text))
        return events

    def _add_call(self, call: dict[str, Any]) -> list[bytes]:
        function = call["function"]
        events: list[bytes] = []
        if "id" in call:
            item = {"arguments": "", "call_id": call["id"], "name": function["name"], "id": _item_id("fc")}
            events = self._begin(_CALL, item | _begun(_CALL))
        if function["arguments"]:
            self._chunks.append(function["arguments"])
            events.append(self._event("response.function_call_arguments.delta", delta=function["arguments"]))
        return events

    def _begin(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        """Finish the current item and begin another; returns the events."""
        events = self.close()
        self._open, self._chunks = kind, []
        self.items.append(item)
        return [*events, self._event("response.output_item.added", item=dict(item))]

    def _event(self, event_type: str, /, **fields: Any) -> bytes:
        if not self._streamed:
            return b""
        if "response" not in fields:
            if "item" not in fields:
                fields["item_id"] = self.items[-1]["id"]
            fields["output_index"] = len(self.items) - 1
        fields["sequence_number"] = self._next_number()
        return b"event: %b\ndata: %b\n\n" % (event_type.encode(), encode_json({"type": event_type} | fields))

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number


def _begun(kind: str) -> dict[str, Any]:
    return {"type": kind, "status": "in_progress"}


def _item_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(8)}"


def _text_part(text: str, logprobs: list[ChatTokenLogprob] | None) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}
