"""Pydantic AI: an agent's text, its stream, outputs by tools and by schemas."""

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelResponse, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Rome"]


async def main(server: str, _: str, question: str) -> dict[str, Any]:
    """Everything once."""
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{server}/v1", api_key="none"))
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 40})
    async with agent.run_stream(question) as run:
        chunks = [text async for text in run.stream_text(delta=True, debounce_by=None)]

    def typed(output_type: Any) -> Agent[None, Any]:
        # a small model would call a tool that it must call again and again
        settings = {"temperature": 0, "max_tokens": 400, "parallel_tool_calls": False}
        # an answer that does not fit is a fault here
        return Agent(model, output_type=output_type, retries=0, model_settings=settings)

    called = await typed(ToolOutput(Weather, name="weather")).run(question)
    (call,) = [
        part
        for message in called.all_messages()
        if isinstance(message, ModelResponse)
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    return {
        "chat": (await agent.run(question)).output,
        "stream": chunks,
        "tool": {"name": call.tool_name, "arguments": called.output.model_dump()},
        "structured": [(await typed(NativeOutput(Answer)).run(question)).output.model_dump()],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
