"""JSON's whitespace: what each constraint allows between two tokens, with both libraries."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.core.structured.backend_guidance import LLGuidanceBackend
from ascend_vllm.core.structured.backend_xgrammar import XGrammarBackend
from ascend_vllm.core.structured.constraint import make_constraint
from ascend_vllm.core.structured.grammar import CompiledGrammar, GrammarBackend
from ascend_vllm.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from tests.core.grammar_vocabulary import allowed, make_vocabulary, matches, spell
from tests.json_schemas import BOUNDED, natural_length

VOCABULARY = make_vocabulary()
BACKENDS: dict[str, GrammarBackend] = {
    "xgrammar": XGrammarBackend(VOCABULARY, 2),
    "guidance": LLGuidanceBackend(VOCABULARY, 2),
}
LAYOUT = ["", " ", "\n", "\n  ", " " * 64, "\n" + " " * 64]
TOO_MUCH = ["\n\n", " \n", "\n \n", " " * 65, "\n" + " " * 65, "\r\n"]

OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "sizes": {"type": "array", "items": {"type": "number"}},
        "kind": {"enum": ["cat", 1]},
        "free": {"type": "object"},
        "none": {"type": "array", "maxItems": 0},
    },
    "required": ["name", "sizes", "kind"],
}
TAG = {"begin": "<f>", "schema": OBJECT, "end": "</f>"}
LEGACY = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f"]}
FORMAT = {"type": "json_schema", "json_schema": OBJECT}
TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"type": "tag", "begin": "<f>", "content": FORMAT, "end": "</f>"}],
    },
}
TOKENS = '{ "name" : "a b" , "sizes" : [ 1.5 , -2 ] , "kind" : "cat" , "free" : { "x" : [ ] } , "none" : [ ] }'
# with what looks like a schema, but is not
LARK = (
    f'start: OPEN json CLOSE // %json {{\nOPEN: "<f>"\njson: %json {json.dumps(OBJECT)}\nCLOSE: /<.%json \\{{|<.f>/'
)
# constraint → tokens of a text
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "json_object": ({"json_object": True}, '{ "a" : [ 1 , { "b" : null , "c" : "d e" } , [ ] ] , "f" : { } }'),
    "json": ({"json": True}, '[ 1 , { } , [ [ "a b" ] , true ] ]'),
    "schema": ({"json": OBJECT}, TOKENS),
    "map": ({"json": {"type": "object", "additionalProperties": {"type": "null"}}}, '{ "a" : null , "b" : null }'),
    "reference": (
        {"json": {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
        "[ [ ] , [ [ ] ] ]",
    ),
    "legacy tags": ({"structural_tag": json.dumps(LEGACY)}, TOKENS),
    "tags": ({"structural_tag": json.dumps(TAGS)}, TOKENS),
    "tags alone": ({"structural_tag": json.dumps({"type": "structural_tag", "format": FORMAT})}, TOKENS),
    "lark": ({"grammar": LARK}, TOKENS),
}
# llguidance knows the legacy form of tags only; xgrammar bounds no whitespace in Lark, for which it comes second
NOT_BOUNDED = {("tags", "guidance"), ("tags alone", "guidance"), ("lark", "xgrammar")}


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    return BACKENDS[request.param]


def compiled(
    backend: GrammarBackend, params: StructuredOutputsParams, config: StructuredOutputsConfig | None = None
) -> CompiledGrammar:
    return backend.compile(make_constraint(params, config or StructuredOutputsConfig()))


def is_accepted(grammar: CompiledGrammar, text: str) -> bool:
    started = grammar.start()
    return started.accept_tokens(spell(text, VOCABULARY, longest=False)) and started.is_accepting


def check_whitespace(grammar: CompiledGrammar, name: str, good: list[str], bad: list[str]) -> None:
    """Checks which whitespace may stand at each place of a case's text."""
    tokens = re.findall(r'"[^"]*"|[^ "]+', CASES[name][1])
    head, tail = ("<f>", "</f>") if name in ("tags", "legacy tags", "lark") else ("", "")
    for run in good:
        assert is_accepted(grammar, head + run.join(tokens) + tail), run
    for index in range(1, len(tokens)):
        before, after = head + "".join(tokens[:index]), "".join(tokens[index:]) + tail
        assert [run for run in good if not is_accepted(grammar, before + run + after)] == [], (before, after)
        assert [run for run in bad if is_accepted(grammar, before + run + after)] == [], (before, after)


@pytest.mark.parametrize(
    ("library", "name"),
    [(library, name) for library in BACKENDS for name in CASES if (name, library) not in NOT_BOUNDED],
)
def test_an_indented_layout_and_no_more(library: str, name: str) -> None:
    grammar = compiled(BACKENDS[library], StructuredOutputsParams(**CASES[name][0]))
    check_whitespace(grammar, name, LAYOUT, TOO_MUCH)


@pytest.mark.parametrize("name", ["json", "schema", "map", "reference"])
def test_guided_json_has_one_space_at_most(backend: GrammarBackend, name: str) -> None:
    params = GuidedDecodingParams(**CASES[name][0])
    check_whitespace(compiled(backend, params), name, ["", " "], ["  ", "\n", "\n ", *TOO_MUCH])
    # the server's flag forbids that too
    compact = StructuredOutputsConfig(disable_any_whitespace=True)
    check_whitespace(compiled(backend, params, compact), name, [""], [" ", "\n"])


def test_usual_layouts_are_accepted_token_by_token(backend: GrammarBackend) -> None:
    value = {"name": "x", "sizes": [1, 2.5], "kind": 1, "free": {"a": {"b": []}}}
    grammar = compiled(backend, StructuredOutputsParams(json=OBJECT))
    for indent in (None, 0, 1, 2, 4, 8):
        assert matches(grammar.start(), json.dumps(value, indent=indent), VOCABULARY)
        assert matches(grammar.start(), json.dumps(value, indent=indent), VOCABULARY, longest=True)


@pytest.mark.parametrize("pattern", [r"[ \n]*", r"\s{0,200}"])
def test_a_pattern_of_the_request_s_own_frees_it(pattern: str) -> None:
    params = StructuredOutputsParams(json=OBJECT, whitespace_pattern=pattern)
    check_whitespace(compiled(BACKENDS["guidance"], params), "schema", [*LAYOUT, "\n\n \n", " " * 150], [])


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.parametrize("single_space", [False, True], ids=["layout", "single space"])
def test_a_writer_of_whitespace_comes_to_an_end(backend: GrammarBackend, name: str, single_space: bool) -> None:
    """It writes newlines and spaces as long as it may, like a weak model at temperature 0."""
    schema = BOUNDED[name]
    params = StructuredOutputsParams(json=schema, single_space=single_space)
    grammar, text = compiled(backend, params).start(), b""
    while ids := allowed(grammar, VOCABULARY):
        if len(ids) < 50:
            for id_ in ids:
                assert grammar.accept_tokens([id_]), (text, VOCABULARY.tokens[id_])
                grammar.rollback(1)
        wanted = [byte for byte in b"\n " if byte in ids] or sorted(ids)
        assert grammar.accept_tokens(wanted[:1])
        text += VOCABULARY.tokens[wanted[0]]
        assert len(text) <= natural_length(schema, 1 if single_space else 65), text
    assert grammar.is_accepting
    json.loads(text)
