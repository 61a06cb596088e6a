"""huggingface_hub's InferenceClient: chat, streams, tools, structured outputs."""

import json
import os
import sys
from typing import Any

# with it requests to a server of one's own are refused, too
os.environ.pop("HF_HUB_OFFLINE", None)

from huggingface_hub import InferenceClient

ANSWER = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def main(server: str, _: str, question: str) -> dict[str, Any]:
    """Everything once."""
    client = InferenceClient(base_url=f"{server}/v1", api_key="none")
    messages = [{"role": "user", "content": question}]
    greedy: dict[str, Any] = {"model": "demo", "messages": messages, "temperature": 0}
    forced: Any = {"type": "function", "function": {"name": "weather"}}
    called = client.chat_completion(max_tokens=400, tools=[WEATHER], tool_choice=forced, **greedy)
    (call,) = called.choices[0].message.tool_calls
    arguments = call.function.arguments
    schema: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
    structured = client.chat_completion(max_tokens=400, response_format=schema, **greedy)
    return {
        "chat": client.chat_completion(max_tokens=40, **greedy).choices[0].message.content,
        "stream": [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat_completion(max_tokens=40, stream=True, **greedy)
        ],
        "tool": {"name": call.function.name, "arguments": json.loads(arguments)},
        "structured": [json.loads(structured.choices[0].message.content)],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
