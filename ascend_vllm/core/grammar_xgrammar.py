"""Grammars by xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from ascend_vllm.core.constraint import Constraint, ConstraintKind
from ascend_vllm.core.grammar import (
    Bitmask,
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarError,
    choice_regex,
    last_word,
)
from ascend_vllm.core.json_schema import schemas_in
from ascend_vllm.core.regex_size import end_of_class
from ascend_vllm.core.vocabulary import Vocabulary

# Where and when the library noticed an error; not for the eyes of clients.
_SOURCE_PLACE = re.compile(r"^\[[^]]*\] \S+:\d+: ")

_CONTROLS = bytes({*range(0x20)} - {*b"\r\n"})

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


class XGrammar(Grammar):
    """A matcher of the library.

    Args:
        compiled: the library's.
        num_tokens: V.
    """

    def __init__(self, compiled: Any, num_tokens: int) -> None:
        self.matcher = xgrammar.GrammarMatcher(compiled)
        self._num_tokens = num_tokens
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
        # the library sets bits behind the vocabulary too
        row[-1:] &= last_word(self._num_tokens)

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
        row = np.zeros(-(-self._num_tokens // 32), np.int32)
        self.fill_bitmask(row)
        return not row.any()


class _Compiled(CompiledGrammar):
    def __init__(self, compiled: Any, num_tokens: int) -> None:
        self._compiled = compiled
        self._num_tokens = num_tokens

    def start(self) -> Grammar:
        return XGrammar(self._compiled, self._num_tokens)

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
        self._num_tokens = vocabulary.size
        # ends are not the library's matter, so it knows of no stop tokens; nor of special ones, whose text is empty
        self._compiler = _compiler_of(vocabulary.tokens, num_threads)
        # JSON has no control characters but in its whitespace, which can do without tabs; the library would let them
        # into strings of limited length
        plain = [token if token == token.translate(None, _CONTROLS) else b"" for token in vocabulary.tokens]
        self._json_compiler = _compiler_of(plain, num_threads)
        self._batch = xgrammar.BatchGrammarMatcher(num_threads)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            return _Compiled(self._compile(constraint), self._num_tokens)
        except GrammarError:
            raise
        except Exception as error:  # the library raises RuntimeError, ValueError, TypeError and classes of its own
            raise GrammarError(_SOURCE_PLACE.sub("", str(error)).strip().partition("\n")[0]) from None

    def fill_bitmasks(self, grammars: Sequence[Grammar], bitmask: Bitmask, rows: Sequence[int]) -> None:
        matchers = [grammar.matcher for grammar in grammars if isinstance(grammar, XGrammar)]
        self._batch.batch_fill_next_token_bitmask(matchers, bitmask, list(rows))
        bitmask[list(rows), -1] &= last_word(self._num_tokens)

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
        return self._json_compiler.compile_json_schema(
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


def _compiler_of(tokens: list[bytes], num_threads: int) -> Any:
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[])
    # grammars are kept by core/structured_output.py
    return xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)


def ignored_keywords(schema: Any) -> set[str]:
    """Keywords in a schema that the library would not enforce."""
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
    r"""A regular expression whose dots do not match line breaks, as in Python; to the library they match anything.

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
