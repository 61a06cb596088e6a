"""Structured outputs over HTTP: every kind of constraint, in every spelling, on a real server.

The tiny model's weights are random: what it writes makes sense only where a constraint holds.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import httpx
import openai
import psutil
import pydantic
import pytest
import regex

from tests.json_schemas import SPELLINGS, complete_schemas
from tests.raw_requests import post_raw
from tests.server import Server, is_alive, is_idle, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 80, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 80, "temperature": 0},
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"$ref": "#/definitions/Kind"},
        "known": {"type": "boolean"},
    },
    "required": ["name", "kind", "known"],
    "additionalProperties": False,
    "definitions": {"Kind": {"enum": ["cat", "dog"]}},
}
REGEX = r"[0-9]{3}-(yes|no)"
GRAMMAR = 'root ::= "the " animal " sleeps"\nanimal ::= "cat" | "dog"'
LARK = 'start: "the " animal " sleeps"\nanimal: "cat" | "dog"'
TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": REGEX}}


def is_of_schema(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "kind", "known"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 5
    assert value["kind"] in ("cat", "dog")
    assert isinstance(value["known"], bool)


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def matches(text: str) -> None:
    assert re.fullmatch(REGEX, text), text


def is_choice(text: str) -> None:
    assert text in ("left", "right")


def is_sentence(text: str) -> None:
    assert text in ("the cat sleeps", "the dog sleeps")


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "guided_json": ({"guided_json": SCHEMA}, is_of_schema),
    "guided_json as text": ({"guided_json": json.dumps(SCHEMA)}, is_of_schema),
    "guided_json by guidance": ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"}, is_of_schema),
    "guided_json by outlines": ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, is_of_schema),
    "guided_whitespace_pattern": ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, is_of_schema),
    "guided_regex": ({"guided_regex": REGEX}, matches),
    "guided_choice": ({"guided_choice": ["left", "right"]}, is_choice),
    "guided_grammar": ({"guided_grammar": GRAMMAR}, is_sentence),
    "structured_outputs json": ({"structured_outputs": {"json": SCHEMA}}, is_of_schema),
    "structured_outputs regex": ({"structured_outputs": {"regex": REGEX}}, matches),
    "structured_outputs choice": ({"structured_outputs": {"choice": ["left", "right"]}}, is_choice),
    "structured_outputs grammar": ({"structured_outputs": {"grammar": LARK}}, is_sentence),
    "structured_outputs structural_tag": ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, matches),
    "response_format json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}},
        is_of_schema,
    ),
    "response_format json_object with schema": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        is_of_schema,
    ),
    # what huggingface_hub's client sends
    "response_format json_object with value": (
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        is_of_schema,
    ),
    "response_format json_object with text": (
        {"response_format": {"type": "json_object", "value": json.dumps(SCHEMA)}},
        is_of_schema,
    ),
    "response_format structural_tag": ({"response_format": TAG}, matches),
}


@pytest.fixture(scope="module")
def asked(compact_server: Server) -> Iterator[httpx.Client]:
    """A client of the server; afterwards no request may be left."""
    with httpx.Client(base_url=compact_server.url, timeout=60) as http:
        yield http
        assert http.get("/health").status_code == 200
        assert wait_until(lambda: is_idle(http))


def texts(http: httpx.Client, path: str, **fields: Any) -> list[str]:
    """Texts of a whole answer's choices, each of which must have come to its end."""
    response = http.post(path, json=BASES[path] | fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * len(choices), choices
    return [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in choices]


def streamed(http: httpx.Client, path: str, **fields: Any) -> list[str]:
    """The same of a stream."""
    response = http.post(path, json=BASES[path] | fields | {"stream": True})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    pieces: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for choice in (json.loads(event)["choices"][0] for event in events):
        piece = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        pieces[choice["index"]] = pieces.get(choice["index"], "") + piece
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert reasons == dict.fromkeys(pieces, "stop")
    return [pieces[index] for index in sorted(pieces)]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_keeps_to_its_constraint(asked: httpx.Client, kind: str, path: str) -> None:
    fields, check = KINDS[kind]
    (text,) = texts(asked, path, **fields)
    check(text)
    assert streamed(asked, path, **fields) == [text]
    several = {"n": 2, "temperature": 1.0, "seed": 3}
    drawn = texts(asked, path, **fields, **several)
    assert len(drawn) == 2
    for text in drawn:
        check(text)
    assert streamed(asked, path, **fields, **several) == drawn


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_any_object(asked: httpx.Client, path: str) -> None:
    """A model whose likeliest token is the end must write an object first, and then ends."""
    close = asked.post("/tokenize", json={"prompt": "{}", "add_special_tokens": False}).json()["tokens"]
    bias = {str(token): 50 for token in close}
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        (text,) = texts(asked, path, **fields, logit_bias=bias)
        is_object(text)
        assert streamed(asked, path, **fields, logit_bias=bias) == [text]


def test_the_request_of_the_sources(http: httpx.Client) -> None:
    """As it is documented: a schema as text, with definitions, references, a length and enumerations."""
    response = http.post(COMPLETIONS, content=SOURCES_BODY, headers={"content-type": "application/json"})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    # a number may have any length, so that the tiny model may not come to the end; what there is must begin an answer
    assert regex.fullmatch(SOURCES_ANSWER, choice["text"], partial=choice["finish_reason"] == "length"), choice
    bias = {str(token): -100 for token in numbers(http)}
    (text,) = texts(http, COMPLETIONS, **json.loads(SOURCES_BODY), logit_bias=bias)
    answer = json.loads(text)
    assert list(answer) == ["name", "age", "armor", "weapon", "strength"]
    assert len(answer["name"]) <= 10
    assert answer["armor"] in ("leather", "chainmail", "plate")
    assert answer["weapon"] in ("sword", "axe", "mace", "spear", "bow", "crossbow")
    assert isinstance(answer["age"], int)
    assert isinstance(answer["strength"], int)


def numbers(http: httpx.Client) -> list[int]:
    """Ids of the digits but one, so that numbers do not go on."""
    return [http.post("/tokenize", json={"prompt": digit}).json()["tokens"][0] for digit in "123456789"]


SOURCES_BODY = r"""{
    "model": "tiny",
    "prompt": "Meet our valorous character, named Knight, who has reached the age of 32. Clad in impenetrable plate armor, Knight is well-prepared for any battle. Armed with a trusty sword and boasting a strength score of 90, this character stands as a formidable warrior on the field.Please provide details for this character, including their Name, Age, preferred Armor, Weapon, and Strength",
    "max_tokens": 200,
    "temperature": 0,
    "guided_json": "{\"title\": \"Character\", \"type\": \"object\", \"properties\": {\"name\": {\"title\": \"Name\", \"maxLength\": 10, \"type\": \"string\"}, \"age\": {\"title\": \"Age\", \"type\": \"integer\"}, \"armor\": {\"$ref\": \"#/definitions/Armor\"}, \"weapon\": {\"$ref\": \"#/definitions/Weapon\"}, \"strength\": {\"title\": \"Strength\", \"type\": \"integer\"}}, \"required\": [\"name\", \"age\", \"armor\", \"weapon\", \"strength\"], \"definitions\": {\"Armor\": {\"title\": \"Armor\", \"description\": \"An enumeration.\", \"enum\": [\"leather\", \"chainmail\", \"plate\"], \"type\": \"string\"}, \"Weapon\": {\"title\": \"Weapon\", \"description\": \"An enumeration.\", \"enum\": [\"sword\", \"axe\", \"mace\", \"spear\", \"bow\", \"crossbow\"], \"type\": \"string\"}}}"
}"""  # noqa: E501 - word for word
_VALUES = {
    "name": r'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})){0,10}"',
    "age": r"-?(?:0|[1-9][0-9]*)",
    "armor": '"(?:leather|chainmail|plate)"',
    "weapon": '"(?:sword|axe|mace|spear|bow|crossbow)"',
    "strength": r"-?(?:0|[1-9][0-9]*)",
}
SOURCES_ANSWER = r"\{" + ",".join(rf' ?"{name}" ?: ?{value} ?' for name, value in _VALUES.items()) + r"\}"


def test_together_with_other_rules(asked: httpx.Client) -> None:
    """Stop strings, lengths and biases mean the same as without a constraint."""
    (choice,) = asked.post(COMPLETIONS, json=BASES[COMPLETIONS] | {"guided_regex": REGEX, "stop": ["-"]}).json()[
        "choices"
    ]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "-")
    assert re.fullmatch("[0-9]{3}", choice["text"])
    (choice,) = asked.post(COMPLETIONS, json=BASES[COMPLETIONS] | {"guided_regex": REGEX, "max_tokens": 2}).json()[
        "choices"
    ]
    assert choice["finish_reason"] == "length"
    # a text that is complete ends, whatever the request would like
    for fields in ({"ignore_eos": True}, {"min_tokens": 40}):
        matches(*texts(asked, COMPLETIONS, guided_regex=REGEX, **fields))
    wanted, unwanted = (
        asked.post("/tokenize", json={"prompt": text}).json()["tokens"][0] for text in ("right", "left")
    )
    assert wanted != unwanted
    assert texts(asked, CHAT, guided_choice=["left", "right"], logit_bias={str(wanted): 100}) == ["right"]
    assert texts(asked, CHAT, guided_choice=["left", "right"], logit_bias={str(unwanted): 100}) == ["left"]
    # nothing is left: the request fails alone
    response = asked.post(COMPLETIONS, json=BASES[COMPLETIONS] | {"guided_choice": ["a"], "allowed_token_ids": [300]})
    assert response.status_code == 400
    assert "No token is left to sample" in response.json()["message"]


