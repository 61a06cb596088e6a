"""What a user of langchain does with an OpenAI-compatible server; prints what came back as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"fair in {city}"


def main(base_url: str) -> dict[str, Any]:
    """Everything once."""
    server: dict[str, Any] = {"base_url": f"{base_url}/v1", "api_key": "none", "model": "tiny", "temperature": 0}
    chat = ChatOpenAI(max_completion_tokens=8, **server)
    messages = [SystemMessage("be brief"), HumanMessage("hello there")]
    answer = chat.invoke(messages)
    chain = ChatPromptTemplate.from_messages([("system", "be brief"), ("human", "{text}")]) | chat
    long_chat = ChatOpenAI(max_completion_tokens=100, **server)
    called = long_chat.bind_tools([weather], tool_choice="weather").invoke("hello there")
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(messages).response_metadata["logprobs"]
    return {
        "chat": answer.content,
        "usage": answer.usage_metadata,
        "finish_reason": answer.response_metadata["finish_reason"],
        "stream": "".join(str(chunk.content) for chunk in chat.stream(messages)),
        "batch": [found.content for found in chain.batch([{"text": "hello there"}] * 3)],
        "async": asyncio.run(chat.ainvoke(messages)).content,
        "text": OpenAI(max_tokens=8, **server).invoke("hello there"),
        "structured": long_chat.with_structured_output(Answer).invoke("hello there").model_dump(),
        "tool_calls": called.tool_calls,
        "logprobs": [len(entry["top_logprobs"]) for entry in logprobs["content"]],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
