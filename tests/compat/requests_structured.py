"""Requests whose output is constrained by a schema, an expression, a choice or a grammar."""

from __future__ import annotations

from tests.compat.requests_common import Case, chat, completion

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
_GRAMMAR = 'root ::= "green" | "blue " ("sky" | "sea")'
_ASK = "Give me a person as JSON."
_SCHEMA = {"name": "person", "schema": _PERSON}

CASES: list[Case] = [
    chat("guided-json", _ASK, structured_outputs={"json": _PERSON}),
    chat("guided-json-stream", _ASK, structured_outputs={"json": _PERSON}, stream=True),
    chat("guided-json-array", "Give me a list of numbers as JSON.", structured_outputs={"json": _NUMBERS}),
    chat("guided-json-object", _ASK, structured_outputs={"json_object": True}),
    chat("guided-choice", "Pick a colour.", structured_outputs={"choice": ["red", "green", "blue"]}),
    chat("guided-choice-unlearned", "Pick a colour.", structured_outputs={"choice": ["gold", "grey"]}),
    chat("guided-regex", "Tell me a date.", structured_outputs={"regex": r"\d{4}-\d{2}-\d{2}"}),
    chat("guided-grammar", "Pick a colour.", structured_outputs={"grammar": _GRAMMAR}),
    chat("guided-cut", _ASK, structured_outputs={"json": _PERSON}, max_tokens=4),
    chat("guided-logprobs", "Pick a colour.", structured_outputs={"choice": ["green", "blue"]}, logprobs=True),
    chat("guided-stop", _ASK, structured_outputs={"json": _PERSON}, stop="age"),
    chat("guided-none", structured_outputs=None),
    chat("guided-n", "Pick a colour.", structured_outputs={"choice": ["red", "green"]}, temperature=1, top_k=1, n=2),
    chat("response-format-json-object", _ASK, response_format={"type": "json_object"}),
    chat("response-format-json-schema", _ASK, response_format={"type": "json_schema", "json_schema": _SCHEMA}),
    chat(
        "response-format-strict",
        _ASK,
        response_format={"type": "json_schema", "json_schema": {**_SCHEMA, "strict": True}},
    ),
    chat(
        "response-format-stream", _ASK, response_format={"type": "json_schema", "json_schema": _SCHEMA}, stream=True
    ),
    completion("guided-choice", "The capital of", structured_outputs={"choice": [" Italy", " France"]}),
    completion("guided-regex", "One two three", structured_outputs={"regex": " four( five)?( six)?"}),
    completion("guided-batch", ["The capital of", "One two"], structured_outputs={"choice": [" Italy", " three"]}),
    completion("guided-stream", "The capital of", structured_outputs={"choice": [" Italy", " France"]}, stream=True),
    completion("response-format-json-object", "Dear reader,", response_format={"type": "json_object"}, max_tokens=6),
    completion("response-format-text", response_format={"type": "text"}),
    # refused
    chat("guided-two-kinds", structured_outputs={"regex": "a", "choice": ["b"]}),
    chat("guided-no-kind", structured_outputs={}),
    chat("guided-regex-broken", structured_outputs={"regex": "("}),
    chat("guided-grammar-broken", structured_outputs={"grammar": "root ::= "}),
    chat("guided-choice-empty", structured_outputs={"choice": []}),
    chat("guided-json-broken", structured_outputs={"json": "{"}),
    chat("guided-json-wrong-type", structured_outputs={"json": {"type": "nonsense"}}),
    chat("guided-regex-broken-stream", structured_outputs={"regex": "("}, stream=True),
    chat("response-format-no-schema", response_format={"type": "json_schema"}),
    chat("response-format-xml", response_format={"type": "xml"}),
    completion("guided-regex-broken", structured_outputs={"regex": "("}),
]
