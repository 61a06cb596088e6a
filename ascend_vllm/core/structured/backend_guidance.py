"""Grammar backend on llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np

from ascend_vllm.core.structured.constraint import Constraint, ConstraintKind, Whitespace
from ascend_vllm.core.structured.grammar import (
    Bitmask,
    CompiledGrammar,
    Grammar,
    GrammarBackend,
    GrammarError,
    choice_regex,
)
from ascend_vllm.core.structured.json_schema import schemas_in
from ascend_vllm.core.structured.vocabulary import Vocabulary

# The library does not report the size of a grammar. It is estimated as this minimum, plus the lexer states that
# matchers share, which are created while masks are computed, up to a limit.
_MIN_BYTES = 256 << 10
_BYTES_PER_SECOND = 200 << 20
_MAX_LEXER_STATES = 100_000
_BYTES_PER_STATE = 1 << 10

# keyword of the library's options in a schema
_OPTIONS = "x-guidance"
# where a schema begins in Lark's notation; strings, comments and expressions are matched too, so that they are
# skipped
_LARK_SCHEMA = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|(?://|\#)[^\n]*+|/(?:[^/\\\n]|\\.)++/|(?P<schema>%json\s*+)(?=\{)')


class LLGuidance(Grammar):
    """A matcher of the library, over the vocabulary and one more token, the library's end of text."""

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        ids = list(token_ids)
        # consuming tokens that do not match would put the matcher into a permanent error state
        if self.matcher.validate_tokens(ids) < len(ids) or not self.matcher.consume_tokens(ids):
            return False
        self.num_accepted += len(ids)
        return True

    def fill_bitmask(self, row: Bitmask) -> None:
        mask = np.zeros((1, _num_words(self._num_tokens + 1)), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self.matcher, mask)
        if self.matcher.is_error():
            # it has exceeded one of the library's limits, permanently
            mask[:] = 0
        _clear_library_eos(mask, self._num_tokens)
        row[:] = mask[0, : len(row)]

    def _rollback(self, num_tokens: int) -> None:
        if num_tokens and not self.matcher.rollback(num_tokens):
            raise ValueError(self.matcher.get_error())

    @property
    def is_accepting(self) -> bool:
        return bool(self.matcher.is_accepting())

    @property
    def is_terminated(self) -> bool:
        return bool(self.matcher.is_accepting() and self.matcher.is_stopped())


class _Compiled(CompiledGrammar):
    def __init__(self, matcher: llguidance.LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._num_compiled_bytes = _MIN_BYTES
        self._mask_s = 0.0

    def start(self) -> Grammar:
        return LLGuidance(self._matcher.deep_copy(), self._num_tokens)

    @property
    def num_bytes(self) -> int:
        num_state_bytes = min(int(self._mask_s * _BYTES_PER_SECOND), _MAX_LEXER_STATES * _BYTES_PER_STATE)
        return self._num_compiled_bytes + num_state_bytes

    def set_measured_bytes(self, num_bytes: int) -> None:
        self._num_compiled_bytes = max(num_bytes, _MIN_BYTES)

    def add_mask_time(self, seconds: float) -> None:
        self._mask_s += seconds


class _TokenizerAdapter:
    """A vocabulary with the interface that the library expects."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        # the library requires an end-of-text token and includes it in masks, so it gets one of its own
        self.eos_token_id = vocabulary.size
        self.tokens = [*vocabulary.tokens, b"<end>"]
        self.special_token_ids = [self.eos_token_id]
        self._encode = vocabulary.encode
        self._ids = {token: id_ for id_, token in enumerate(vocabulary.tokens) if token}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenises a text; where a grammar allows one text only, the library allows only its canonical tokens."""
        if self._encode is not None:
            try:
                ids = self._encode(text.decode())
            except UnicodeDecodeError:
                ids = []
            # unless the tokenizer has added a space
            if b"".join(self.tokens[id_] for id_ in ids if id_ < self.eos_token_id) == text:
                return ids
        return self._longest_tokens(text)

    def _longest_tokens(self, text: bytes) -> list[int]:
        ids = []
        while text:
            lengths = range(min(self._longest, len(text)), 0, -1)
            length = next((length for length in lengths if text[:length] in self._ids), None)
            if length is not None:
                ids.append(self._ids[text[:length]])
            text = text[length or 1 :]
        return ids


class LLGuidanceBackend(GrammarBackend):
    """The library for one vocabulary.

    Args:
        vocabulary: of the model.
        num_threads: that a batch of bitmasks may use.
    """

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self._num_tokens = vocabulary.size
        wrapper = llguidance.TokenizerWrapper(_TokenizerAdapter(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapper)
        self._executor = llguidance.LLExecutor(num_threads)
        self._limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            grammar = _grammar_of(constraint)
        except GrammarError:
            raise
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise GrammarError(str(error)) from None
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_one_line(matcher.get_error()))
        # the library often finds a grammar too large only when it computes the first mask
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        if trial.is_error():
            raise GrammarError(_one_line(trial.get_error()))
        return _Compiled(matcher, self._num_tokens)

    def pack(self, compiled: CompiledGrammar, max_bytes: int) -> None:
        """Returns None: the library cannot serialise grammars."""

    def unpack(self, packed: bytes) -> CompiledGrammar:
        raise NotImplementedError

    def fill_bitmasks(self, grammars: Sequence[Grammar], bitmask: Bitmask, rows: Sequence[int]) -> None:
        masks = np.zeros((len(grammars), _num_words(self._num_tokens + 1)), np.int32)
        matchers = [grammar.matcher for grammar in grammars if isinstance(grammar, LLGuidance)]
        indexed = list(zip(matchers, range(len(matchers)), strict=True))
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, indexed, masks)
        masks[[matcher.is_error() for matcher in matchers]] = 0
        _clear_library_eos(masks, self._num_tokens)
        bitmask[list(rows)] = masks[:, : bitmask.shape[1]]


