"""Haystack's components for OpenAI: chat, streams, tools, structured outputs, embeddings."""

import json
import sys
from typing import Any, Literal

from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


WEATHER = Tool(
    name="weather",
    description="The weather of a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    function=lambda city: f"fair in {city}",
)


def main(server: str, pooling_server: str, question: str) -> dict[str, Any]:
    """Everything once."""
    key = Secret.from_token("none")

    def ask(max_tokens: int, **options: Any) -> ChatMessage:
        settings = {"temperature": 0, "max_tokens": max_tokens, **options.pop("generation_kwargs", {})}
        generator = OpenAIChatGenerator(
            api_key=key, model="demo", api_base_url=f"{server}/v1", generation_kwargs=settings, **options
        )
        return generator.run([ChatMessage.from_user(question)])["replies"][0]

    chunks: list[str] = []

    def keep(chunk: StreamingChunk) -> None:
        chunks.append(chunk.content)

    streamed = ask(40, streaming_callback=keep)
    assert streamed.text == "".join(chunks)
    forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    (call,) = ask(400, tools=[WEATHER], generation_kwargs=forced).tool_calls
    seen: dict[str, Any] = {
        "chat": ask(40).text,
        "stream": chunks,
        "tool": {"name": call.tool_name, "arguments": call.arguments},
        "structured": [json.loads(ask(400, generation_kwargs={"response_format": Answer}).text or "")],
    }
    if pooling_server:
        embedder = OpenAITextEmbedder(api_key=key, model="demo", api_base_url=f"{pooling_server}/v1")
        seen["embedding"] = embedder.run(question)["embedding"]
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
