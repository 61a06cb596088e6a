"""The attacks: requests that are long, deep, many or never read, by name.

Every row is one client that sends one attack. Its requests are made before it starts and cost it little, so
that delays of other clients come from the server.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from fairness.wire import MODEL, get, post, post_bytes

Make = Callable[[], list[bytes]]

# names of setups
GENERATE, POOLING, PLAIN = "generate", "pooling", "plain"


@dataclasses.dataclass(frozen=True)
class Attack:
    """One row.

    Attributes:
        name: on the command line.
        make: the requests, which are sent in turn, again and again.
        clients: number of simultaneous connections.
        how: "ask" reads each answer before the next request; "leave" disconnects after an answer's first bytes;
            "unread" sends requests without reading answers; "slow" reads a few bytes per second;
            "idle" sends its bytes and waits.
        setup: on which server.
        times: number of requests of all clients together; 0: unlimited.
        leaves_work: the server goes on working on its requests for minutes afterwards.
    """

    name: str
    make: Make
    clients: int = 4
    how: str = "ask"
    setup: str = GENERATE
    times: int = 0
    leaves_work: bool = False


def completion(**fields: Any) -> bytes:
    """A small completion with further fields."""
    return post("/v1/completions", {"model": MODEL, "prompt": "one two", "max_tokens": 4, **fields})


def chat(*messages: Any, **fields: Any) -> bytes:
    """A small chat with further fields."""
    said = list(messages) or [{"role": "user", "content": "one two"}]
    return post("/v1/chat/completions", {"model": MODEL, "messages": said, "max_tokens": 4, **fields})


def response(**fields: Any) -> bytes:
    """A small response with further fields."""
    return post("/v1/responses", {"model": MODEL, "input": "one two", "max_output_tokens": 4, **fields})


def words(count: int) -> list[str]:
    """`count` different words of a few letters."""
    return [f"w{number:x}" for number in range(count)]


def nested_json(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    """Nested JSON as text, too deep for Python's encoder."""
    return opening * depth + "1" + closing * depth


def _each(texts: Iterator[str] | list[str], *fields: str) -> list[bytes]:
    """Completions with each text in each field; dots separate the names of nested fields."""
    found = []
    for text, field in itertools.product(texts, fields):
        outer, _, inner = field.partition(".")
        found.append(completion(**{outer: {inner: text} if inner else text}))
    return found


# ---- grammars: each text is new, so that none is cached -----------------------------------------------------------


def _lark_repeats() -> list[bytes]:
    texts = [
        f"start: a{{{count}}}\na: b{{{count}}}\nb: /x{{{count}}}/{{{count}}}\n"
        for count in (*range(1000, 1020), 100, 9)
    ]
    return _each(texts, "guided_grammar", "structured_outputs.grammar")


def _gbnf_repeats() -> list[bytes]:
    texts = [
        f"root ::= a{{{count}}}\na ::= b{{{count}}}\nb ::= [x-z]{{1,{count}}}\n" for count in (*range(1000, 1020), 99)
    ]
    return _each(texts, "guided_grammar", "structured_outputs.grammar")


def _gbnf_rules() -> list[bytes]:
    """Thousands of rules, each of which may be empty and begins with the next, and one very long alternative."""
    chain = "root ::= r0\n" + "".join(f'r{number} ::= r{number + 1}? "a"*\n' for number in range(20_000))
    choice = "root ::= " + " | ".join(f'"{word}"' for word in words(100_000))
    return _each([chain + 'r20000 ::= "b"\n', choice], "guided_grammar")