def test_log_probabilities(asked: httpx.Client) -> None:
    """They are the model's own: of the tokens that the constraint left, and of those that it forbade."""
    (choice,) = asked.post(
        CHAT, json=BASES[CHAT] | {"guided_choice": ["left"], "logprobs": True, "top_logprobs": 2}
    ).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith("left")
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert any(entry["logprob"] < entry["top_logprobs"][0]["logprob"] for entry in content)


def test_free_requests_beside_constrained_ones(asked: httpx.Client) -> None:
    """They do not influence each other: greedy texts are the same as alone."""
    free = {"ignore_eos": True, "max_tokens": 40}
    alone = asked.post(COMPLETIONS, json=BASES[COMPLETIONS] | free).json()["choices"][0]["text"]
    expected = {kind: texts(asked, COMPLETIONS, **fields) for kind, (fields, _) in KINDS.items()}
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        frees = [pool.submit(asked.post, COMPLETIONS, json=BASES[COMPLETIONS] | free) for _ in range(8)]
        held = {kind: pool.submit(texts, asked, COMPLETIONS, **fields) for kind, (fields, _) in KINDS.items()}
        assert {kind: future.result() for kind, future in held.items()} == expected
        assert [future.result().json()["choices"][0]["text"] for future in frees] == [alone] * 8