def _one_line(error: str) -> str:
    """The library's error messages, without its excerpts of the grammar."""
    lines = [line.strip() for line in error.removesuffix("<non-verbose/>").strip().splitlines()]
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return " ".join(messages) or lines[0]


def _num_words(num_tokens: int) -> int:
    return -(-num_tokens // 32)


def _clear_library_eos(masks: Bitmask, num_tokens: int) -> None:
    """Clears the bit of the library's own end-of-text token."""
    masks.view(np.uint32)[:, num_tokens // 32] &= np.uint32(0xFFFFFFFF ^ 1 << num_tokens % 32)


def _grammar_of(constraint: Constraint) -> str:
    matcher, text = llguidance.LLMatcher, constraint.text
    match constraint.kind:
        case ConstraintKind.JSON:
            return _schema_grammar(constraint)
        case ConstraintKind.REGEX:
            return matcher.grammar_from_regex(text)
        case ConstraintKind.CHOICE:
            return matcher.grammar_from_regex(choice_regex(json.loads(text)))
        case ConstraintKind.GBNF:
            return llguidance.grammar_from("gbnf", text)
        case ConstraintKind.LARK:
            return matcher.grammar_from_lark(_with_bounded_whitespace(text))
        case ConstraintKind.STRUCTURAL_TAG:
            return _tags_grammar(json.loads(text))
        case ConstraintKind.NONE:
            raise GrammarError("there is no grammar")


def _schema_grammar(constraint: Constraint) -> str:
    schema = json.loads(constraint.text)
    if schema is True:
        # the library's options need an object
        schema = {}
    if not constraint.additional_properties:
        for part in list(schemas_in(schema)):
            if isinstance(part.get("properties"), dict):
                part.setdefault("additionalProperties", False)
    overrides: dict[str, Any] = {}
    if constraint.whitespace_pattern is not None:
        overrides["whitespace_pattern"] = constraint.whitespace_pattern
    elif constraint.whitespace is Whitespace.NONE:
        overrides["whitespace_flexible"] = False
    elif isinstance(schema, dict):
        schema = _with_whitespace(schema, constraint.whitespace)
    # the library's TypedDict is not there at run time
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)  # type: ignore[arg-type]


def _with_whitespace(schema: dict[str, Any], whitespace: Whitespace) -> dict[str, Any]:
    """A schema with the library's option for the whitespace, which it allows at most once between two tokens.

    An option of the schema's own takes precedence.
    """
    return schema | {_OPTIONS: {"whitespace_pattern": whitespace.value} | schema.get(_OPTIONS, {})}


def _with_bounded_whitespace(grammar: str) -> str:
    """A grammar in Lark's notation whose JSON schemas have the option for whitespace."""
    parts, index = [], 0
    while (match := _LARK_SCHEMA.search(grammar, index)) is not None:
        parts.append(grammar[index : match.end()])
        index = match.end()
        if match["schema"] is None:
            continue
        try:
            schema, index = json.JSONDecoder().raw_decode(grammar, index)
        except (ValueError, RecursionError):
            return grammar  # invalid: the library says why
        parts.append(json.dumps(_with_whitespace(schema, Whitespace.LAYOUT)))
    return "".join(parts) + grammar[index:]


def _tags_grammar(tag: Any) -> str:
    """The grammar of structural tags in their legacy form: structures, and triggers that are prefixes of `begin`."""
    if not isinstance(tag, dict) or "structures" not in tag:
        raise GrammarError("only structural tags with structures and triggers are supported")
    tags = []
    for item in tag["structures"]:
        trigger = next((trigger for trigger in tag["triggers"] if item["begin"].startswith(trigger)), None)
        if trigger is None:
            raise GrammarError(f"no trigger is a prefix of {item['begin']!r}")
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=item["begin"], grammar=item["schema"], end=item["end"])
        )
    return _with_bounded_whitespace(llguidance.StructTag.to_grammar(tags, assume_special=False))
