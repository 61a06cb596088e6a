"""Anthropic's SDK for Python: messages, streams, tools, counted tokens."""

import json
import sys
from typing import Any

from anthropic import Anthropic

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def main(server: str, _: str, question: str) -> dict[str, Any]:
    """Everything once."""
    # the SDK adds /v1 itself
    client = Anthropic(base_url=server, api_key="none")
    messages: list[Any] = [{"role": "user", "content": question}]
    # the SDK itself knows no temperature any more
    greedy: dict[str, Any] = {"model": "demo", "messages": messages, "extra_body": {"temperature": 0}}
    answer = client.messages.create(max_tokens=40, **greedy)
    with client.messages.stream(max_tokens=40, **greedy) as stream:
        chunks = list(stream.text_stream)
        final = stream.get_final_message()
    assert final.usage.output_tokens == answer.usage.output_tokens
    forced: Any = {"type": "tool", "name": "weather"}
    with client.messages.stream(max_tokens=400, tools=[WEATHER], tool_choice=forced, **greedy) as stream:
        called = stream.get_final_message()
    (use,) = [block for block in called.content if block.type == "tool_use"]
    assert called.stop_reason == "tool_use", called
    return {
        "chat": answer.content[0].text,
        "stream": chunks,
        "tool": {"name": use.name, "arguments": use.input},
        "counted": client.messages.count_tokens(model="demo", messages=messages).input_tokens,
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
