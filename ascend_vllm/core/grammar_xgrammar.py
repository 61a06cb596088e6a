"""Grammars by xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xgrammar

from ascend_vllm.core.constraint import Constraint, ConstraintKind
from ascend_vllm.core.grammar import Bitmask, CompiledGrammar, Grammar, GrammarBackend, GrammarError, choice_regex
from ascend_vllm.core.vocabulary import Vocabulary

# Where and when the library noticed an error; not for the eyes of clients.
_SOURCE_PLACE = re.compile(r"^\[[^]]*\] \S+:\d+: ")

# Keywords of JSON schema that the library passes over in silence, so that texts could break them.
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
        # taken, but its patterns are matched against whole names
        "patternProperties",
    }
)
# keywords whose values map names, which are no keywords, to schemas
_NAMED_SCHEMAS = frozenset({"properties", "$defs", "definitions"})
# keywords whose values are no schemas
_VALUES = frozenset({"enum", "const", "default", "examples", "required"})


class XGrammar(Grammar):
    """A matcher of the library.

    Args:
        compiled: the library's.
        num_words: W.
    """

    def __init__(self, compiled: Any, num_words: int) -> None:
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self._num_words = num_words
        self._num_accepted = 0

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        for count, token_id in enumerate(token_ids):
            if not self.matcher.accept_token(token_id):
                self.matcher.rollback(count)
                return False
        self._num_accepted += len(token_ids)
        return True

    def fill_bitmask(self, row: Bitmask) -> None:
        self.matcher.fill_next_token_bitmask(row[None])

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > self._num_accepted:
            raise ValueError(f"{num_tokens} tokens are to be taken back, {self._num_accepted} were accepted")
        self.matcher.rollback(num_tokens)
        self._num_accepted -= num_tokens

    @property
    def is_accepting(self) -> bool:
        return bool(self.matcher.is_completed())

    @property
    def is_terminated(self) -> bool:
        if not self.is_accepting:
            return False
        row = np.zeros(self._num_words, np.int32)
        self.fill_bitmask(row)
        return not row.any()


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: Any, num_words: int) -> None:
        self._compiled = compiled
        self._num_words = num_words

    def start(self) -> Grammar:
        return XGrammar(self._compiled, self._num_words)

    @property
    def num_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)


class XGrammarBackend(GrammarBackend):
    """The library for one vocabulary.

    Args:
        vocabulary: of the model.
        num_threads: that a compilation, or a batch of bitmasks, may use.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._num_words = vocabulary.num_words
        # ends are not the library's matter, so it knows of no stop tokens; nor of special ones, whose text is empty
        info = xgrammar.TokenizerInfo(
            vocabulary.tokens, xgrammar.VocabType.RAW, vocab_size=vocabulary.size, stop_token_ids=[]
        )
        # grammars are kept by core/structured_output.py
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(num_threads)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            return _Compiled(self._compile(constraint), self._num_words)
        except GrammarError:
            raise
        except Exception as error:  # the library raises RuntimeError, ValueError, TypeError and classes of its own
            raise GrammarError(_SOURCE_PLACE.sub("", str(error)).strip()) from None

    def fill_bitmasks(self, grammars: Sequence[Grammar], bitmask: Bitmask, rows: Sequence[int]) -> None:
        matchers = [grammar.matcher for grammar in grammars if isinstance(grammar, XGrammar)]
        self._batch.batch_fill_next_token_bitmask(matchers, bitmask, list(rows))

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
        # properties that a schema with properties does not name are never written, whatever the settings
        return self._compiler.compile_json_schema(
            constraint.text,
            any_whitespace=constraint.any_whitespace,
            separators=None if constraint.any_whitespace else (",", ":"),
        )

    def _compile_structural_tag(self, tag: Any) -> Any:
        if isinstance(tag, dict) and "structures" in tag:
            items = [
                xgrammar.StructuralTagItem(begin=item["begin"], schema=_as_text(item["schema"]), end=item["end"])
                for item in tag["structures"]
            ]
            tag = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
        return self._compiler.compile_structural_tag(tag)


def ignored_keywords(schema: Any) -> set[str]:
    """Keywords in a schema that the library would not enforce."""
    found = set()
    for keyword, value in _keywords(schema):
        if keyword in _IGNORED_KEYWORDS:
            found.add(keyword)
        elif keyword == "allOf" and isinstance(value, list) and len(value) > 1:
            found.add("allOf")
        elif keyword == "$ref" and not str(value).startswith("#"):
            found.add(f"$ref {value}")
    for part in _schemas(schema):
        if "pattern" in part and ("minLength" in part or "maxLength" in part):
            found.add("pattern together with minLength or maxLength")
    return found


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    for part in _schemas(schema):
        yield from part.items()


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all within it."""
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, list):
            todo += part
        if not isinstance(part, dict):
            continue
        yield part
        for keyword, value in part.items():
            if keyword in _VALUES:
                continue
            if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
                todo += value.values()
            else:
                todo.append(value)


def without_newline_dots(regex: str) -> str:
    r"""A regular expression whose dots do not match line breaks, as in Python; to the library they match anything.

    Example:
        >>> without_newline_dots(r"a.[.]\.")
        'a[^\\n][.]\\.'
    """
    parts = []
    in_class = False
    index = 0
    while index < len(regex):
        character = regex[index]
        if character == "\\":
            parts.append(regex[index : index + 2])
            index += 2
            continue
        if character == "[" and not in_class:
            in_class = True
        elif character == "]":
            in_class = False
        parts.append(r"[^\n]" if character == "." and not in_class else character)
        index += 1
    return "".join(parts)


def _as_text(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)