def _regex_repeats() -> list[bytes]:
    texts = []
    for count in range(1000, 1010):
        texts += [
            f"((a{{{count}}}){{{count}}}){{{count}}}",
            f"(((a|ab|b){{1,{count}}}){{1,{count}}}c?){{1,{count}}}",
            f"([a-z]?){{{count}}}[a-z]{{{count}}}",
            f"(.*a.{{{count // 50}}}b)*{count}",
            "(" * 300 + "a" + "){0,9}" * 300 + str(count),
            f"\\p{{L}}{{1,{count}}}(\\w|\\d|[^\\x00-\\x7f]){{1,{count}}}",
        ]
    texts += ["|".join(words(50_000)), "a?" * 50_000, "[" + "".join(map(chr, range(0x4E00, 0x9FFF))) + "]{500}"]
    return _each(texts, "guided_regex", "structured_outputs.regex")


def _whitespace_repeats() -> list[bytes]:
    patterns = [rf"[\n ]{{0,{count}}}" for count in (1000, 10_000, 100_000)] + ["(( ?){99}){99}" * 9]
    schema = {"type": "object", "properties": {word: {"type": "integer"} for word in words(50)}}
    return [completion(guided_json=schema, guided_whitespace_pattern=pattern) for pattern in patterns]


def _schema_repeats() -> list[bytes]:
    schemas: list[Any] = []
    for count in range(1000, 1005):
        item: dict[str, Any] = {"type": "string", "minLength": count, "maxLength": count * 1000}
        for _ in range(4):
            item = {"type": "array", "minItems": count, "maxItems": count * 10, "items": item}
        schemas += [
            item,
            {"type": "string", "minLength": count * 1000},
            {"type": "string", "pattern": f"^((a{{{count}}}){{{count}}}){{{count}}}$"},
            {"type": "integer", "minimum": -(10**count), "maximum": 10**count + 1},
            {"type": "object", "minProperties": count, "maxProperties": count * 100, "additionalProperties": item},
        ]
    return _with_schemas(schemas)


def _schema_references() -> list[bytes]:
    """Definitions that each refer to the next one several times: short, but exponential when expanded."""
    definitions = {
        f"d{number}": {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/d{number + 1}"} for name in "abcdefgh"},
            "required": list("abcdefgh"),
        }
        for number in range(40)
    }
    definitions["d40"] = {"type": "string"}
    same = {"anyOf": [{"$ref": "#/$defs/d1"}] * 5000, "$defs": definitions}
    every = {"allOf": [{"$ref": f"#/$defs/d{number}"} for number in range(40)], "$defs": definitions}
    return _with_schemas([{"$ref": "#/$defs/d0", "$defs": definitions}, same, every])


def _schema_properties() -> list[bytes]:
    properties = {word: {"type": "string"} for word in words(20_000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return _with_schemas([schema, schema | {"required": list(properties)}])


def _schema_values() -> list[bytes]:
    return _with_schemas([{"enum": words(200_000)}, {"const": "x" * 2_000_000}, {"anyOf": [{"const": 1}] * 50_000}])


def _with_schemas(schemas: list[Any]) -> list[bytes]:
    """Completions with each schema in each field for schemas."""
    found = []
    for schema in schemas:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        found += [
            completion(guided_json=schema),
            completion(structured_outputs={"json": json.dumps(schema)}),
            chat(response_format=form),
            chat(tools=[tool], tool_choice="required"),
            response(text={"format": {"type": "json_schema", "name": "s", "schema": schema}}),
        ]
    return found


def _schema_depth() -> list[bytes]:
    """Schemas as deep as the server accepts, and far deeper."""
    found = []
    for depth in (100, 400, 900, 100_000):
        text = nested_json(depth, '{"type":"array","items":', "}").replace("1", '{"type":"null"}', 1)
        body = f'{{"model":"{MODEL}","prompt":"a","max_tokens":4,"guided_json":{text}}}'
        found.append(post_bytes("/v1/completions", body.encode()))
    return found


def _choices() -> list[bytes]:
    long = ["x" * 1_000_000 + word for word in "ab"]
    similar = ["x" * 2000 + word for word in words(2000)]
    return [completion(guided_choice=choices) for choices in (words(200_000), long, similar)]


def _structural_tags() -> list[bytes]:
    tags = [
        {"type": "tag", "begin": f"<{word}>", "content": {"type": "any_text"}, "end": f"</{word}>"}
        for word in words(20_000)
    ]
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}}
    old = [{"begin": f"<{word}>", "schema": {"type": "object"}, "end": "</>"} for word in words(20_000)]
    return [
        chat(response_format=tag),
        chat(response_format={"type": "structural_tag", "structures": old, "triggers": ["<"]}),
    ]


