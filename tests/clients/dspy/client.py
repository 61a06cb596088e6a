"""DSPy: a prompt, and a signature that a JSON schema holds to its types."""

import json
import sys
from typing import Any, Literal

import dspy


class Answer(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    word: Literal["yes", "no"] = dspy.OutputField()
    sure: bool = dspy.OutputField()


SCHEMA = {
    "type": "object",
    "properties": {"word": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["word", "sure"],
    "additionalProperties": False,
}


def main(server: str, _: str, question: str) -> dict[str, Any]:
    """Everything once."""
    where: dict[str, Any] = {"api_base": f"{server}/v1", "api_key": "none", "cache": False, "temperature": 0}
    # DSPy asks models that it does not know for JSON in words only
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    strict = dspy.LM("openai/demo", max_tokens=400, response_format=schema, **where)
    dspy.configure(lm=strict, adapter=dspy.JSONAdapter())
    found = dspy.Predict(Answer)(question=question)
    return {
        "chat": dspy.LM("openai/demo", max_tokens=40, **where)(question)[0],
        "structured": [{"word": found.word, "sure": found.sure}],
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