WRONG: dict[str, dict[str, Any]] = {
    "guided_regex": {"guided_regex": "(a"},
    "guided_grammar": {"guided_grammar": 'root ::= "a" nowhere'},
    "schema of no type": {"guided_json": {"type": "zzz"}},
    "reference to nowhere": {"structured_outputs": {"json": {"$ref": "#/definitions/nowhere"}}},
    "schema that is an array": {"guided_json": "[1]"},
    "response_format": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}
    },
    "structural_tag": {"structured_outputs": {"structural_tag": "{}"}},
    "unknown key": {"structured_outputs": {"regexp": "a"}},
    "empty choice": {"guided_choice": []},
    "two spellings": {"guided_regex": "a", "response_format": {"type": "json_object"}},
}


@pytest.mark.parametrize("library", ["xgrammar", "guidance"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_schema_comes_to_an_end(patient_server: Server, spelling: str, library: str) -> None:
    complete_schemas(patient_server.url, spelling, library)


UNKNOWN_KEYS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "json_object", "shema": SCHEMA}, "['shema']", "['json_schema', 'schema', 'type', 'value']"),
    ({"type": "json_schema", "json_schema": {"schema": SCHEMA}, "name": "x"}, "['name']", "['json_schema', 'type']"),
    ({"type": "json_schema", "schema": SCHEMA}, "['schema']", "['json_schema', 'type']"),
    (
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "value": {}, "a": 1}},
        "['a', 'value']",
        "['description', 'name', 'schema', 'strict']",
    ),
    ({"type": "text", "value": SCHEMA}, "['value']", "['json_schema', 'type']"),
    (TAG | {"structure": []}, "['structure']", "['format', 'structures', 'triggers', 'type']"),
]


@pytest.mark.parametrize(("form", "unknown", "known"), UNKNOWN_KEYS)
def test_unknown_keys_of_a_response_format(http: httpx.Client, form: Any, unknown: str, known: str) -> None:
    for path in (COMPLETIONS, CHAT):
        error = http.post(path, json=BASES[path] | {"response_format": form}).json()["error"]
        assert (error["code"], error["param"]) == (400, "response_format")
        assert f"has unknown keys {unknown}; it may hold {known}" in error["message"]


