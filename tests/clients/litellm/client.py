"""LiteLLM: chat, streams, completions, errors, tools, structured outputs, embeddings."""

import asyncio
import json
import sys
from typing import Any, Literal

import litellm
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


WEATHER = {
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


def main(server: str, pooling_server: str, question: str) -> dict[str, Any]:
    """Everything once."""
    messages = [{"role": "user", "content": question}]
    where = {"api_base": f"{server}/v1", "api_key": "none"}
    # hosted_vllm is LiteLLM's own name for such servers
    greedy: dict[str, Any] = {"model": "hosted_vllm/demo", "messages": messages, "temperature": 0, **where}
    answer = litellm.completion(max_tokens=40, **greedy)
    text = answer.choices[0].message.content
    chunks = list(
        litellm.completion(
            **greedy | {"model": "openai/demo"}, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
    )
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == text
    assert asyncio.run(litellm.acompletion(max_tokens=40, **greedy)).choices[0].message.content == text
    completion = litellm.text_completion(
        model="text-completion-openai/demo", prompt=question, temperature=0, max_tokens=8, **where
    )
    forced = {"type": "function", "function": {"name": "weather"}}
    called = litellm.completion(max_tokens=400, tools=[WEATHER], tool_choice=forced, **greedy)
    (call,) = called.choices[0].message.tool_calls
    structured = litellm.completion(max_tokens=400, response_format=Answer, **greedy)
    try:
        litellm.completion(**greedy | {"model": "hosted_vllm/nope"})
        missing = "answered"
    except litellm.NotFoundError as error:
        missing = str(error)
    assert "The model `nope` does not exist." in missing, missing
    seen = {
        "chat": text,
        "finish_reason": answer.choices[0].finish_reason,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        "stream": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
        "completion": completion.choices[0].text,
        "tool": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
        "structured": [json.loads(structured.choices[0].message.content)],
    }
    if pooling_server:
        pooled = litellm.embedding(
            model="hosted_vllm/demo", input=[question], api_base=f"{pooling_server}/v1", api_key="none"
        )
        seen["embedding"] = pooled.data[0]["embedding"]
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
