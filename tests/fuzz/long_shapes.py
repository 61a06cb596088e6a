"""Values that are long, deep, repeated or costly, by what a field takes, and the requests that carry them."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import re
import secrets
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.fuzz.hostile_requests import HostileRequest
from tests.fuzz.schema_fields import Field, Walk

# stands for raw JSON in a body until it is text: no value of its own would be as deep as some of them
_MARK = "@" + secrets.token_hex(8) + "@"


@dataclasses.dataclass(frozen=True)
class Raw:
    """JSON as text."""

    text: str


def _nested(opening: str, closing: str) -> Callable[[int], Raw]:
    return lambda size: Raw(opening * size + "1" + closing * size)


def _words(size: int) -> str:
    return " ".join(f"w{number:x}" for number in range(size // 5))


def _repeats(size: int) -> str:
    """A regular expression whose repetitions multiply."""
    return "(" * 4 + "[a-z]" + f"{{1,{size}}})" * 4


def _lark(size: int) -> str:
    return f"start: a{{{size}}}\na: b{{{size}}}\nb: /x{{{size}}}/{{{size}}}\n"


def _gbnf(size: int) -> str:
    return f'root ::= a{{{size}}}\na ::= b{{{size}}}\nb ::= "x"{{{size}}}\n'


def _schema_text(size: int) -> str:
    item: dict[str, Any] = {"type": "string", "minLength": size}
    for _ in range(3):
        item = {"type": "array", "minItems": size, "items": item}
    return json.dumps(item)


Make = Callable[[int], Any]
# size → a text; how much of the size is letters differs
TEXTS: dict[str, Make] = {
    "letters": lambda size: "a" * size,
    "words": _words,
    "wide": lambda size: "\U0001f600" * (size // 4),
    "accents": lambda size: "e" + "\u0301" * (size // 2),
    "spaces": lambda size: " \n" * (size // 2),
    "digits": lambda size: "9" * size,
    "brackets": lambda size: "[" * size,
    "json": lambda size: '{"a":' * (size // 5) + "1" + "}" * (size // 5),
    "special tokens": lambda size: "<|im_start|>" * (size // 12),
    "tool calls": lambda size: '<tool_call>\n{"name": "f", "arguments": {' * (size // 40),
    "almost": lambda size: ("a" * 99 + "b") * (size // 100),
    "quantifiers": lambda size: "a?" * (size // 2),
    "groups": lambda size: "(a|" * (size // 4) + "b" + ")*" * (size // 4),
    "alternatives": lambda size: "|".join(_words(size).split()),
    "repeats": _repeats,
    "lark": _lark,
    "gbnf": _gbnf,
    "schema": _schema_text,
    "template": lambda size: "{{ messages }}" * (size // 14),
}
NUMBERS: dict[str, Make] = {
    "size": lambda size: size,
    "negative": lambda size: -size,
    "32 bits": lambda _: 2**31,
    "63 bits": lambda _: 2**63 - 1,
    "many digits": lambda size: Raw("9" * min(size, 4000)),
    "exponent": lambda _: Raw("1e308"),
}
# what belongs nowhere, or anywhere
OTHERS: dict[str, Make] = {
    "deep lists": _nested("[", "]"),
    "deep objects": _nested('{"a":', "}"),
    "deep schema": _nested('{"type":"array","items":', "}"),
    "shallow lists": lambda size: [[1]] * (size // 4),
    "bad ids": lambda size: [10**9] * (size // 10),
    "negative ids": lambda size: [-1] * (size // 3),
    "ids": lambda size: [number % 300 for number in range(size // 4)],
    "texts": lambda size: _words(size).split(),
    "same texts": lambda size: ["ab"] * (size // 5),
    "long texts": lambda size: ["ab" * (size // 20)] * 10,
    "keys": lambda size: dict.fromkeys(_words(size // 2).split(), 1),
    "numbered keys": lambda size: {str(number % 300): 1 for number in range(size // 8)},
    "same keys": lambda size: Raw("{" + '"a":1,' * (size // 6) + '"a":1}'),
    "long key": lambda size: {"a" * size: 1},
    "references": lambda size: {
        "$ref": "#/$defs/0",
        "$defs": {
            str(number): {"type": "array", "items": {"$ref": f"#/$defs/{number + 1}"}, "minItems": 9}
            for number in range(min(size // 60, 300))
        },
    },
}
# characters of values that every handler should get, and of those that it should survive
SMALL, SIZE = 40, 100_000


def _many(field: Field, size: int, *, different: bool) -> Any:
    """A list of what its field takes, or an object of it."""
    inner = field.schema.get("items" if field.kind == "array" else "additionalProperties")
    step = "[]" if field.kind == "array" else "*"
    one = field.walk.smallest(inner, (*field.path, step)) if isinstance(inner, dict) else "a"
    count = max(1, size // (len(json.dumps(one)) + 1))
    values = [_numbered(one, number) if different else one for number in range(count)]
    return values if field.kind == "array" else {str(number % 300): value for number, value in enumerate(values)}


# fields that take some words, or some form, only
_FIXED = frozenset({"type", "role", "arguments"})


def _numbered(value: Any, number: int) -> Any:
    """A value like it that is another one for every number."""
    if isinstance(value, str):
        return f"{value}{number:x}"
    if isinstance(value, int) and not isinstance(value, bool):
        return number % 300
    if isinstance(value, dict):
        return {name: inner if name in _FIXED else _numbered(inner, number) for name, inner in value.items()}
    return value


def shapes_of(field: Field) -> dict[str, Make]:
    """What is put in a place: what fits there, and what fits nowhere."""
    fitting: dict[str, Make] = {}
    if field.kind in ("string", "any"):
        fitting |= TEXTS
    if field.kind in ("integer", "number", "any"):
        fitting |= NUMBERS
    if field.kind in ("array", "object"):
        fitting |= {
            "many": lambda size: _many(field, size, different=False),
            "many different": lambda size: _many(field, size, different=True),
        }
    others = {name: make for name, make in OTHERS.items() if name not in fitting}
    if field.kind not in ("string", "any"):
        others["text"] = TEXTS["letters"]
    return fitting | others


def small_shape(field: Field) -> Any:
    """A value that fits and is longer than one: a handler should get it."""
    if field.kind == "string" and "enum" not in field.schema and "const" not in field.schema:
        return _words(SMALL)
    if field.kind == "array" or (field.kind == "object" and "properties" not in field.schema):
        return _many(field, SMALL, different=True)
    return field.walk.smallest(field.schema, ())


# what a field of any endpoint, or of one, has no meaning without, or not beside
COMPANIONS: dict[str | tuple[str, str], dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [{"type": "function", "name": "f", "function": {"name": "f"}}]},
    ("/v1/messages", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("/v1/messages/count_tokens", "tool_choice"): {"tools": [{"name": "f", "input_schema": {}}]},
    ("/tokenize", "prompt"): {"messages": None},
    **{(path, "messages"): {"input": None} for path in ("/v1/embeddings", "/pooling", "/classify")},
}


@dataclasses.dataclass(frozen=True)
class LongRequest:
    """A request with one costly value.

    Attributes:
        field: the place; its path begins with the endpoint.
        shape: of the value.
        make: the request.
    """

    field: Field
    shape: str
    make: Callable[[], HostileRequest] = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """Endpoint, place and shape."""
        return f"{self.field.name} {self.shape}"


def to_json(body: dict[str, Any]) -> bytes:
    """A body that may hold `Raw`."""
    found: list[str] = []

    def mark(value: Any) -> Any:
        assert isinstance(value, Raw)
        found.append(value.text)
        return _MARK

    text = json.dumps(body, default=mark)
    for raw in found:
        text = text.replace(f'"{_MARK}"', raw, 1)
    return text.encode()


def post_request(path: str, body: bytes) -> HostileRequest:
    """A POST of JSON."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return HostileRequest(head.encode(), body)


