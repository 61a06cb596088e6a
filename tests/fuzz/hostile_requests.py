"""Malformed and extreme requests, drawn at random and reproducible by their seed.

Half of them are a valid request with one to three of its values replaced by hostile ones, so that they get
far; the others are broken as JSON or as HTTP.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

MESSAGES = [{"role": "user", "content": "one two"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["x"],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 0,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "stop_token_ids": [3],
    "logit_bias": {"5": 1.0},
    "n": 1,
    "best_of": 1,
    "use_beam_search": False,
    "prompt_logprobs": 1,
    "bad_words": ["one"],
    "priority": 0,
    "truncate_prompt_tokens": 8,
    "cache_salt": "s",
    "request_id": "r",
    "guided_json": {"type": "object"},
    "guided_regex": "[a-z]+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "structured_outputs": {"regex": "a"},
    "response_format": {"type": "json_object"},
    "user": "me",
}

# path → what a small request may hold; the first names are those that are always there
ENDPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/completions": (
        {"prompt": "one two", "max_tokens": 2},
        {**SAMPLING, "logprobs": 1, "echo": True, "suffix": "", "allowed_token_ids": [5, 6], "model": "tiny"},
    ),
    "/v1/chat/completions": (
        {"messages": MESSAGES, "max_tokens": 2},
        {
            **SAMPLING,
            "logprobs": True,
            "top_logprobs": 1,
            "tools": [TOOL],
            "tool_choice": "auto",
            "chat_template_kwargs": {},
            "add_generation_prompt": True,
            "continue_final_message": False,
            "documents": [],
            "max_completion_tokens": 2,
        },
    ),
    "/v1/responses": (
        {"input": "one", "max_output_tokens": 2},
        {
            "instructions": "be",
            "temperature": 0.1,
            "top_p": 0.5,
            "tools": [],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "metadata": {},
            "previous_response_id": "resp_1",
            "store": True,
            "background": False,
            "truncation": "disabled",
            "include": [],
        },
    ),
    "/v1/messages": (
        {"messages": MESSAGES, "max_tokens": 2, "model": "tiny"},
        {"system": "be", "temperature": 0.1, "top_k": 1, "stop_sequences": ["x"], "tools": [], "metadata": {}},
    ),
    "/v1/messages/count_tokens": ({"messages": MESSAGES, "model": "tiny"}, {"system": "be", "tools": []}),
    "/tokenize": ({"prompt": "one two"}, {"add_special_tokens": True, "return_token_strs": True, "model": "tiny"}),
    "/detokenize": ({"tokens": [5, 6]}, {"model": "tiny"}),
    "/invocations": ({"prompt": "one", "max_tokens": 1}, {"messages": MESSAGES}),
}
POOLING_ENDPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/embeddings": ({"input": "one"}, {"encoding_format": "float", "dimensions": 3, "model": "tiny"}),
    "/score": ({"text_1": "a", "text_2": ["b"]}, {"model": "tiny"}),
    "/rerank": ({"query": "a", "documents": ["b"]}, {"top_n": 1}),
    "/classify": ({"input": "a"}, {}),
    "/pooling": ({"input": "a"}, {}),
    "/tokenize": ENDPOINTS["/tokenize"],
}
GENERATE_ENDPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/generate": (
        {"prompt": "one two", "max_tokens": 2},
        {name: value for name, value in SAMPLING.items() if not name.startswith(("guided", "response", "user"))},
    )
}

_TEXTS = [
    "",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\u202e\u200f\ufeff",
    "e" + "\u0301" * 500,
    "👩‍👩‍👧‍👦" * 50,
    "\uffff\ufffe",
    "${jndi:ldap://x}",
    "{{ 7*7 }}{% for i in range(10**9) %}{% endfor %}",
    "../../etc/passwd",
    "%s%n%x",
    "<|im_start|><|endoftext|></s>",
    "a" * 5000,
    "'; DROP TABLE x; --",
    "NaN",
    "(" * 200,
    "(a+)+$",
    "[a-z]{1,99999}",
    "\\",
    "\r\n\r\nGET / HTTP/1.1\r\n",
    "data:image/png;base64,AAAA",
    "file:///etc/passwd",
    "http://127.0.0.1:1/x",
]
_NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
]


@dataclasses.dataclass(frozen=True)
class HostileRequest:
    """One request as it goes over the wire.

    Attributes:
        head: method, path and headers up to the empty line.
        body: the body.
        cut_short: the client leaves after a part of the answer.
    """

    head: bytes
    body: bytes
    cut_short: bool = False

    @property
    def wire(self) -> bytes:
        """All bytes of the request."""
        return self.head + self.body


def _nest(rng: random.Random) -> Any:
    value: Any = rng.choice([1, "x", None])
    for _ in range(rng.choice([3, 30, 300])):
        value = [value] if rng.random() < 0.5 else {rng.choice(["type", "$ref", "a", "properties"]): value}
    return value


def _schema(rng: random.Random) -> Any:
    """A JSON schema that is odd in one way or another."""
    return rng.choice(
        [
            {"type": "nothing"},
            {"$ref": "#/definitions/missing"},
            {"$ref": "#"},
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            {"type": "string", "pattern": "("},
            {"type": "string", "minLength": 10**9},
            {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
            {"type": "integer", "minimum": 10, "maximum": 1},
            {"enum": []},
            {"enum": [_nest(rng)]},
            {"anyOf": [{"type": "string"}] * 50},
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            {"type": ["string", "null"], "format": "zzz"},
            {"not": {}},
            {"type": "object", "additionalProperties": {"type": "object", "patternProperties": {"[": {}}}},
        ]
    )


def hostile_value(rng: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can hold, and some that it cannot."""
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(_NUMBERS),
        lambda: rng.choice(_TEXTS),
        lambda: str(rng.choice(_NUMBERS)),
        list,
        dict,
        lambda: _schema(rng),
        lambda: json.dumps(_schema(rng)),
        lambda: _nest(rng),
        lambda: [rng.choice(_NUMBERS) for _ in range(rng.randrange(1, 40))],
        lambda: [rng.choice(_TEXTS) for _ in range(rng.randrange(1, 4))],
        lambda: "".join(chr(rng.choice([rng.randrange(1, 0xD800), rng.randrange(0x10FFFF)])) for _ in range(20)),
    ]
    if depth < 2:
        kinds.append(lambda: [hostile_value(rng, depth + 1) for _ in range(rng.randrange(4))])
        kinds.append(lambda: {rng.choice(_TEXTS): hostile_value(rng, depth + 1) for _ in range(rng.randrange(4))})
        kinds.append(
            lambda: [
                {"role": rng.choice(["user", "tool", "", None, 5]), "content": hostile_value(rng, depth + 1)}
                for _ in range(rng.randrange(3))
            ]
        )
    return rng.choice(kinds)()


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value has parts."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places = [path] if path else []
    for key, child in children:
        places.extend(_places(child, (*path, key)))
    return places