# ---- many sequences, much text, many ids -------------------------------------------------------------------------


def _tokenize(prompt: str, **fields: Any) -> list[bytes]:
    return [post("/tokenize", {"model": MODEL, "prompt": prompt, **fields})]


def _long_prompts(**fields: Any) -> list[bytes]:
    text = "some word " * 400_000
    said = {"role": "user", "content": text}
    return [completion(prompt=text, **fields), completion(prompt="ab" * 2_000_000, **fields), chat(said, **fields)]


def _bad_ids() -> list[bytes]:
    return [
        completion(**{field: ids})
        for field in ("prompt", "stop_token_ids", "allowed_token_ids")
        for ids in ([-1] * 1_000_000, [10**9] * 1_000_000, ["x"] * 1_000_000)
    ] + [post("/detokenize", {"model": MODEL, "tokens": [10**9] * 1_000_000})]


def _good_ids() -> list[bytes]:
    ids = list(range(1000, 101_000)) * 10
    found = [completion(**{field: ids}) for field in ("prompt", "stop_token_ids", "allowed_token_ids")]
    return [*found, post("/detokenize", {"model": MODEL, "tokens": ids})]


def _many_prompts() -> list[bytes]:
    return [
        completion(prompt=["a"] * 100_000),
        completion(prompt=[[5]] * 200_000),
        post("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "a"}]] * 20_000}),
    ]


def _tool_stream() -> list[bytes]:
    """Streamed tool calls with arguments of thousands of characters."""
    call = r'<tool_call>\n\{"name": "f", "arguments": \{"a": "[a-z ]*"\}\}\n</tool_call>'
    properties = {"a": {"type": "string", "pattern": "^[a-z ]*$"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    common = {"tools": [tool], "stream": True, "max_tokens": 4000, "ignore_eos": True}
    named = {"type": "function", "function": {"name": "f"}}
    return [
        chat(tool_choice="auto", structured_outputs={"regex": call}, **common),
        chat(tool_choice=named, **common),
        chat(tool_choice="required", **common),
    ]


def _messages() -> list[bytes]:
    many = [{"role": "developer", "content": "a"}] * 50_000
    said = [{"role": "user", "content": "a"}] * 100_000
    return [
        response(input=many),
        chat(*many),
        chat(*said),
        chat({"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}),
        response(input=[{"role": "user", "content": [{"type": "input_text", "text": "a"}] * 100_000}]),
        post(
            "/v1/messages",
            {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "a"}] * 100_000},
        ),
        post("/tokenize", {"model": MODEL, "messages": many}),
    ]


def _deep_arguments() -> list[bytes]:
    found = []
    for depth in (500, 900, 100_000):
        for text in (nested_json(depth), nested_json(depth, "[", "]")):
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
            found.append(chat({"role": "assistant", "tool_calls": [call] * 10}))
            item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": text}
            found.append(response(input=[item, {"role": "user", "content": "a"}]))
            use = '{"type":"tool_use","id":"c","name":"f","input":{"a":' + text + "}}"
            said = '[{"role":"assistant","content":[' + use + "]}]"
            body = f'{{"model":"{MODEL}","max_tokens":4,"messages":{said}}}'
            found.append(post_bytes("/v1/messages", body.encode()))
    return found


# ---- stored responses --------------------------------------------------------------------------------------------


def _large_responses() -> list[bytes]:
    """Responses with 2 MB in fields that are stored and not part of the prompt, or truncated."""
    long = "some word " * 210_000
    tool = {"type": "function", "name": "f", "description": long, "parameters": {"type": "object"}}
    return [
        response(metadata={"a": long}),
        response(tools=[tool]),
        response(input=long, truncation="auto"),
        response(metadata=dict.fromkeys(words(100_000), "x")),
    ]


def _response_chains() -> list[bytes]:
    """Conversations that each continue the one before by a long turn."""
    found = []
    for number in range(400):
        fields: dict[str, Any] = {"request_id": f"resp_chain{number}", "input": "some word " * 5000}
        if number:
            fields["previous_response_id"] = f"resp_chain{number - 1}"
        found.append(response(truncation="auto", **fields))
    return found


# ---- pooling -----------------------------------------------------------------------------------------------------


def _pooling_lists() -> list[bytes]:
    many, long = ["a"] * 100_000, "some word " * 400_000
    return [
        post("/v1/embeddings", {"input": many}),
        post("/v1/embeddings", {"input": [[5]] * 200_000}),
        post("/v1/embeddings", {"input": long}),
        post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": 16}),
        post("/v1/embeddings", {"input": [-1] * 1_000_000}),
        post("/pooling", {"input": many, "task": "token_embed"}),
        post("/rerank", {"query": "a", "documents": many}),
        post("/rerank", {"query": long, "documents": many[:100]}),
        post("/score", {"text_1": many[:1000], "text_2": many[:1000]}),
        post("/score", {"text_1": long, "text_2": many[:100]}),
    ]


def _generate_bodies() -> list[bytes]:
    """Similar requests for the /generate server."""
    bodies: list[dict[str, Any]] = [
        {"bad_words": words(100_000)},
        {"stop": words(300_000)},
        {"n": 10**9},
        {"n": 1024},
        {"use_beam_search": True, "n": 64, "temperature": 0, "stop_token_ids": list(range(2048))},
        {"logit_bias": {str(number): 1 for number in range(16_384)}},
        {"structured_outputs": {"grammar": "start: a{1000}\na: b{1000}\nb: /x{1000}/{1000}\n"}},
        {"stop_token_ids": ["x"] * 1_000_000},
        {"prompt": "ab" * 2_000_000},
    ]
    return [post("/generate", {"prompt": "one two", "max_tokens": 4, **body}) for body in bodies]


# ---- connections -------------------------------------------------------------------------------------------------


def _heads() -> list[bytes]:
    many = [f"X-{number}: {'y' * 15_000}" for number in range(250)]
    return [get("/health", *many), get("/health?" + "a=b&" * 900_000), get("/" + "x" * 3_900_000)]


def _unended() -> list[bytes]:
    """Incomplete requests."""
    return [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{",
    ]


def _bodies() -> list[bytes]:
    count = 8_000_000
    return [
        post_bytes("/v1/completions", b"[" * count),
        post_bytes("/v1/completions", b'{"prompt":[' + b"[]," * (count // 3) + b"[]]}"),
        post_bytes("/v1/completions", b'{"prompt":"' + b"\\u0041" * (count // 6) + b'"}'),
        post_bytes("/v1/completions", b'{"prompt":' + b"9" * count + b"}"),
        post("/v1/completions", {"prompt": "a", "max_tokens": 1, **dict.fromkeys(words(300_000), 1)}),
        post("/invocations", {"prompt": "a", "max_tokens": 1, "x": "y" * count}),
    ]


# requests that make the server load libraries on first use, by setup
_GRAMMARS = ({"json": {"type": "object"}}, {"grammar": "start: /[a-z]+/"})
WARM_UP: dict[str, list[bytes]] = {
    GENERATE: [completion(structured_outputs=grammar) for grammar in _GRAMMARS],
    PLAIN: [
        post("/generate", {"prompt": "one two", "max_tokens": 4, "structured_outputs": grammar})
        for grammar in _GRAMMARS
    ],
    POOLING: [],
}

ATTACKS = (
    Attack("bad-words", lambda: [completion(bad_words=words(100_000)), completion(bad_words=["ab" * 60_000])]),
    Attack("lark", _lark_repeats),
    Attack("gbnf", _gbnf_repeats),
    Attack("gbnf-rules", _gbnf_rules),
    Attack("regex", _regex_repeats),
    Attack("whitespace", _whitespace_repeats),
    Attack("schema-repeats", _schema_repeats),
    Attack("schema-references", _schema_references),
    Attack("schema-properties", _schema_properties),
    Attack("schema-values", _schema_values),
    Attack("schema-depth", _schema_depth),
    Attack("choices", _choices),
    Attack("structural-tags", _structural_tags),
    Attack("n-billion", lambda: [completion(n=10**9), completion(best_of=10**9), completion(n=10**9, stream=True)]),
    Attack("n-16384x40", lambda: [completion(prompt=["one two"] * 40, n=16_384, max_tokens=16)], clients=1),
    Attack(
        "n-1024", lambda: [completion(n=1024, max_tokens=16), chat(n=1024, stream=True, max_tokens=16)], clients=2
    ),
    Attack("tokenize-words", lambda: _tokenize("some word " * 400_000, return_token_strs=True)),
    Attack("tokenize-one-word", lambda: _tokenize("ab" * 2_000_000)),
    Attack("prompt-4mb", _long_prompts),
    Attack("prompt-4mb-cut", lambda: _long_prompts(truncate_prompt_tokens=64)),
    Attack("prompts", _many_prompts),
    Attack("bad-ids", _bad_ids),
    Attack("good-ids", _good_ids),
    Attack("stop", lambda: [completion(stop=words(300_000), max_tokens=64), completion(stop=["ab" * 500_000])]),
    Attack("messages", _messages),
    Attack("tool-stream", _tool_stream),
    Attack("deep-arguments", _deep_arguments),
    Attack(
        "beams",
        lambda: [
            completion(use_beam_search=True, n=64, temperature=0, max_tokens=256, stop_token_ids=list(range(2048)))
        ],
        clients=2,
    ),
    Attack("logit-bias", lambda: [completion(logit_bias=dict.fromkeys(range(16_384), 1), max_tokens=64)]),
    Attack("logit-bias-million", lambda: [completion(logit_bias=dict.fromkeys(range(1_000_000), 1))]),
    Attack("logprobs", lambda: [completion(logprobs=20, n=16, max_tokens=256, ignore_eos=True)]),
    Attack("prompt-logprobs", lambda: [completion(prompt=[5] * 4000, prompt_logprobs=20)], clients=2),
    Attack("echo-logprobs", lambda: [completion(prompt=[5] * 4000, echo=True, logprobs=20)], clients=2),
    Attack("large-responses", _large_responses),
    Attack("response-chains", _response_chains, clients=1),
    Attack(
        "background",
        lambda: [response(background=True, stream=True, max_output_tokens=3000, ignore_eos=True)],
        clients=8,
        how="leave",
        leaves_work=True,
    ),
    Attack(
        "abandoned",
        lambda: [completion(stream=True, max_tokens=2000, ignore_eos=True), completion(max_tokens=2000)],
        clients=32,
        how="leave",
        times=2000,
    ),
    Attack(
        "slow-readers",
        lambda: [completion(stream=True, max_tokens=4000, ignore_eos=True, logprobs=20)],
        clients=64,
        how="slow",
    ),
    Attack("pipelined", lambda: [get("/v1/models"), get("/openapi.json"), completion()], clients=4, how="unread"),
    Attack("pipelined-echo", lambda: [completion(prompt="ab" * 9000, echo=True)], clients=4, how="unread"),
    Attack("connections", _unended, clients=2000, how="idle"),
    Attack("heads", _heads),
    Attack("bodies", _bodies),
    Attack("pages", lambda: [get("/metrics"), get("/openapi.json"), get("/docs"), get("/nowhere")], clients=8),
    Attack("pooling", _pooling_lists, setup=POOLING),
    Attack("generate", _generate_bodies, setup=PLAIN),
)