def test_response_formats_that_hold_no_schema(http: httpx.Client) -> None:
    short = BASES[CHAT] | {"max_tokens": 3}
    for form in (
        {"type": "text", "json_schema": None},
        {"type": "json_object", "json_schema": None, "schema": None, "value": None},
        {"type": "json_object", "schema": {}},
    ):
        text = http.post(CHAT, json=short | {"response_format": form}).json()["choices"][0]["message"]["content"]
        assert text.startswith("{") == (form["type"] == "json_object")
    twice = {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}
    for form, message in (
        (twice, "`response_format` has both `schema` and `value`, which mean the same."),
        ({"type": "json_object", "value": "{"}, "Expecting property name"),
    ):
        error = http.post(CHAT, json=short | {"response_format": form}).json()["error"]
        assert (error["code"], error["param"]) == (400, "response_format")
        assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_constraints_are_refused(asked: httpx.Client, name: str, stream: bool) -> None:
    for path in (COMPLETIONS, CHAT):
        response = asked.post(path, json=BASES[path] | WRONG[name] | {"stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
    assert texts(asked, COMPLETIONS, guided_choice=["yes"]) == ["yes"], "the engine lives on"


class Animal(pydantic.BaseModel):
    """What the official client's helper makes a schema of."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]
    asleep: bool


def test_the_official_client_s_helper(compact_server: Server) -> None:
    with openai.OpenAI(base_url=f"{compact_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        asked = {"model": "tiny", "messages": BASES[CHAT]["messages"], "temperature": 0, "max_tokens": 60}
        answer = client.chat.completions.parse(**asked, response_format=Animal)
        animal = answer.choices[0].message.parsed
        assert isinstance(animal, Animal)
        with client.chat.completions.stream(**asked, response_format=Animal) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == animal


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_constraint_names_the_field_it_came_in(asked: httpx.Client, stream: bool) -> None:
    schema = {"name": "x", "schema": {"type": "zzz"}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("structured_outputs", {"structured_outputs": {"regex": "("}}),
        ("structured_outputs", {"structured_outputs": {"regex": "("}, "response_format": {"type": "text"}}),
        ("response_format", form),
        ("guided_json", {"guided_json": schema["schema"]}),
        ("guided_regex", {"guided_regex": "(", "response_format": {"type": "text"}}),
        ("guided_grammar", {"guided_grammar": "root ::= ("}),
    ]
    for name, fields in rows:
        for path in (COMPLETIONS, CHAT):
            response = asked.post(path, json=BASES[path] | fields | {"stream": stream})
            assert (response.status_code, response.json()["error"]["param"]) == (400, name), response.text
    text = {"format": {"type": "json_schema"} | schema}
    response = asked.post("/v1/responses", json={"input": "Hello", "text": text, "stream": stream})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format"), response.text


# ---- tools that must be called --------------------------------------------------------------------------------

FIND = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "maxProperties": 0}}}
NAMED = {"type": "function", "function": {"name": "find"}}


def test_a_named_function_is_called(compact_server: Server) -> None:
    with openai.OpenAI(base_url=f"{compact_server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        fields: dict[str, Any] = BASES[CHAT] | {"model": "tiny", "tools": [STOP, FIND], "tool_choice": NAMED}
        (choice,) = client.chat.completions.create(**fields).choices
        assert (choice.message.content, choice.finish_reason) == (None, "stop")
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.function.name == "find"
        is_of_schema(call.function.arguments)
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True)]
        first, *rest = (delta.delta.tool_calls[0] for delta in deltas if delta.delta.tool_calls)
        assert (first.index, first.type, first.function.name) == (0, "function", "find")
        assert first.id.startswith("chatcmpl-tool-")
        assert len(rest) > 5
        assert all((later.id, later.function.name) == (None, None) for later in rest)
        assert "".join(delta.function.arguments or "" for delta in (first, *rest)) == call.function.arguments
        assert (deltas[-1].delta.tool_calls, deltas[-1].finish_reason) == (None, "stop")
        assert all(delta.delta.content is None for delta in deltas)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_function_must_be_called(asked: httpx.Client, parallel: bool) -> None:
    fields = BASES[CHAT] | {"tools": [FIND, STOP], "tool_choice": "required", "parallel_tool_calls": parallel}
    # as many calls as fit: the array does not end before it must
    end = asked.post("/tokenize", json={"prompt": "]"}).json()["tokens"]
    fields |= {"max_tokens": 400, "logit_bias": {str(end[0]): -100 if not parallel else 0}}
    (choice,) = asked.post(CHAT, json=fields).json()["choices"]
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert calls
    assert len({call["id"] for call in calls}) == len(calls)
    if not parallel:
        assert len(calls) == 1
    if choice["finish_reason"] != "length":
        assert choice["finish_reason"] == "tool_calls"
        for call in calls:
            (is_of_schema if call["function"]["name"] == "find" else is_object)(call["function"]["arguments"])
    made = [[call["function"]["name"], call["function"]["arguments"]] for call in calls]
    response = asked.post(CHAT, json=fields | {"stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line[6:7] == "{"]
    told: list[list[str]] = []
    for delta in (event["choices"][0]["delta"] for event in events):
        for call in delta.get("tool_calls", []):
            if "id" in call:
                told.append([call["function"]["name"], ""])
            told[call["index"]][1] += call["function"].get("arguments", "")
    assert told == made
    assert all(event["choices"][0]["delta"].get("content") is None for event in events)
    assert events[-1]["choices"][0]["delta"] == {}
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_cut_short_is_no_content(asked: httpx.Client, choice: Any, stream: bool) -> None:
    fields = BASES[CHAT] | {"tools": [FIND], "tool_choice": choice, "max_tokens": 2, "stream": stream}
    response = asked.post(CHAT, json=fields)
    assert response.status_code == 200
    if stream:
        assert '"finish_reason":"length"' in response.text
        assert '"content":"["' not in response.text
    else:
        assert response.json()["choices"][0]["message"]["content"] is None
        assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_s_wrong_schema_names_the_tool(asked: httpx.Client, choice: Any, stream: bool) -> None:
    wrong = {"type": "function", "function": {"name": "find", "parameters": {"type": "zzz"}}}
    fields = BASES[CHAT] | {"tools": [wrong], "tool_choice": choice, "stream": stream}
    response = asked.post(CHAT, json=fields)
    assert response.status_code == 400, response.text
    assert "The `parameters` of the tools (find) cannot be used" in response.json()["message"]
    assert response.json()["param"] == "tools"


# 97 bytes with its field; the library took gigabytes, and all threads for a minute
REPEATED = "start: a{1000}\na: b{1000}\nb: /x{1000}/{1000}"
# few enough repetitions not to be refused at once, and enough for a minute
LONG = "start: a{100}\na: /x{100}/{300}"


def test_a_grammar_of_endless_repetitions_is_refused_at_once(asked: httpx.Client) -> None:
    for path, fields, param in (
        (COMPLETIONS, {"guided_grammar": REPEATED}, "guided_grammar"),
        (CHAT, {"structured_outputs": {"grammar": REPEATED}}, "structured_outputs"),
        (COMPLETIONS, {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#"}}}}, "guided_json"),
    ):
        error = asked.post(path, json=BASES[path] | fields).json()["error"]
        assert (error["code"], error["param"]) == (400, param)
        assert "the limit is 10000000" in error["message"] or "circular $ref" in error["message"]


def test_a_client_that_leaves_ends_the_compilation_of_its_grammar(
    compact_server: Server, asked: httpx.Client
) -> None:
    """The compilation once went on in its thread, using memory and delaying other requests."""
    name = "ascend_vllm.core.structured.compile_process"
    texts(asked, COMPLETIONS, guided_regex="a")
    # the quick ones stand back behind nobody
    niceness = psutil.Process().nice()
    quick = {process.pid for process in compact_server.find(name)}
    body = BASES[COMPLETIONS] | {"guided_grammar": LONG, "guided_decoding_backend": "guidance"}
    with post_raw(compact_server, COMPLETIONS, body):
        # one of its own, once it has taken longer than usual ones do
        assert wait_until(
            lambda: [process for process in compact_server.find(name) if process.nice() > niceness], timeout_s=60
        )
        (busy,) = [process for process in compact_server.find(name) if process.nice() > niceness]
        assert texts(asked, COMPLETIONS, guided_regex="b[0-9]") != []
        assert asked.post(COMPLETIONS, json=BASES[COMPLETIONS] | {"max_tokens": 3}).status_code == 200
    assert wait_until(lambda: not is_alive(busy), timeout_s=5)
    assert len(quick) == 2
