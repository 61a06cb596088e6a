"""OpenAI's SDK for Python: chat, Responses API, tools, structured outputs, completions, embeddings."""

import json
import sys
from typing import Any, Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


def main(server: str, pooling_server: str, question: str) -> dict[str, Any]:
    """Everything once."""
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": question}]
    greedy: dict[str, Any] = {"model": "demo", "temperature": 0}
    chat = client.chat.completions
    forced = {"type": "function", "function": {"name": "Weather"}}
    called = chat.parse(
        messages=messages, tools=[pydantic_function_tool(Weather)], tool_choice=forced, max_tokens=400, **greedy
    )
    (call,) = called.choices[0].message.tool_calls
    with client.responses.stream(input=question, max_output_tokens=40, **greedy) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        response = events.get_final_response()
    assert response.output_text == "".join(deltas)
    parsed = client.responses.parse(input=question, text_format=Answer, max_output_tokens=400, **greedy)
    seen: dict[str, Any] = {
        "models": [model.id for model in client.models.list()],
        "chat": chat.create(messages=messages, max_tokens=40, **greedy).choices[0].message.content,
        "stream": [
            chunk.choices[0].delta.content or ""
            for chunk in chat.create(messages=messages, max_tokens=40, stream=True, **greedy)
        ],
        "responses": response.output_text,
        "completion": client.completions.create(prompt=question, max_tokens=8, **greedy).choices[0].text,
        "tool": {"name": call.function.name.lower(), "arguments": call.function.parsed_arguments.model_dump()},
        "structured": [
            chat.parse(messages=messages, response_format=Answer, max_tokens=400, **greedy)
            .choices[0]
            .message.parsed.model_dump(),
            parsed.output_parsed.model_dump(),
        ],
    }
    if pooling_server:
        pooling = OpenAI(base_url=f"{pooling_server}/v1", api_key="none")
        # the SDK asks for base64 and decodes it
        seen["embedding"] = pooling.embeddings.create(model="demo", input=question).data[0].embedding
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
