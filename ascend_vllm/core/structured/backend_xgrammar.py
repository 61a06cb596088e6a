"""Grammar backend on xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from ascend_vllm.core.structured.constraint import Constraint, ConstraintKind, Whitespace
from ascend_vllm.core.structured.grammar import (
    Bitmask,
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarError,
    choice_regex,
    last_word,
)
from ascend_vllm.core.structured.json_schema import schemas_in
from ascend_vllm.core.structured.regex_size import end_of_class
from ascend_vllm.core.structured.vocabulary import Vocabulary

# time and source location in the library's error messages, removed for clients
_SOURCE_LOCATION = re.compile(r"^\[[^]]*\] \S+:\d+: ")

# size of each compiler's cache of subgrammars
_CACHE_BYTES = 32 << 20
_USUAL_SCHEMA = """{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c":
    {"type": "number"}, "d": {"type": "boolean"}, "e": {"type": "array", "items": {"type": "string"}}, "f": {}},
    "required": ["a"]}"""
# measured size of a serialised grammar: bytes per character of the grammar's text and rule, and per byte of its masks
# in memory
_AUTOMATON_BYTES = 4
_BYTES_PER_MASK_BYTE = 2

# In the text of a schema's grammar the library writes whitespace as this character class; strings and other character
# classes are matched too, so that they are not searched.
_ANY_WHITESPACE = re.compile(r'"(?:[^"\\]|\\.)*+"|(?P<whitespace>\[ \\n\\r\\t\]\*)|\[(?:[^\]\\]|\\.)*+\]')
# What replaces it. A run of 64 spaces has a state for each, and a mask of each state is computed for each schema.
# With blocks of 16 spaces there are fewer, and their masks are small, since what may follow stands after "(=":
# otherwise all tokens that begin with a space would be tried at run time. The library takes what stands there for all
# that may follow where a rule is used in one place only; these are used in several.
_REPLACEMENTS = {Whitespace.NONE: '""', Whitespace.SPACE: "[ ]{0,1}", Whitespace.LAYOUT: "json_layout"}
_LAYOUT_RULES = r"""
json_layout ::= json_block{0,3} json_spaces | "\n" json_block{0,3} json_spaces
json_block ::= Regex("[ ]{16}") (=(json_after_block))
json_spaces ::= Regex("[ ]{0,16}") (=(json_token))
json_after_block ::= " " | json_token
json_token ::= [{}\[\],:"\-0-9] | "true" | "false" | "null"
"""
# whitespace characters between two elements of a structural tag in XML
_MAX_XML_WHITESPACE = 65

# first byte of a packed grammar: the vocabulary that it was compiled for
_JSON_MARK, _TEXT_MARK = b"j", b"t"

_CONTROLS = bytes({*range(0x20)} - {*b"\r\n"})

# keywords of JSON schema that the library silently ignores
_IGNORED_KEYWORDS = frozenset(
    {
        "multipleOf",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "not",
        "if",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
        # supported, but its patterns are matched against whole names
        "patternProperties",
    }
)


class XGrammar(Grammar):
    """A matcher of the library."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for count, token_id in enumerate(token_ids):
            if not self.matcher.accept_token(token_id):
                self.matcher.rollback(count)
                return False
        self.num_accepted += len(token_ids)
        return True

    def fill_bitmask(self, row: Bitmask) -> None:
        self.matcher.fill_next_token_bitmask(row[None])
        # the library also sets bits behind the vocabulary
        row[-1:] &= last_word(self._num_tokens)

    def _rollback(self, num_tokens: int) -> None:
        self.matcher.rollback(num_tokens)

    @property
    def is_accepting(self) -> bool:
        return bool(self.matcher.is_completed())

    @property
    def is_terminated(self) -> bool:
        if not self.is_accepting:
            return False
        row = np.zeros(-(-self._num_tokens // 32), np.int32)
        self.fill_bitmask(row)
        return not row.any()


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: Any, num_tokens: int, *, is_json: bool) -> None:
        self.library = compiled
        self._num_tokens = num_tokens
        # whether it is compiled for the vocabulary without control characters
        self.is_json = is_json

    def start(self) -> Grammar:
        return XGrammar(xgrammar.GrammarMatcher(self.library), self._num_tokens)

    @property
    def num_bytes(self) -> int:
        return int(self.library.memory_size_bytes)


class XGrammarBackend(GrammarBackend):
    """The library for one vocabulary.

    Args:
        vocabulary: of the model.
        num_threads: that a compilation, or a batch of bitmasks, may use.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._num_tokens = vocabulary.size
        # without stop tokens, which `output_constraint` handles, and special tokens, whose text is empty
        self._info = _make_info(vocabulary.tokens)
        self._compiler = _make_compiler(self._info, num_threads)
        # The library allows control characters in strings of limited length, which JSON forbids. JSON needs them only
        # as whitespace, where it can do without tabs.
        plain = [token if token == token.translate(None, _CONTROLS) else b"" for token in vocabulary.tokens]
        self._json_info = _make_info(plain)
        self._json_compiler = _make_compiler(self._json_info, num_threads)
        self._batch = xgrammar.BatchGrammarMatcher(num_threads)
        # fills the cache with the parts that most schemas share
        for whitespace in Whitespace:
            self._json_compiler.compile_grammar(schema_grammar(_USUAL_SCHEMA, whitespace))

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            is_json = constraint.kind is ConstraintKind.JSON
            return _Compiled(self._compile(constraint), self._num_tokens, is_json=is_json)
        except GrammarError:
            raise
        except Exception as error:  # the library raises RuntimeError, ValueError, TypeError and classes of its own
            raise GrammarError(_SOURCE_LOCATION.sub("", str(error)).strip().partition("\n")[0]) from None

    def fill_bitmasks(self, grammars: Sequence[Grammar], bitmask: Bitmask, rows: Sequence[int]) -> None:
        matchers = [grammar.matcher for grammar in grammars if isinstance(grammar, XGrammar)]
        self._batch.batch_fill_next_token_bitmask(matchers, bitmask, list(rows))
        bitmask[list(rows), -1] &= last_word(self._num_tokens)

    def pack(self, compiled: CompiledGrammar, max_bytes: int) -> bytes | None:
        assert isinstance(compiled, _Compiled)
        # The library serialises the automatons of all rules once per rule, which is a line of the grammar's text;
        # their size is proportional to the length of the text. The masks are added to that.
        text = str(compiled.library.grammar)
        expected = _AUTOMATON_BYTES * len(text) * text.count("\n") + _BYTES_PER_MASK_BYTE * compiled.num_bytes
        if expected > max_bytes:
            return None
        serialised: str = compiled.library.serialize_json()
        return (_JSON_MARK if compiled.is_json else _TEXT_MARK) + serialised.encode()

    def unpack(self, packed: bytes) -> CompiledGrammar:
        is_json = packed.startswith(_JSON_MARK)
        info = self._json_info if is_json else self._info
        library = xgrammar.CompiledGrammar.deserialize_json(str(memoryview(packed)[1:], "utf-8"), info)
        return _Compiled(library, self._num_tokens, is_json=is_json)

    def _compile(self, constraint: Constraint) -> Any:
        compiler, text = self._compiler, constraint.text
        match constraint.kind:
            case ConstraintKind.JSON:
                return self._compile_schema(constraint)
            case ConstraintKind.REGEX:
                return compiler.compile_regex(without_newline_dots(text))
            case ConstraintKind.CHOICE:
                return compiler.compile_regex(choice_regex(json.loads(text)))
            case ConstraintKind.GBNF:
                return compiler.compile_grammar(text)
            case ConstraintKind.LARK:
                return compiler.compile_lark(text)
            case ConstraintKind.STRUCTURAL_TAG:
                return self._compile_structural_tag(json.loads(text))

    def _compile_schema(self, constraint: Constraint) -> Any:
        if constraint.whitespace_pattern is not None:
            raise GrammarError("whitespace_pattern is not supported")
        ignored = sorted(ignored_keywords(json.loads(constraint.text)))
        if ignored:
            raise GrammarError(f"the schema uses keywords that are not supported: {', '.join(ignored)}")
        # with `properties`, the library never generates other properties, whatever the settings
        return self._json_compiler.compile_grammar(schema_grammar(constraint.text, constraint.whitespace))

    def _compile_structural_tag(self, tag: Any) -> Any:
        if isinstance(tag, dict) and "structures" in tag:
            items = [
                xgrammar.StructuralTagItem(begin=item["begin"], schema=_as_text(item["schema"]), end=item["end"])
                for item in tag["structures"]
            ]
            tag = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"]).model_dump()
        return self._compiler.compile_structural_tag(_with_bounded_whitespace(tag))


def _make_info(tokens: list[bytes]) -> Any:
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[])


def _make_compiler(info: Any, num_threads: int) -> Any:
    # its cache is for subgrammars; whole grammars are cached by core/structured/manager.py
    return xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_limit_bytes=_CACHE_BYTES)


def schema_grammar(schema: str, whitespace: Whitespace) -> str:
    """The grammar of a JSON schema in EBNF, with bounded whitespace.

    The library itself can only bound the number of whitespace characters, and writes ", " in values of any type where
    it should write no whitespace.
    """
    text = str(xgrammar.Grammar.from_json_schema(schema))
    bounded = _ANY_WHITESPACE.sub(lambda match: _REPLACEMENTS[whitespace] if match["whitespace"] else match[0], text)
    return bounded + (_LAYOUT_RULES if whitespace is Whitespace.LAYOUT else "")


def _with_bounded_whitespace(part: Any) -> Any:
    """A structural tag, or a part of it, whose schemas have become grammars with bounded whitespace.

    A bound of the request's own takes precedence.
    """
    if isinstance(part, list):
        return [_with_bounded_whitespace(item) for item in part]
    if not isinstance(part, dict):
        return part
    if "json_schema" not in part or part.get("max_whitespace_cnt") is not None:
        return {key: _with_bounded_whitespace(value) for key, value in part.items()}
    is_plain = part.get("type") == "json_schema" and part.get("style", "json") == "json"
    if not is_plain or part.get("excludes") or part.get("any_order"):
        return part | {"max_whitespace_cnt": _MAX_XML_WHITESPACE}
    return {"type": "grammar", "grammar": schema_grammar(_as_text(part["json_schema"]), Whitespace.LAYOUT)}


def ignored_keywords(schema: Any) -> set[str]:
    """Keywords of a schema that the library would not enforce."""
    found: set[str] = set()
    for part in schemas_in(schema):
        found |= _IGNORED_KEYWORDS & part.keys()
        if isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1:
            found.add("allOf")
        if "$ref" in part and not str(part["$ref"]).startswith("#"):
            found.add(f"$ref {part['$ref']}")
        if "pattern" in part and ("minLength" in part or "maxLength" in part):
            found.add("pattern together with minLength or maxLength")
    return found


def without_newline_dots(regex: str) -> str:
    r"""Replaces dots so that they do not match line breaks, as in Python; the library's dots match anything.

    Example:
        >>> without_newline_dots(r"a.[.]\.")
        'a[^\\n][.]\\.'
    """
    parts = []
    index = 0
    while index < len(regex):
        character = regex[index]
        end = index + (2 if character == "\\" else 1)
        if character == "[":
            end = end_of_class(regex, index) + 1
        parts.append(r"[^\n]" if character == "." else regex[index:end])
        index = end
    return "".join(parts)


def _as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