def address_requests(path: str, method: str, names: Iterable[str]) -> Iterator[LongRequest]:
    """Long texts in what an address has of a route.

    Args:
        path: with its parameters in braces.
        method: GET or POST.
        names: fields of the query.
    """
    for shape, make in TEXTS.items():
        text = urllib.parse.quote(make(SIZE // 10))
        whole = re.sub(r"{\w+}", text, path)
        short = re.sub(r"{\w+}", "a", path)
        for name, address in [("", whole), *((name, f"{short}?{name}={text}") for name in names)]:
            head = f"{method} {address} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
            field = Field((path, name), "string", {}, dict, Walk({}))
            yield LongRequest(field, shape, functools.partial(HostileRequest, head, b""))


def requests_of(field: Field, base: dict[str, Any], size: int | None = None) -> Iterator[LongRequest]:
    """For a place a small value that fits, and costly ones.

    Args:
        field: the place.
        base: a valid small body, of which what the place belongs to is replaced.
        size: characters of the costly values, of every shape there is; None: of one shape, which the field's name
            decides, of 100,000 characters.
    """
    endpoint, name, *_ = field.path
    beside = COMPANIONS.get((endpoint, name)) or COMPANIONS.get(name, {})

    def request(shape: str, make: Callable[[], Any]) -> LongRequest:
        def build() -> HostileRequest:
            return post_request(endpoint, to_json(base | beside | field.wrap(make())))

        return LongRequest(field, shape, build)

    yield request("small", lambda: small_shape(field))
    shapes = shapes_of(field)
    if size is None:
        chosen = random.Random(zlib.crc32(field.name.encode())).choice(sorted(shapes))
        yield request(chosen, lambda: shapes[chosen](SIZE))
    else:
        for shape, make in shapes.items():
            yield request(shape, functools.partial(make, size))
