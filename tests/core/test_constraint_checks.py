"""Sizes of constraints, computed before a library compiles them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.structured.constraint import make_constraint
from ascend_vllm.core.structured.constraint_checks import check_constraint
from ascend_vllm.core.structured.grammar_size import gbnf_size, lark_size
from ascend_vllm.core.structured.json_schema import find_reference_cycle, postorder, schema_size
from ascend_vllm.errors import RequestError
from ascend_vllm.structured_outputs import StructuredOutputsParams

LIMIT = 10**9
# 97 bytes, for which the library took gigabytes, and a minute on all threads
LARK_97 = "start: a{1000}\na: b{1000}\nb: /x{1000}/{1000}"
GBNF_97 = 'root ::= a{1000}\na ::= b{1000}\nb ::= "x"{1000}'
DEEP_ARRAY: dict[str, Any] = {"type": "array", "minItems": 2000, "items": {"type": "array", "maxItems": 2000,
    "items": {"type": "array", "maxItems": 2000, "items": {"type": "null"}}}}  # fmt: skip


def check(**fields: Any) -> None:
    check_constraint(make_constraint(StructuredOutputsParams(**fields), StructuredOutputsConfig()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"grammar": LARK_97}, "grammar is too large: with its repetitions written out it has 10000001 symbols"),
        ({"grammar": GBNF_97}, "grammar is too large: with its repetitions written out"),
        ({"grammar": "start: a~1000\na: (B B)~2..1000\nB: /x{50}/"}, "grammar is too large"),
        ({"grammar": 'start: %json {"type": "array", "minItems": 20000000, "items": {}}'}, "grammar is too large"),
        ({"json": DEEP_ARRAY}, "json is too large: its bounds together ask for 1000000001 values"),
        (
            {
                "json": {
                    "$ref": "#/$defs/a",
                    "$defs": {
                        "a": {"minItems": 50000, "items": {"$ref": "#/$defs/b"}},
                        "b": {"minItems": 50000, "items": {"type": "null"}},
                    },
                }
            },
            "its bounds together ask for",
        ),
        ({"json": {"patternProperties": {"(a{300}){300}": {}}}}, "patternProperties is too large"),
        ({"json": {"type": "object"}, "whitespace_pattern": "( {900}){90}"}, "whitespace_pattern is too large"),
        (
            {"structural_tag": json.dumps({"format": {"type": "regex", "pattern": "(a{300}){300}"}})},
            "pattern is too large: with its repetitions written out it has 90000 characters",
        ),
        (
            {"structural_tag": json.dumps({"format": {"type": "grammar", "grammar": GBNF_97}})},
            "structural_tag is too large: with its repetitions written out",
        ),
        (
            {"structural_tag": json.dumps({"format": {"type": "json_schema", "json_schema": DEEP_ARRAY}})},
            "structural_tag is too large: its bounds",
        ),
        (
            {"structural_tag": json.dumps({"structures": [{"begin": "", "schema": DEEP_ARRAY}], "triggers": []})},
            "structural_tag is too large: its bounds",
        ),
        ({"structural_tag": "{"}, "structural_tag is not valid JSON"),
        ({"structural_tag": "[" * 70 + "]" * 70}, "structural_tag is nested too deeply: the limit is 64"),
        ({"json": {"$ref": "#"}}, "json has a circular $ref: #."),
        (
            {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
            "circular $ref: #/$defs/b -> #/$defs/a.",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_too_large_constraints_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        check(**fields)
    assert error.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "array", "maxItems": 1000, "items": {"type": "string", "maxLength": 60_000}}},
        {"json": {"type": "object", "properties": {f"p{index}": {} for index in range(15_000)}}},
        {"json": {"type": "array", "minItems": 1e3, "maxItems": 1e999}},
        {"grammar": "start: line{1,1000}\nline: /[^\\n]{1,1000}/"},
        {"grammar": 'root ::= line{1,1000}\nline ::= [^\\n]{1,1000} "\\n"'},
        # recursion is allowed in grammars
        {"grammar": 'root ::= "(" root{0,1000} ")"'},
        {"structural_tag": json.dumps({"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["a"]})},
    ],
    ids=lambda value: str(value)[:40],
)
def test_large_constraints_within_the_limits_pass(fields: dict[str, Any]) -> None:
    check(**fields)


@pytest.mark.parametrize(
    ("grammar", "size"),
    [
        ("", 0),
        ('root ::= "a" | [b-z]', 2),
        ('root ::= ("a" "b"){3} "c"', 7),
        ('root ::= "a"{2,5} b{,4}\nb ::= "x" "y"', 13),
        ('# root ::= "a"{9}\nroot ::= "a#{9}" [#{9}]', 2),
        ('root ::= a{3}\na ::= b{3}\nb ::= "x"{3}', 27),
        # the other order, and rules within themselves
        ('b ::= "x"{3}\na ::= b{3} a?\nroot ::= a{3}', 30),
        ('root ::= "a\\"{9}" ("b"{2}){2}', 5),
        ('root ::= "a', 1),
        ('root ::= )"a"(', 1),
    ],
)
def test_sizes_of_gbnf(grammar: str, size: int) -> None:
    assert gbnf_size(grammar, LIMIT) == size


@pytest.mark.parametrize(
    ("grammar", "size"),
    [
        ("start: /a{10}/ B\nB: /[/]{3}/", 13),
        ('start: ("a" b)~3 // b{9}\n?b.2: "x"~2..4 | c\n!c[capture]: /y/', 18),
        ('start: %json {"minItems": 7, "items": {}} b\nb: "{"', 9),
        ('start: %regex {"substring_chars": "abc"} "a"{3}', 4),
        ("start: %json { a{9}", 0),
        ("start: /a{3}", 3),
    ],
)
def test_sizes_of_lark(grammar: str, size: int) -> None:
    assert lark_size(grammar, LIMIT) == size
    assert lark_size(grammar, 2) == min(size, 3)


def test_sizes_of_schemas() -> None:
    assert schema_size(True, LIMIT) == 1
    assert schema_size({"minItems": 3}, LIMIT) == 1
    assert schema_size({"minItems": 3, "maxItems": 5, "items": [{}, {"maxLength": 4}]}, LIMIT) == 1 + 5 * 5
    assert schema_size({"properties": {"items": {"minLength": 9}, "a": {"pattern": "x{7}"}}}, LIMIT) == 1 + 9 + 7
    assert schema_size({"maxProperties": 6, "additionalProperties": {"anyOf": [{}, {}]}}, LIMIT) == 1 + 6 * 3
    # recursive definitions count once, unused ones not at all
    own = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"maxItems": 9, "items": {"$ref": "#/$defs/n"}}, "x": {"minLength": 99}},
    }
    assert schema_size(own, LIMIT) == 1 + (1 + 9 * 2)
    assert schema_size({"enum": [{"minLength": 50}], "maxLength": "5", "minLength": True}, LIMIT) == 1
    assert schema_size(DEEP_ARRAY, 1000) == 1001


@pytest.mark.parametrize(
    ("schema", "cycle"),
    [
        ({"type": "array", "items": {"$ref": "#"}}, None),
        ({"properties": {"next": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"$ref": "#"}}}, None),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, None),
        ({"$ref": "#/$defs/missing"}, None),
        ({"$ref": "http://elsewhere#"}, None),
        ({"$ref": 5}, None),
        ({"properties": {"$ref": {"type": "null"}}}, None),
        ({"enum": [{"$ref": "#"}]}, None),
        # two references to the same definition are not a cycle
        ({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}}, None),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, ["#/properties/a"]),
        ({"items": [{}, {"$ref": "#/items/1"}]}, ["#/items/1"]),
        ({"oneOf": [{"$ref": "#"}]}, ["#"]),
        ({"$defs": {"a/b~%": {"$ref": "#/$defs/a~1b~0%25"}}}, ["#/$defs/a~1b~0%25"]),
        ({"$defs": {"a": {"allOf": [{"type": "object"}, {"$ref": "#/$defs/a"}]}}}, ["#/$defs/a"]),
    ],
    ids=str,
)
def test_cycles_of_references(schema: dict[str, Any], cycle: list[str] | None) -> None:
    assert find_reference_cycle(schema) == cycle


def test_post_order_of_references() -> None:
    within = {"a": "bc", "b": "c", "c": "", "d": "e", "e": "d"}
    assert "".join(postorder("aad", within.__getitem__)) in ("cbaed", "edcba")
    # deeper than Python's stack
    assert postorder([0], lambda number: [number + 1] if number < 5000 else [])[0] == 5000


@pytest.mark.parametrize(
    "letters",
    [
        *("a", "a\n", " ", '"', '"\\', "[", "[\\", "{", "{1,", "(", "/", "/a", "a[", "a.1", "~1..", "?", "\t"),
        *("%json ", "%json{", '%json {"a":"', "x: x\n", "x: ((a){9})\n", "x ::= x{9}\n"),
    ],
)
def test_counting_takes_linear_time(letters: str) -> None:
    for count in (lark_size, gbnf_size):
        started = time.thread_time()
        count(letters * (100_000 // len(letters)), LIMIT)
        # it takes a tenth of that; a quadratic algorithm would take minutes
        assert time.thread_time() - started < 3.0


def test_chains_of_references_take_no_time() -> None:
    chain = {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(5000)}}
    started = time.thread_time()
    assert find_reference_cycle(chain) is None
    assert schema_size(chain, LIMIT) < 10_003
    assert time.thread_time() - started < 3.0
