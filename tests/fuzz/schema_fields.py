"""Finds all paths of values in a request body by the body's JSON schema.

A schema that says nothing of a place (`dict[str, Any]`, `list[Any]`), or not what belongs together, is completed by
what such places really hold: `EXAMPLES`. A field that is in none of them is found all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
Path = tuple[str, ...]
Wrap = Callable[[Any], Any]

_JSON_SCHEMA = {
    "type": "object",
    "title": "t",
    "description": "d",
    "properties": {
        "a": {"type": "string", "minLength": 1, "maxLength": 3},
        "b": {"type": "string", "pattern": "^a+$"},
        "c": {"$ref": "#/$defs/d"},
        "e": {"anyOf": [{"enum": ["a", "b"]}, {"const": "c"}]},
        "f": {"type": "integer", "minimum": 0, "maximum": 9},
        "g": {"type": "string", "format": "date"},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}},
}
_SMALL_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_OTHER_SCHEMAS = [
    {"type": "object", "patternProperties": {"^b": {"type": "integer", "multipleOf": 3}}},
    {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "null"}},
    {"allOf": [{"type": "string"}, {"minLength": 2}]},
]
_FUNCTION = {"name": "f", "description": "d", "parameters": _SMALL_SCHEMA}
_CHOSEN = {"type": "function", "function": {"name": "f"}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TAG = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"type": "object"}}, "end": "</f>"}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}

# what places hold whose schema does not say it, by the end of their path: several examples are alternatives
EXAMPLES: dict[Path, list[Any]] = {
    ("tools", "[]"): [{"type": "function", "function": _FUNCTION}],
    ("/v1/responses", "tools", "[]"): [{"type": "function", **_FUNCTION}],
    ("tool_choice",): [_CHOSEN],
    ("/v1/responses", "tool_choice"): [
        {"type": "function", "name": "f"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    ],
    ("tool_choice", "tools", "[]"): [{"type": "function", "name": "f"}],
    ("messages",): [],
    ("messages", "[]"): [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "a", "reasoning_content": "r", "tool_calls": [_CALL]},
        {"role": "tool", "content": "a", "tool_call_id": "c", "name": "f"},
    ],
    ("/v1/chat/completions/batch", "messages", "[]"): [],
    ("messages", "[]", "[]"): [{"role": "user", "content": "a"}],
    ("content", "[]"): [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "a"}, _IMAGE],
    ("input", "[]"): [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "developer", "content": "a"},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
    ],
    # a list of texts is a list of texts
    ("/v1/embeddings", "input", "[]"): [],
    ("/pooling", "input", "[]"): [],
    ("/classify", "input", "[]"): [],
    ("guided_json",): [_JSON_SCHEMA, *_OTHER_SCHEMAS],
    ("json",): [_SMALL_SCHEMA],
    ("schema",): [_SMALL_SCHEMA],
    ("input_schema",): [_SMALL_SCHEMA],
    ("text", "format"): [{"type": "json_schema", "name": "s", "schema": _SMALL_SCHEMA}],
    ("structured_outputs",): [
        {"json": _SMALL_SCHEMA, "disable_any_whitespace": True},
        {"regex": "a"},
        {"choice": ["a"]},
        {"grammar": 'root ::= "a"'},
    ],
    ("response_format",): [
        {"type": "json_schema", "json_schema": {"name": "s", "schema": _SMALL_SCHEMA}},
        {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<"]},
        {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": [_TAG]}},
    ],
    ("chat_template_kwargs",): [{"a": "b"}],
    ("/v1/chat/completions", "documents", "[]"): [{"title": "t", "text": "a"}],
    ("metadata",): [{"a": "b"}],
    ("stream_options",): [{"include_usage": True}],
}
# Anthropic's form of some of them
for _endpoint in ("/v1/messages", "/v1/messages/count_tokens"):
    EXAMPLES |= {
        (_endpoint, "messages", "[]"): [{"role": "assistant", "content": "a"}],
        (_endpoint, "messages", "[]", "content", "[]"): [
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}},
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]},
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "image", "source": _SOURCE},
        ],
        (_endpoint, "messages", "[]", "content", "[]", "content", "[]"): [{"type": "text", "text": "a"}],
        (_endpoint, "system", "[]"): [{"type": "text", "text": "a"}],
        (_endpoint, "tools", "[]"): [{"name": "f", "input_schema": _SMALL_SCHEMA}],
        (_endpoint, "tool_choice"): [{"type": "tool", "name": "f"}],
    }


def schema_of(example: Any) -> Schema:
    """A schema of values like an example, which it has as their default; all that the example has is required."""
    if isinstance(example, dict):
        properties = {name: schema_of(value) for name, value in example.items()}
        return {"type": "object", "properties": properties, "required": list(properties)}
    if isinstance(example, list):
        return {"type": "array", "items": schema_of(example[0]) if example else {}, "default": example}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return {"type": kinds[type(example)], "default": example}


@dataclasses.dataclass(frozen=True)
class Field:
    """A place in a body.

    Attributes:
        path: the endpoint, and names on the way to it; "[]" is an element of a list, "*" a value of an object whose
            keys are free.
        kind: JSON type of what belongs there; "any": the schema does not say.
        schema: of what belongs there.
        wrap: the body's fields with a value at this place.
        walk: of the body's schema.
    """

    path: Path
    kind: str
    schema: Schema
    wrap: Wrap = dataclasses.field(compare=False, repr=False)
    walk: Walk = dataclasses.field(compare=False, repr=False)

    @property
    def name(self) -> str:
        """For people, and for seeds."""
        return f"{'.'.join(self.path)}:{self.kind}"


class Walk:
    """One body's schema.

    Args:
        definitions: what references of the schema name, by their last part.
        deepest: how often a schema may lie within itself.
    """

    def __init__(self, definitions: dict[str, Schema], deepest: int = 2) -> None:
        self._definitions = definitions
        self._deepest = deepest

    def fields(self, schema: Schema, endpoint: str) -> list[Field]:
        """Every place of a body with this schema, each once.

        Args:
            schema: of the body.
            endpoint: where bodies like this go; the paths begin with it.
        """
        (body,) = self._alternatives(schema, (endpoint,))
        found: dict[str, Field] = {}
        for name, value in body.get("properties", {}).items():
            for field in self._below(value, (endpoint, name), _into(dict, {}, name), ()):
                found.setdefault(field.name, field)
        return list(found.values())

    def smallest(self, schema: Schema, path: Path) -> Any:
        """A small value that fits a place."""
        (first, *_) = self._alternatives(schema, path) or [{}]
        for keyword in ("const", "default"):
            if first.get(keyword) is not None:
                return first[keyword]
        if first.get("enum"):
            return first["enum"][0]
        if first.get("type") == "object":
            properties = first.get("properties", {})
            names = [name for name in first.get("required", []) if name in properties]
            return {name: self.smallest(properties[name], (*path, name)) for name in names}
        simple = {"string": "a", "boolean": False, "array": [], "null": None}
        return simple.get(first.get("type", ""), first.get("minimum", 1))

    def _below(self, schema: Schema, path: Path, wrap: Wrap, inside: tuple[str, ...]) -> Iterator[Field]:
        for one in self._alternatives(schema, path):
            yield Field(path, one.get("type", "any"), one, wrap, self)
            within = (*inside, one["x-reference"]) if "x-reference" in one else inside
            if within.count(one.get("x-reference", "")) > self._deepest:
                continue
            whole = self.smallest(one, ()) if one.get("properties") else {}
            for name, value in one.get("properties", {}).items():
                yield from self._below(value, (*path, name), _into(wrap, whole, name), within)
            if isinstance(one.get("items"), dict):
                yield from self._below(one["items"], (*path, "[]"), lambda value: wrap([value]), within)
            if isinstance(one.get("additionalProperties"), dict):
                yield from self._below(
                    one["additionalProperties"], (*path, "*"), lambda value: wrap({"5": value}), within
                )

    def _alternatives(self, schema: Schema, path: Path) -> list[Schema]:
        """The schemas of which a value must fit one, without references and unions; null is left out."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return [
                {**one, "x-reference": schema["$ref"]} for one in self._alternatives(self._definitions[name], path)
            ]
        unions = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if unions:
            return [one for union in unions for one in self._alternatives(union, path)]
        if schema.get("type") == "null":
            return []
        # examples first: what stands beside a place in them makes sense of it
        return [*(schema_of(example) for example in self._examples(path)), schema]

    @staticmethod
    def _examples(path: Path) -> list[Any]:
        for length in range(len(path), 0, -1):
            if path[-length:] in EXAMPLES:
                return EXAMPLES[path[-length:]]
        return []


def _into(wrap: Wrap, parent: Any, name: str) -> Wrap:
    return lambda value: wrap({**(parent if isinstance(parent, dict) else {}), name: value})
