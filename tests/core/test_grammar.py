"""Both grammar libraries: which texts they accept, and which constraints they refuse."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.structured.backend_guidance import LLGuidanceBackend
from ascend_vllm.core.structured.backend_xgrammar import XGrammarBackend, ignored_keywords, without_newline_dots
from ascend_vllm.core.structured.constraint import MAX_CHOICES, MAX_DEPTH, make_constraint
from ascend_vllm.core.structured.constraint_checks import check_constraint
from ascend_vllm.core.structured.grammar import CompiledGrammar, GrammarBackend, GrammarError
from ascend_vllm.errors import RequestError
from ascend_vllm.structured_outputs import MAX_BYTES, StructuredOutputsParams
from tests.core.grammar_vocabulary import EOS, SPECIAL, allowed, make_vocabulary, matches, random_text, spell

VOCABULARY = make_vocabulary()
_BACKENDS: dict[str, GrammarBackend] = {
    "xgrammar": XGrammarBackend(VOCABULARY, 2),
    "guidance": LLGuidanceBackend(VOCABULARY, 2),
}
CONFIG = StructuredOutputsConfig()

GBNF = 'root ::= "(" item ("," item)* ")"\nitem ::= [a-c]+ | root'
LARK = 'start: "(" item ("," item)* ")"\nitem: NAME | start\nNAME: /[a-c]+/'
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "size": {"type": "integer"}},
    "required": ["name"],
}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}

# constraint → texts that pass, texts that do not
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "regex": (
        {"regex": r"(ab|c)+\d{2,3}\.?"},
        ["ab00", "cab123.", "c12"],
        ["", "ab", "ab1", "c1234", "xab00"],
    ),
    "regex-unicode": ({"regex": "[é日]本+"}, ["日本", "é本本"], ["本", "e本"]),
    "regex-dot": ({"regex": "a.b"}, ["axb", "a日b", "a.b"], ["a\nb", "ab"]),
    "regex-anchors": ({"regex": "^a+$"}, ["a", "aaa"], ["", "b"]),
    "regex-empty": ({"regex": "a?"}, ["", "a"], ["aa"]),
    "choice": (
        {"choice": ["yes", "no", "no way", "a|b", 'quo"te', "two\nlines", "[é]\\"]},
        ["yes", "no", "no way", "a|b", 'quo"te', "two\nlines", "[é]\\"],
        ["ye", "a", "noway", "", "y"],
    ),
    "json-object": ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}', "{ }"], ["[]", "1", '{"a"}', "{a: 1}"]),
    "json-any": ({"json": True}, ["{}", "[1, true]", "1", '"x"', "null"], ["", "nul", "tru", "01"]),
    "json-text": (
        {"json": json.dumps(OBJECT)},
        ['{"name": "ab", "size": 12}', '{"name":"日本é"}', '{\n "name" : "", "size": -3 }'],
        ['{"size": 1}', '{"name": "abcd"}', '{"name": "a", "size": 1.5}', "{}"],
    ),
    "json-compact": (
        {"json": OBJECT, "disable_any_whitespace": True},
        ['{"name":"a","size":1}', '{"name":"a b"}'],
        ['{"name": "a"}', '{"name":"a", "size":1}', '{ "name":"a"}'],
    ),
    "json-kinds": (
        {
            "json": {
                "type": "array",
                "minItems": 1,
                "maxItems": 2,
                "items": {"anyOf": [{"enum": ["x", 1, None]}, {"type": "boolean"}, {"const": "c"}]},
            }
        },
        ['["x"]', "[1, null]", '[true, "c"]'],
        ["[]", '["y"]', "[2]", "[1, 1, 1]"],
    ),
    "json-ref": (
        {
            "json": {
                "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                "$ref": "#/$defs/node",
            }
        },
        ["[]", "[[], [[]]]"],
        ["[1]", "{}"],
    ),
    "gbnf": ({"grammar": GBNF}, ["(a)", "(a,bc)", "((a),b)"], ["a", "()", "(a,)", "(d)"]),
    "lark": ({"grammar": LARK}, ["(a)", "(a,bc)", "((a),b)"], ["a", "()", "(a,)", "(d)"]),
    "structural-tag": (
        {"structural_tag": json.dumps(TAGS)},
        ["", "text", "so <f>12</f> it is", "<f>1</f><f>2</f>"],
        ["<f>x</f>", "<f>1", "<f>1</g>"],
    ),
}


@pytest.fixture(params=sorted(_BACKENDS))
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    return _BACKENDS[request.param]


def compiled(backend: GrammarBackend, /, **fields: Any) -> CompiledGrammar:
    return backend.compile(make_constraint(StructuredOutputsParams(**fields), CONFIG))


@pytest.mark.parametrize("name", CASES)
def test_texts_that_pass(backend: GrammarBackend, name: str) -> None:
    fields, good, bad = CASES[name]
    grammar = compiled(backend, **fields)
    for text in good:
        assert matches(grammar.start(), text, VOCABULARY), text
        assert matches(grammar.start(), text, VOCABULARY, longest=True), text
    for text in bad:
        assert not matches(grammar.start(), text, VOCABULARY), text
        assert not matches(grammar.start(), text, VOCABULARY, longest=True), text


@pytest.mark.parametrize(
    "regex", [r"(ab|c)+\d{2,3}\.?", r"[^a-z\s]*x?", "(yes|no)(, (yes|no)){0,3}", r"\w{1,8}@[a-c]{1,3}"]
)
def test_random_texts_match_the_expression(backend: GrammarBackend, regex: str) -> None:
    grammar, rng = compiled(backend, regex=regex), random.Random(regex)
    texts = [random_text(grammar.start(), VOCABULARY, rng) for _ in range(20)]
    assert sum(text is not None for text in texts) >= 15
    assert [text for text in texts if text is not None and re.fullmatch(regex, text) is None] == []


def test_random_texts_match_the_schema(backend: GrammarBackend) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "count": {"type": "integer", "minimum": 3, "maximum": 40},
            "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["kind", "count"],
        "additionalProperties": False,
    }
    grammar, rng = compiled(backend, json=schema, disable_any_whitespace=True), random.Random(0)
    texts = [random_text(grammar.start(), VOCABULARY, rng, 100) for _ in range(20)]
    found = [json.loads(text) for text in texts if text is not None]
    assert len(found) >= 15
    for value in found:
        assert {"kind", "count"} <= set(value) <= {"kind", "count", "flags"}
        assert value["kind"] in ("a", "b")
        assert type(value["count"]) is int and 3 <= value["count"] <= 40
        assert all(type(flag) is bool for flag in value.get("flags", [])) and len(value.get("flags", [])) <= 3


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 4, "minLength": 1}], ids=str)
def test_strings_in_json_have_no_control_characters(backend: GrammarBackend, schema: dict[str, Any]) -> None:
    grammar = compiled(backend, json=schema)
    assert matches(grammar.start(), '"é"', VOCABULARY)
    for control in map(chr, range(0x20)):
        assert not matches(grammar.start(), f'"a{control}"', VOCABULARY), repr(control)


def test_tokens_that_are_no_text_are_never_allowed(backend: GrammarBackend) -> None:
    grammar = compiled(backend, regex="(.|\n)*").start()
    for _ in range(2):
        ids = allowed(grammar, VOCABULARY)
        assert {ord("a"), ord("\n"), 256} <= ids
        assert max(ids) < 256 + 16 and not ids & {EOS, SPECIAL}
        assert grammar.accept_tokens([ord("a")])


def test_rollback_takes_back_what_was_accepted(backend: GrammarBackend) -> None:
    grammar = compiled(backend, regex="(ab)+c").start()
    start = allowed(grammar, VOCABULARY)
    for drafts in ("ab", "abab", "ababc"):
        ids = spell(drafts, VOCABULARY, longest=True)
        assert grammar.accept_tokens(ids)
        grammar.rollback(len(ids))
        assert allowed(grammar, VOCABULARY) == start and not grammar.is_accepting
    assert grammar.accept_tokens(spell("abc", VOCABULARY, longest=False))
    assert grammar.is_terminated
    grammar.rollback(1)
    assert not grammar.is_terminated and not grammar.is_accepting
    assert allowed(grammar, VOCABULARY) == {ord("a"), ord("c"), 256}
    with pytest.raises(ValueError, match=r"cannot roll back 3 tokens|3 > 2"):
        grammar.rollback(3)
    assert grammar.accept_tokens([ord("c")]) and grammar.is_terminated


def test_tokens_that_do_not_fit_change_nothing(backend: GrammarBackend) -> None:
    grammar = compiled(backend, regex="abc").start()
    assert not grammar.accept_tokens([ord("a"), ord("c")])
    assert not grammar.accept_tokens([EOS])
    assert not grammar.accept_tokens([ord("b")])
    assert grammar.accept_tokens([256]) and grammar.accept_tokens([ord("c")])
    assert not grammar.accept_tokens([ord("c")])
    assert grammar.is_terminated and allowed(grammar, VOCABULARY) == set()


def test_sequences_of_one_grammar_are_independent(backend: GrammarBackend) -> None:
    grammar = compiled(backend, regex="a+b?")
    first, second = grammar.start(), grammar.start()
    assert first.accept_tokens([ord("a"), ord("b")])
    assert first.is_terminated and not second.is_accepting
    assert second.accept_tokens([ord("a")]) and not second.is_terminated


def test_masks_are_filled_by_the_batch(backend: GrammarBackend) -> None:
    regexes = ["a", "b[0-9]", "(c|d)*", "é", ".*"]
    grammars = [compiled(backend, regex=regex).start() for regex in regexes]
    bitmask = np.full((7, VOCABULARY.num_words), 5, np.int32)
    rows = [6, 0, 3, 1, 4]
    backend.fill_bitmasks(grammars, bitmask, rows)
    for grammar, row in zip(grammars, rows, strict=True):
        alone = np.zeros(VOCABULARY.num_words, np.int32)
        grammar.fill_bitmask(alone)
        assert bitmask[row].tolist() == alone.tolist()
    # the other rows of the array are not used
    assert (bitmask[[2, 5]] == 5).all()


@pytest.mark.parametrize("size", [289 + 31, 289 + 30, 289 + 32])
def test_any_size_of_the_vocabulary(size: int) -> None:
    vocabulary = make_vocabulary(size)
    for backend in (XGrammarBackend(vocabulary, 1), LLGuidanceBackend(vocabulary, 1)):
        grammar = compiled(backend, regex=".*").start()
        assert max(allowed(grammar, vocabulary)) < 256 + 16
        assert matches(compiled(backend, regex="a?b").start(), "ab", vocabulary)


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "("},
        {"regex": "[b-a]"},
        {"regex": "(?=a)b"},
        {"regex": r"(a)\1"},
        {"json": {"type": "thing"}},
        {"json": {"$ref": "#/definitions/missing"}},
        {"json": {"enum": []}},
        {"json": {"type": "array", "minItems": 3, "maxItems": 1}},
        {"grammar": "root ::= missing"},
        {"grammar": "root ::= ("},
        {"grammar": "start: missing"},
        {"grammar": ""},
        {"grammar": "no grammar at all"},
        {"structural_tag": "{}"},
        {"structural_tag": "[1]"},
        {"structural_tag": '{"structures": [{"begin": "<f>"}], "triggers": ["<f"]}'},
        {"structural_tag": '{"structures": [{"begin": "<f>", "schema": 5, "end": ""}], "triggers": ["<g"]}'},
    ],
    ids=str,
)
def test_errors_of_constraints_that_cannot_be_compiled(backend: GrammarBackend, fields: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as failure:
        compiled(backend, **fields)
    text = str(failure.value)
    assert text and "\n" not in text and ".cc:" not in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": '{"type":'}, "json is not valid JSON: Expecting value: line 1 column 9"),
        ({"json": "[1]"}, "json must be a JSON schema, an object or a boolean, but is list"),
        ({"json": "[" * 100_000}, "json is nested too deeply"),
        (
            {"json": '{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1)},
            "json is nested too deeply: the limit is 64",
        ),
        ({"json": {"description": "x" * MAX_BYTES}}, "json is too large"),
        ({"regex": "x" * 40_000}, "regex is too large: 40000 bytes, the limit is 32768"),
        ({"regex": "(a{300}){300}"}, "with its repetitions written out it has 90000 characters, the limit is 50000"),
        ({"json": {"items": {"pattern": "a{60000}"}}}, "pattern is too large: with its repetitions written out"),
        ({"choice": ["x"] * (MAX_CHOICES + 1)}, "choice has 8193 strings, the limit is 8192"),
        ({"grammar": "root ::= " + '"a" ' * MAX_BYTES}, "grammar is too large"),
        ({"grammar": 'root ::= "a"\n' * 1001}, "grammar has 1001 rules, the limit is 1000"),
        ({"grammar": 'start: "a:"\n?b.2: "c"\n' * 501}, "grammar has 1002 rules, the limit is 1000"),
        ({"structural_tag": "{"}, "structural_tag is not valid JSON"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern goes with a JSON schema, not with regex"),
        (
            {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True},
            "whitespace_pattern and disable_any_whitespace contradict each other",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_constraints_that_are_refused_before_any_library(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        check_constraint(make_constraint(StructuredOutputsParams(**fields), CONFIG))


def test_equal_schemas_share_a_grammar() -> None:
    wanted = {"type": "object", "properties": {"b": {"type": "null"}, "a": {}}}
    constraints = {
        make_constraint(StructuredOutputsParams(json=schema), CONFIG)
        for schema in (wanted, json.dumps(wanted), json.dumps(wanted, indent=3))
    }
    assert len(constraints) == 1
    other_order = {"type": "object", "properties": {"a": {}, "b": {"type": "null"}}}
    constraints.add(make_constraint(StructuredOutputsParams(json=other_order), CONFIG))
    constraints.add(make_constraint(StructuredOutputsParams(json=wanted, disable_any_whitespace=True), CONFIG))
    constraints.add(make_constraint(StructuredOutputsParams(json=wanted, backend="guidance"), CONFIG))
    assert len(constraints) == 4


def test_xgrammar_names_the_keywords_that_it_would_not_enforce() -> None:
    schema = {
        "type": "object",
        # property names are not keywords
        "properties": {"not": {"multipleOf": 3}, "if": {"enum": [{"uniqueItems": 1}]}},
        "allOf": [{"required": ["not"]}, {"dependentRequired": {"if": ["not"]}}],
        "items": {"pattern": "a+", "maxLength": 4},
    }
    names = {"multipleOf", "allOf", "dependentRequired", "pattern together with minLength or maxLength"}
    assert ignored_keywords(schema) == names
    assert ignored_keywords(True) == set()
    with pytest.raises(GrammarError, match="not supported: allOf, dependentRequired, multipleOf"):
        compiled(_BACKENDS["xgrammar"], json=schema)
    numbers = compiled(_BACKENDS["guidance"], json={"type": "integer", "multipleOf": 7})
    assert matches(numbers.start(), "21", VOCABULARY) and not matches(numbers.start(), "22", VOCABULARY)


def test_whitespace_pattern_is_for_llguidance() -> None:
    fields = {"json": {"type": "array", "items": {"type": "null"}}, "whitespace_pattern": "[ ]?"}
    grammar = compiled(_BACKENDS["guidance"], **fields)
    assert matches(grammar.start(), "[null, null ]", VOCABULARY)
    assert not matches(grammar.start(), "[null,  null]", VOCABULARY)
    assert not matches(grammar.start(), "[\nnull]", VOCABULARY)
    with pytest.raises(GrammarError, match="whitespace_pattern is not supported"):
        compiled(_BACKENDS["xgrammar"], **fields)
    with pytest.raises(GrammarError, match="unclosed group"):
        compiled(_BACKENDS["guidance"], json={"type": "array"}, whitespace_pattern="(")


@pytest.mark.parametrize("fields", [{}, {"backend": "guidance", "disable_additional_properties": True}])
def test_objects_have_only_the_properties_that_the_schema_names(
    backend: GrammarBackend, fields: dict[str, Any]
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "properties": {"type": "object", "properties": {"a": {"type": "null"}}},
            "free": {"type": "object"},
        },
    }
    grammar = compiled(backend, json=schema, **fields)
    for text in ('{"properties": {"a": null}}', '{"free": {"x": 1}}', "{}"):
        assert matches(grammar.start(), text, VOCABULARY), text
    for text in ('{"b": 1}', '{"properties": {"b": 1}}', '{"properties": {"a": null, "b": 1}}'):
        assert not matches(grammar.start(), text, VOCABULARY), text


def test_guidance_allows_other_properties_when_chosen_by_name() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    grammar = compiled(_BACKENDS["guidance"], json=schema, backend="guidance")
    assert matches(grammar.start(), '{"a": null, "b": 1}', VOCABULARY)


def test_dots_and_line_breaks() -> None:
    assert without_newline_dots(r"a.[.]\.[\].].") == r"a[^\n][.]\.[\].][^\n]"
    assert without_newline_dots("[].]") == "[].]"
    assert without_newline_dots("a\\") == "a\\"
