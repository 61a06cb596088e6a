"""The hand-made events are the JSON that a serialiser would make."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from ascend_vllm.entrypoints.openai.protocol_chat import ChatChunkWriter
from ascend_vllm.entrypoints.openai.protocol_common import Usage
from ascend_vllm.entrypoints.openai.protocol_completion import CompletionChunkWriter


def decoded(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    # an event is one line: a newline inside would cut it
    assert event.count(b"\n") == 2
    return json.loads(event[6:])


HEAD = {"id": 'cmpl-"1"', "created": 7, "model": 'a "model"\n'}
USAGE = {
    "prompt_tokens": 1,
    "total_tokens": 3,
    "completion_tokens": 2,
    "prompt_tokens_details": None,
    "completion_tokens_details": None,
}


@hypothesis.given(st.text(), st.integers(0, 2), st.booleans())
def test_completion_events(text: str, index: int, usage_follows: bool) -> None:
    writer = CompletionChunkWriter(HEAD["id"], 7, HEAD["model"], "fp", 3, usage_follows)
    fingerprint = {} if usage_follows else {"system_fingerprint": "fp"}
    head = HEAD | {"object": "text_completion"}
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    assert decoded(writer.text_event(index, text)) == head | {"choices": [choice], "usage": None}
    event = writer.event(index, text, None, "stop", text, Usage(1, 3, 2), {"sentence_length": 4})
    choice |= {"finish_reason": "stop", "stop_reason": text, "sentence_length": 4}
    assert decoded(event) == head | {"choices": [choice], "usage": USAGE} | fingerprint
    assert decoded(writer.usage_event(Usage(1, 3, 2))) == head | {
        "choices": [],
        "system_fingerprint": "fp",
        "usage": USAGE,
    }


@pytest.mark.parametrize("usage_follows", [False, True])
def test_chat_events(usage_follows: bool) -> None:
    writer = ChatChunkWriter(HEAD["id"], 7, HEAD["model"], "fp", 2, usage_follows)
    head = HEAD | {"object": "chat.completion.chunk"}
    tail = {"usage": None} if usage_follows else {}
    choice = {"index": 1, "delta": {"content": 'x"\u2028é'}, "logprobs": None, "finish_reason": None}
    assert decoded(writer.text_event(1, 'x"\u2028é')) == head | {"choices": [choice]} | tail
    opening = {"choices": [choice | {"delta": {"role": "assistant", "content": ""}}]}
    assert decoded(writer.opening_event(1, "assistant", "", None, None)) == head | opening | tail
    assert decoded(writer.opening_event(1, "assistant", "", None, [5])) == head | opening | tail | {
        "prompt_token_ids": [5]
    }
    event = writer.event(1, {"content": "y"}, Usage(1, 3, 2), {"finish_reason": "stop", "stop_reason": 5})
    choice |= {"delta": {"content": "y"}, "finish_reason": "stop", "stop_reason": 5}
    # the last chunk has the fingerprint: the one with the usage, else the last one of each choice
    fingerprint = {} if usage_follows else {"system_fingerprint": "fp"}
    assert decoded(event) == head | {"choices": [choice], "usage": USAGE} | fingerprint
