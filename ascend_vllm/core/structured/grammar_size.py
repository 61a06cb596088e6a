"""Size of grammars with their rules and counted repetitions expanded.

Syntax errors are ignored here; the library that compiles the grammar reports them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ascend_vllm.core.structured.json_schema import postorder, schema_size
from ascend_vllm.core.structured.regex_size import expanded_size

# unterminated strings and classes extend to the end of the text, so that matching takes linear time
_COMMON = r"""
    (?P<string>"(?:[^"\\\n]|\\.)*+"?i?)
  | (?P<repeat>\{\s*+(?P<least>\d{0,9})\s*+(?:,\s*+(?P<most>\d{0,9})\s*+)?\}
             | ~\s*+(?P<from>\d{1,9})(?:\.\.(?P<to>\d{1,9}))?)
  | (?P<open>\()
  | (?P<close>\))
"""
_GBNF = re.compile(
    r"""
    (?P<comment>\#[^\n]*+)
  | (?P<class>\[(?:[^\]\\]|\\.)*+\]?)
  | (?P<header>(?P<rule>[\w-]++)\s*+::=)
  | (?P<name>[\w-]++)
  |"""
    + _COMMON,
    re.VERBOSE,
)
_LARK = re.compile(
    r"""
    (?P<comment>(?://|\#)[^\n]*+)
  | (?P<regex>/(?P<pattern>(?:[^/\\\n]|\\.)++)/?[a-z]*+)
  | (?P<header>^[ \t]*+[?!]?(?P<rule>\w++)(?:\.-?\d++)?(?:\[[^\]\n]*+\])?[ \t]*+:)
  | (?P<embedded>%(?:json|regex)\s*+(?=\{))
  | (?P<name>%?\w++)
  |"""
    + _COMMON,
    re.VERBOSE | re.MULTILINE,
)

# "(" or ")", a number of symbols, ("times", repetitions of the previous element), or ("rule", its name)
_Token = str | int | tuple[str, Any]


def gbnf_size(grammar: str, limit: int) -> int:
    """Expanded size of a grammar in llama.cpp's notation, capped at limit + 1 symbols.

    Example:
        >>> gbnf_size('root ::= item{3} "."\\nitem ::= [a-z]{1,10} ","', 1000)
        34
    """
    return _largest(_rules(_GBNF, grammar, limit), limit)


def lark_size(grammar: str, limit: int) -> int:
    """`gbnf_size` of a grammar in Lark's notation, with the expressions and schemas in it.

    Example:
        >>> lark_size("start: item{1000}\\nitem: /x{20}/ | WORD\\nWORD: /[a-z]+/", 100_000)
        21000
    """
    return _largest(_rules(_LARK, grammar, limit), limit)


def _rules(notation: re.Pattern[str], grammar: str, limit: int) -> dict[str, list[_Token]]:
    rules: dict[str, list[_Token]] = {}
    # those before the first rule are ignored
    tokens: list[_Token] = []
    for match in _matches(notation, grammar):
        if isinstance(match, dict):
            tokens.append(schema_size(match, limit))
        elif match.lastgroup == "header":
            # a rule may be defined in several places
            tokens = rules.setdefault(match["rule"], [])
        elif match.lastgroup == "name":
            tokens.append(("rule", match["name"]))
        elif match.lastgroup == "repeat":
            counts = (match["least"], match["most"], match["from"], match["to"])
            tokens.append(("times", max(int(count or 1) for count in counts) or 1))
        elif match.lastgroup == "regex":
            tokens.append(min(expanded_size(match["pattern"]), limit + 1))
        elif match.lastgroup in ("string", "class"):
            tokens.append(1)
        elif match.lastgroup in ("open", "close"):
            tokens.append(match[0])
    return rules


def _matches(notation: re.Pattern[str], grammar: str) -> Iterator[re.Match[str] | dict[str, Any]]:
    """The tokens of a grammar, and the JSON objects embedded in it."""
    index = 0
    while (match := notation.search(grammar, index)) is not None:
        index = match.end()
        if match.lastgroup != "embedded":
            yield match
            continue
        try:
            value, index = json.JSONDecoder().raw_decode(grammar, index)
        except (ValueError, RecursionError):
            return  # invalid
        if isinstance(value, dict):
            yield value


def _largest(rules: dict[str, list[_Token]], limit: int) -> int:
    """The size of the largest rule; a recursive reference counts as one symbol."""
    sizes: dict[str, int] = {}

    def within(name: str) -> list[str]:
        return [token[1] for token in rules[name] if isinstance(token, tuple) and token[1] in rules]

    for name in postorder(rules, within):
        sizes[name] = _rule_size(rules[name], sizes, limit)
    return max(sizes.values(), default=0)


def _rule_size(tokens: list[_Token], sizes: dict[str, int], limit: int) -> int:
    # for each open group: its size so far, and that of its last element, which a repetition multiplies
    stack = [[0, 0]]
    for token in tokens:
        if token == "(":
            stack.append([0, 0])
            continue
        size = 1
        if token == ")":
            size = stack.pop()[0] if len(stack) > 1 else 0
        elif isinstance(token, int):
            size = token
        elif isinstance(token, tuple) and token[0] == "rule":
            size = sizes.get(token[1], 1)
        elif isinstance(token, tuple):
            size = stack[-1][1] * token[1]
            stack[-1][0] -= stack[-1][1]
        group = stack[-1]
        group[0] = min(group[0] + size, limit + 1)
        group[1] = min(size, limit + 1)
    return min(sum(size for size, _ in stack), limit + 1)