def _replace(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def _mutated(rng: random.Random, needed: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
    names = rng.sample(sorted(optional), min(len(optional), rng.randrange(4)))
    # a copy, for parts of it are replaced
    body: dict[str, Any] = json.loads(json.dumps({**needed, **{name: optional[name] for name in names}}))
    body["stream"] = rng.random() < 0.3
    for _ in range(rng.randrange(0, 4)):
        action = rng.random()
        if action < 0.1 and body:
            del body[rng.choice(sorted(body))]
        elif action < 0.2:
            body[rng.choice(_TEXTS)[:40]] = hostile_value(rng)
        else:
            _replace(body, rng.choice(_places(body) or [("prompt",)]), hostile_value(rng))
    return body


def _broken_json(rng: random.Random, text: bytes) -> bytes:
    kind = rng.randrange(8)
    if kind == 0:
        return text[: rng.randrange(len(text))]
    if kind == 1:
        at = rng.randrange(len(text))
        return text[:at] + bytes([rng.randrange(256)]) + text[at + 1 :]
    if kind == 2:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    if kind == 3:
        return rng.choice([b"[", b'{"a":']) * rng.choice([10, 1000, 50_000])
    if kind == 4:
        return text + text
    if kind == 5:
        return rng.choice([b"", b"null", b"[]", b'"x"', b"1e999", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"true"])
    if kind == 6:
        return b'{"prompt":' + b"9" * rng.choice([100, 5000]) + b"}"
    return text[:-1] + b',"prompt":"again","max_tokens":1}'


def _head(rng: random.Random, path: str, body: bytes) -> bytes:
    method = "POST" if rng.random() < 0.97 else rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
    content_type = "application/json"
    if rng.random() < 0.03:
        content_type = rng.choice(["text/plain", "", "application/json; charset=utf-16", "multipart/form-data", "/"])
    extra = ""
    if rng.random() < 0.03:
        extra = rng.choice(
            [
                "X-Request-Id: " + "z" * 300 + "\r\n",
                "Authorization: Bearer\r\n",
                "X-Request-Id: \xe9\xff\r\n",
                "Accept: \r\n",
                "Traceparent: 00-zz\r\n",
                "Origin: null\r\n",
            ]
        )
    if rng.random() < 0.02:
        path = rng.choice([path + "/", path + "?x=%00%ff", "/nowhere", path.upper(), path + "?stream=1&a[]=%"])
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{extra}\r\n"
    ).encode("latin-1")


def hostile_request(seed: int, endpoints: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> HostileRequest:
    """The request of a seed.

    Example::

        hostile_request(17, ENDPOINTS).wire
    """
    rng = random.Random(seed)
    path = rng.choice(sorted(endpoints))
    body = _mutated(rng, *endpoints[path])
    # "surrogatepass": half of a surrogate pair goes out as the bytes that it would have, which are not UTF-8
    ascii_only = rng.random() < 0.7
    text = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        text = _broken_json(rng, text)
    return HostileRequest(_head(rng, path, text), text, cut_short=rng.random() < 0.01)
