"""OpenAI's Agents SDK over chat completions and over responses: text, streams, tools, structured outputs."""

import asyncio
import json
import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolCallItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


@function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"fair in {city}"


async def main(server: str, _: str, question: str) -> dict[str, Any]:
    """Everything once."""
    # traces would go to OpenAI
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{server}/v1", api_key="none")
    model = OpenAIChatCompletionsModel("demo", client)
    responses = OpenAIResponsesModel("demo", client)

    def agent(max_tokens: int, model: Any = model, **options: Any) -> Agent[Any]:
        settings = ModelSettings(temperature=0, max_tokens=max_tokens, tool_choice=options.pop("tool_choice", None))
        return Agent(name="agent", model=model, model_settings=settings, **options)

    run = Runner.run_streamed(agent(40), question)
    chunks = [
        event.data.delta
        async for event in run.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    with_tool = {"tools": [weather], "tool_choice": "weather", "tool_use_behavior": "stop_on_first_tool"}
    called = await Runner.run(agent(400, **with_tool), question)
    (call,) = [item.raw_item for item in called.new_items if isinstance(item, ToolCallItem)]
    arguments = json.loads(call.arguments)
    assert called.final_output == weather_of(arguments), called.final_output
    structured = [
        (await Runner.run(agent(400, model=one, output_type=Answer), question)).final_output.model_dump()
        for one in (model, responses)
    ]
    return {
        "chat": (await Runner.run(agent(40), question)).final_output,
        "stream": chunks,
        "responses": (await Runner.run(agent(40, model=responses), question)).final_output,
        "tool": {"name": call.name, "arguments": arguments},
        "structured": structured,
    }


def weather_of(arguments: dict[str, str]) -> str:
    """What the tool gives."""
    return f"fair in {arguments['city']}"


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
