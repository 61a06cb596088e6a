"""instructor: objects by tools, by JSON schemas, and in a stream."""

import json
import sys
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


def main(server: str, _: str, question: str) -> dict[str, Any]:
    """Everything once."""
    openai = OpenAI(base_url=f"{server}/v1", api_key="none")
    greedy: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 400,
        # an answer that does not fit is a fault here
        "max_retries": 0,
    }
    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai, mode=mode)
        found.append(client.chat.completions.create(response_model=Answer, **greedy).model_dump())
    client = instructor.from_openai(openai, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(response_model=Answer, **greedy))
    return {"structured": [*found, parts[-1].model_dump()]}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
