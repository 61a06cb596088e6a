"""Structured outputs without a server: a choice, a regular expression, a JSON schema.

    python examples/offline_structured_outputs.py --model /models/Qwen2.5-0.5B-Instruct

Without --model the small demo model is used; what it answers has the form, and little sense.
"""

import argparse
import json

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.structured_outputs import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["flag", "metric", "route"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
PROMPTS_AND_FORMS = [
    ("Is --block-size a flag or a metric? ", StructuredOutputsParams(choice=["flag", "metric"])),
    ("Write a date: ", StructuredOutputsParams(regex=r"20\d\d-(0[1-9]|1[0-2])-[0-2]\d")),
    ("Describe --block-size as JSON: ", StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="directory of a model")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()

    llm = LLM(model=args.model)
    prompts = [prompt for prompt, _ in PROMPTS_AND_FORMS]
    params = [
        SamplingParams(temperature=0, max_tokens=args.max_tokens, structured_outputs=form)
        for _, form in PROMPTS_AND_FORMS
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"Prompt: {prompt!r}\nOutput: {output.text}\n")
    if outputs[-1].finish_reason == "stop":
        print("As a dict:", json.loads(outputs[-1].text))


if __name__ == "__main__":
    main()
