"""Rejects constraints that would take a library too much time or memory, before it sees them.

This runs in the processes that compile grammars, not between steps.
"""

from __future__ import annotations

import re
from typing import Any

from ascend_vllm.core.structured.constraint import (
    GBNF_RULE,
    MAX_DEPTH,
    Constraint,
    ConstraintKind,
    load_json,
    too_deep,
)
from ascend_vllm.core.structured.grammar_size import gbnf_size, lark_size
from ascend_vllm.core.structured.json_schema import depth_exceeds, find_reference_cycle, schema_size, schemas_in
from ascend_vllm.core.structured.regex_size import expanded_size
from ascend_vllm.errors import RequestError

# characters of a regular expression with its counted repetitions expanded
MAX_REGEX_SIZE = 50_000
# symbols of a grammar with its rules and repetitions expanded
MAX_GRAMMAR_SIZE = 10_000_000
# values and characters that the bounds of a schema allow, multiplied for nested arrays
MAX_SCHEMA_SIZE = 1_000_000_000
# rules of a grammar
MAX_RULES = 1000

_FIELD = "structured_outputs"
_LARK_RULE = re.compile(r"^[ \t]*+[?!]?\w++[^:\n\"/]*+:", re.MULTILINE)


def check_constraint(constraint: Constraint) -> None:
    """Checks nesting depth, size with expanded repetitions, and circular references.

    Raises:
        RequestError: a limit is exceeded; names it.
    """
    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON:
            _check_schema("json", load_json("json", text))
        case ConstraintKind.REGEX:
            _check_regex("regex", text)
        case ConstraintKind.GBNF | ConstraintKind.LARK:
            _check_grammar("grammar", text, is_lark=constraint.kind is ConstraintKind.LARK)
        case ConstraintKind.STRUCTURAL_TAG:
            _check_tag(load_json("structural_tag", text))
    if constraint.whitespace_pattern is not None:
        _check_regex("whitespace_pattern", constraint.whitespace_pattern)


def _check_schema(name: str, schema: Any) -> None:
    _check_depth(name, schema)
    for part in schemas_in(schema):
        _check_patterns(part)
    cycle = find_reference_cycle(schema)
    if cycle is not None:
        raise RequestError(f"{name} has a circular $ref: {' -> '.join(cycle)}.", _FIELD)
    _check_limit(name, schema_size(schema, MAX_SCHEMA_SIZE), MAX_SCHEMA_SIZE, "its bounds together ask for {} values")


def _check_tag(tag: Any) -> None:
    """Checks structural tags, which may contain schemas, expressions and grammars anywhere."""
    _check_depth("structural_tag", tag)
    for part in schemas_in(tag):
        _check_patterns(part)
        for keyword in ("json_schema", "schema"):
            if isinstance(part.get(keyword), dict):
                _check_schema("structural_tag", part[keyword])
        if isinstance(part.get("grammar"), str):
            _check_grammar("structural_tag", part["grammar"], is_lark=GBNF_RULE.search(part["grammar"]) is None)


def _check_patterns(part: dict[str, Any]) -> None:
    if isinstance(part.get("pattern"), str):
        _check_regex("pattern", part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        for pattern in part["patternProperties"]:
            _check_regex("patternProperties", pattern)


def _check_grammar(name: str, grammar: str, *, is_lark: bool) -> None:
    num_rules = len((_LARK_RULE if is_lark else GBNF_RULE).findall(grammar))
    if num_rules > MAX_RULES:
        raise RequestError(f"{name} has {num_rules} rules, the limit is {MAX_RULES}.", _FIELD)
    size = (lark_size if is_lark else gbnf_size)(grammar, MAX_GRAMMAR_SIZE)
    _check_limit(name, size, MAX_GRAMMAR_SIZE, "with its repetitions written out it has {} symbols")


def _check_regex(name: str, regex: str) -> None:
    _check_limit(name, expanded_size(regex), MAX_REGEX_SIZE, "with its repetitions written out it has {} characters")


def _check_depth(name: str, value: Any) -> None:
    if depth_exceeds(value, MAX_DEPTH):
        raise too_deep(name)


def _check_limit(name: str, size: int, limit: int, what: str) -> None:
    if size > limit:
        # the size may have a million digits
        shown = str(size) if size < 10**12 else "more than 10^12"
        raise RequestError(f"{name} is too large: {what.format(shown)}, the limit is {limit}.", _FIELD)
