"""outlines, with its model for vLLM's server and that for OpenAI's."""

import json
import sys
from typing import Any, Literal

import outlines
from openai import OpenAI
from outlines.types import Regex
from pydantic import BaseModel


class Answer(BaseModel):
    """What the model is to say."""

    word: Literal["yes", "no"]
    sure: bool


def main(server: str, _: str, question: str) -> dict[str, Any]:
    """Everything once."""
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    vllm = outlines.from_vllm(client, "demo")
    openai = outlines.from_openai(client, "demo")
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 400}
    word = vllm(question, Literal["yes", "no"], **greedy)
    assert word in ("yes", "no"), word
    number = vllm(question, Regex(r"[1-9][0-9]{2}"), **greedy)
    assert len(number) == 3 and number.isdecimal(), number
    return {
        "chat": vllm(question, temperature=0, max_tokens=40),
        "stream": list(vllm.stream(question, temperature=0, max_tokens=40)),
        "structured": [json.loads(model(question, Answer, **greedy)) for model in (vllm, openai)],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
