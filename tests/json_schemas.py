"""JSON schemas whose values are all bounded, and how long a text of a schema can be.

A schema with a string, number or array of any length has no such length: at temperature 0 a weak model need not come
to its end.
"""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx

Schema = dict[str, Any]

_FLAG = {"type": "boolean"}
_DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
_WORD = {"type": "string", "maxLength": 3}
_KIND = {"type": "string", "enum": ["cat", "dog"]}
_OBJECT = {
    "type": "object",
    "properties": {"known": _FLAG, "kind": _KIND},
    "required": ["known", "kind"],
    "additionalProperties": False,
}

BOUNDED: dict[str, Schema] = {
    "boolean": _FLAG,
    "null": {"type": "null"},
    "integer": {"type": "integer", "minimum": -12, "maximum": 345},
    "string": {"type": "string", "minLength": 1, "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[a-c]{1,4}$"},
    "date": {"type": "string", "format": "date", "maxLength": 10},
    "enum": {"enum": ["left", "right", 12, None, True]},
    "const": {"const": "always"},
    "types": {"type": ["boolean", "null"]},
    "alternatives": {"anyOf": [_KIND, _DIGIT, {"type": "null"}]},
    "one of": {"oneOf": [_FLAG, {"type": "null"}]},
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "object": _OBJECT,
    "optional": {"type": "object", "properties": {"a": _FLAG, "b": _DIGIT}, "additionalProperties": False},
    "nested": {
        "type": "object",
        "properties": {"in": _OBJECT, "n": _DIGIT},
        "required": ["in", "n"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": _DIGIT, "minItems": 2, "maxItems": 4},
    "array of objects": {
        "type": "array",
        "maxItems": 2,
        "items": {
            "type": "object",
            "properties": {"word": _WORD},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
    "tuple": {"type": "array", "prefixItems": [_FLAG, _DIGIT], "items": False, "minItems": 2},
    "reference": {
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/Kind"}, "second": {"$ref": "#/$defs/Kind"}},
        "required": ["first", "second"],
        "additionalProperties": False,
        "$defs": {"Kind": _KIND},
    },
    # the sources' own, with limits on its numbers
    "character": {
        "title": "Character",
        "type": "object",
        "properties": {
            "name": {"title": "Name", "maxLength": 10, "type": "string"},
            "age": {"title": "Age", "type": "integer", "minimum": 0, "maximum": 120},
            "armor": {"$ref": "#/definitions/Armor"},
            "weapon": {"$ref": "#/definitions/Weapon"},
            "strength": {"title": "Strength", "type": "integer", "minimum": 0, "maximum": 100},
        },
        "required": ["name", "age", "armor", "weapon", "strength"],
        "additionalProperties": False,
        "definitions": {
            "Armor": {"enum": ["leather", "chainmail", "plate"], "type": "string"},
            "Weapon": {"enum": ["sword", "axe", "mace", "spear", "bow", "crossbow"], "type": "string"},
        },
    },
}
# field of a request with a schema → whitespace characters that may stand between two tokens of JSON
SPELLINGS = {"guided_json": 1, "response_format": 65}
# bytes of a string's character that is escaped
_ESCAPED = 6


def natural_length(schema: Schema, whitespace: int) -> int:
    """The bytes of the longest text of a schema.

    Args:
        schema: one of BOUNDED.
        whitespace: characters that may stand between two tokens of JSON.
    """
    num_bytes, num_tokens = _longest(schema, schema)
    return num_bytes + (num_tokens - 1) * whitespace


def _longest(part: Schema, schema: Schema) -> tuple[int, int]:
    """Bytes without whitespace, and tokens of JSON, of the longest value."""
    if "$ref" in part:
        _, keyword, name = part["$ref"].split("/")
        return _longest(schema[keyword][name], schema)
    if "enum" in part or "const" in part:
        return max(len(json.dumps(value)) for value in part.get("enum", [part.get("const")])), 1
    inner = part.get("anyOf") or part.get("oneOf") or []
    if isinstance(part.get("type"), list):
        inner = [{"type": name} for name in part["type"]]
    if inner:
        sizes = [_longest(one, schema) for one in inner]
        return max(size for size, _ in sizes), max(count for _, count in sizes)
    if part["type"] == "object":
        sizes = [_longest(one, schema) for one in part["properties"].values()]
        names = sum(len(json.dumps(name)) + len(":") for name in part["properties"])
        return _joined(sizes, names, 2)
    if part["type"] == "array":
        items = part.get("prefixItems") or [part["items"]] * part["maxItems"]
        return _joined([_longest(item, schema) for item in items], 0, 0)
    if part["type"] == "integer":
        return max(len(str(part["minimum"])), len(str(part["maximum"]))), 1
    if part["type"] == "string":
        return len('""') + _ESCAPED * part.get("maxLength", 4), 1
    return len("false"), 1


def _joined(sizes: list[tuple[int, int]], num_bytes: int, num_tokens: int) -> tuple[int, int]:
    """Values in brackets with commas, each with so many tokens more, all together with so many bytes more."""
    commas = max(len(sizes) - 1, 0)
    total = sum(size for size, _ in sizes) + commas + 2 + num_bytes
    return total, sum(count + num_tokens for _, count in sizes) + commas + 2


def complete_schemas(url: str, spelling: str, library: str) -> None:
    """Completes a text of each schema at temperature 0, and checks that it ends within its natural length.

    Args:
        url: of a server.
        spelling: one of SPELLINGS.
        library: that compiles the schemas.
    """

    def complete(client: httpx.Client, schema: Schema) -> dict[str, Any]:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {
            "prompt": "Hello",
            "temperature": 0,
            # a token has a byte at least; one more ends the text
            "max_tokens": natural_length(schema, SPELLINGS[spelling]) + 1,
            "guided_decoding_backend": library,
            spelling: form if spelling == "response_format" else schema,
        }
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, (schema, answer.text)
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    with (
        httpx.Client(base_url=url, timeout=120) as client,
        concurrent.futures.ThreadPoolExecutor(len(BOUNDED)) as pool,
    ):
        choices = pool.map(lambda schema: complete(client, schema), BOUNDED.values())
        for name, choice in zip(BOUNDED, choices, strict=True):
            assert choice["finish_reason"] == "stop", (name, choice["text"])
            json.loads(choice["text"])
