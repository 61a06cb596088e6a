"""LlamaIndex with its classes for servers like OpenAI's: chat, streams, tools, structured outputs, embeddings."""

import json
import sys
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather of a city."""
    return f"fair in {city}"


def main(server: str, pooling_server: str, question: str) -> dict[str, Any]:
    """Everything once."""
    settings: dict[str, Any] = {
        "model": "demo",
        "api_base": f"{server}/v1",
        "api_key": "none",
        "temperature": 0,
        # otherwise it sends prompts to /v1/completions and asks for tools in words
        "is_chat_model": True,
        "is_function_calling_model": True,
        # otherwise it takes the context to be as long as its default
        "context_window": 2048,
    }
    llm = OpenAILike(max_tokens=40, **settings)
    long_llm = OpenAILike(max_tokens=400, **settings)
    messages = [ChatMessage(role="user", content=question)]
    called = long_llm.chat_with_tools(
        [FunctionTool.from_defaults(weather)], user_msg=question, tool_choice="weather", tool_required=True
    )
    (call,) = long_llm.get_tool_calls_from_response(called)
    seen = {
        "chat": llm.chat(messages).message.content,
        "stream": [chunk.delta or "" for chunk in llm.stream_chat(messages)],
        "completion": OpenAILike(max_tokens=8, **settings | {"is_chat_model": False}).complete(question).text,
        "tool": {"name": call.tool_name, "arguments": call.tool_kwargs},
        "structured": [long_llm.structured_predict(Answer, PromptTemplate("{q}"), q=question).model_dump()],
    }
    if pooling_server:
        embedding = OpenAILikeEmbedding(model_name="demo", api_base=f"{pooling_server}/v1", api_key="none")
        seen["embedding"] = embedding.get_text_embedding(question)
    return seen


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
