"""LangChain's classes for OpenAI: chat, batches, chains, tools, structured outputs, log-probabilities, embeddings."""

import asyncio
import json
import sys
from typing import Any, Literal

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"fair in {city}"


def main(server: str, pooling_server: str, question: str) -> dict[str, Any]:
    """Everything once."""
    greedy: dict[str, Any] = {"base_url": f"{server}/v1", "api_key": "none", "model": "demo", "temperature": 0}
    chat = ChatOpenAI(max_completion_tokens=40, **greedy)
    answer = chat.invoke(question)
    long_chat = ChatOpenAI(max_completion_tokens=400, **greedy)
    (call,) = long_chat.bind_tools([weather], tool_choice="weather").invoke(question).tool_calls
    logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke(question).response_metadata["logprobs"]
    num_tokens = answer.usage_metadata["output_tokens"]
    assert [len(entry["top_logprobs"]) for entry in logprobs["content"]] == [2] * num_tokens
    chain = ChatPromptTemplate.from_messages([("human", "{text}")]) | chat
    texts = [found.content for found in chain.batch([{"text": question}] * 3)]
    texts.append(asyncio.run(chat.ainvoke(question)).content)
    assert texts == [answer.content] * 4, texts
    seen = {
        "chat": answer.content,
        "brief": chat.invoke([("system", "be brief"), ("human", question)]).content,
        "finish_reason": answer.response_metadata["finish_reason"],
        "usage": [answer.usage_metadata["input_tokens"], num_tokens],
        "stream": [str(chunk.content) for chunk in chat.stream(question)],
        "completion": OpenAI(max_tokens=8, **greedy).invoke(question),
        "structured": [long_chat.with_structured_output(Answer).invoke(question).model_dump()],
        "tool": {"name": call["name"], "arguments": call["args"]},
    }
    if pooling_server:
        embeddings = OpenAIEmbeddings(
            base_url=f"{pooling_server}/v1",
            api_key="none",
            model="demo",
            # otherwise it sends token ids of OpenAI's own tokenizer
            check_embedding_ctx_length=False,
        )
        seen["embedding"] = embeddings.embed_query(question)
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
