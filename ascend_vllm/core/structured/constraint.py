"""The constraint of a request, normalised so that equal constraints share a grammar.

This runs between steps, in time linear in the request's size. Checks that take longer are in `constraint_checks`.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from typing import Any

from ascend_vllm.config.structured import StructuredOutputsConfig
from ascend_vllm.errors import RequestError
from ascend_vllm.structured_outputs import MAX_BYTES, StructuredOutputsParams

# constraints beyond these, and MAX_BYTES, are rejected before they are parsed
MAX_REGEX_BYTES = 32 * 1024
MAX_WHITESPACE_BYTES = 1024
MAX_CHOICES = 8192
# nesting levels of JSON, enforced by `constraint_checks`
MAX_DEPTH = 64

_FIELD = "structured_outputs"
# head of a rule in llama.cpp's notation, never matched by Lark
GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)


class ConstraintKind(enum.Enum):
    """The notation of a constraint; the value is the request's field."""

    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    # EBNF in llama.cpp's notation (GBNF)
    GBNF = "grammar"
    LARK = "lark"
    STRUCTURAL_TAG = "structural_tag"
    # only `begin_within`
    NONE = "begin_within"


class Whitespace(enum.Enum):
    """The whitespace that JSON may have between two tokens; the value is a regular expression.

    It is always bounded: a weak model would write whitespace until its last token otherwise.
    """

    NONE = ""
    # as vLLM 0.6.3 wrote with outlines
    SPACE = " ?"
    # an indented layout
    LAYOUT = r"\n? {0,64}"


@dataclasses.dataclass(frozen=True)
class Constraint:
    """One constraint; equal ones have the same grammar.

    Attributes:
        kind: its notation.
        text: a JSON schema, regular expression, JSON list of choices, grammar or JSON of structural tags.
        backend: library that the request or the server names; "auto": any that supports the constraint.
        whitespace: that JSON may have.
        additional_properties: whether objects may have properties that the schema neither names nor forbids.
        whitespace_pattern: the request's own regular expression for JSON's whitespace; None: `whitespace` decides.
    """

    kind: ConstraintKind
    text: str
    backend: str = "auto"
    whitespace: Whitespace = Whitespace.LAYOUT
    additional_properties: bool = True
    whitespace_pattern: str | None = None

    @property
    def field(self) -> str:
        """The request's field with the constraint."""
        return "grammar" if self.kind is ConstraintKind.LARK else self.kind.value


def make_constraint(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> Constraint:
    """The constraint of a request under the server's settings.

    Raises:
        RequestError: the constraint is malformed or too large.
    """
    kind, text = _kind_and_text(params)
    _check_size(kind.value, text, MAX_REGEX_BYTES if kind is ConstraintKind.REGEX else MAX_BYTES)
    pattern = params.whitespace_pattern
    if pattern is not None and kind is not ConstraintKind.JSON:
        raise RequestError(f"whitespace_pattern goes with a JSON schema, not with {kind.value}.", _FIELD)
    if pattern is not None:
        _check_size("whitespace_pattern", pattern, MAX_WHITESPACE_BYTES)
    if pattern is not None and params.disable_any_whitespace:
        raise RequestError("whitespace_pattern and disable_any_whitespace contradict each other.", _FIELD)
    backend = params.backend or config.backend
    # xgrammar always closes objects, as vLLM uses it; so guidance does the same where it is not chosen by name
    closed = params.disable_additional_properties or config.disable_additional_properties or backend != "guidance"
    is_json = kind is ConstraintKind.JSON
    whitespace = Whitespace.LAYOUT
    if is_json and pattern is None:
        if params.disable_any_whitespace or config.disable_any_whitespace:
            whitespace = Whitespace.NONE
        elif params.single_space:
            whitespace = Whitespace.SPACE
    return Constraint(
        kind,
        text,
        backend,
        whitespace=whitespace,
        additional_properties=not (is_json and closed),
        whitespace_pattern=pattern,
    )


def _kind_and_text(params: StructuredOutputsParams) -> tuple[ConstraintKind, str]:
    if params.json_object:
        return ConstraintKind.JSON, '{"type": "object"}'
    if params.json not in (None, False):
        return ConstraintKind.JSON, _schema_text(params.json)
    if params.regex is not None:
        return ConstraintKind.REGEX, params.regex
    if params.choice is not None:
        return ConstraintKind.CHOICE, _choice_text(params.choice)
    if params.grammar is not None:
        # the rules' heads show which notation it is
        _check_size("grammar", params.grammar, MAX_BYTES)
        is_gbnf = GBNF_RULE.search(params.grammar) is not None
        return ConstraintKind.GBNF if is_gbnf else ConstraintKind.LARK, params.grammar
    if params.structural_tag is not None:
        return ConstraintKind.STRUCTURAL_TAG, params.structural_tag
    if params.begin_within is not None:
        return ConstraintKind.NONE, ""
    raise RequestError("structured_outputs holds no constraint.", _FIELD)


def _schema_text(schema: str | dict[str, Any] | bool | None) -> str:
    decoded = load_json("json", schema) if isinstance(schema, str) else schema
    if not isinstance(decoded, dict | bool):
        raise RequestError(
            f"json must be a JSON schema, an object or a boolean, but is {type(decoded).__name__}.", _FIELD
        )
    try:
        # serialised again, so that formatting makes no difference; the order of properties does
        return json.dumps(decoded, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise too_deep("json") from None


def _choice_text(choice: list[str]) -> str:
    if len(choice) > MAX_CHOICES:
        raise RequestError(f"choice has {len(choice)} strings, the limit is {MAX_CHOICES}.", _FIELD)
    return json.dumps(list(dict.fromkeys(choice)), ensure_ascii=False)


def _check_size(name: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode text: {error}", _FIELD) from None
    if size > limit:
        raise RequestError(f"{name} is too large: {size} bytes, the limit is {limit}.", _FIELD)


def load_json(name: str, text: str) -> Any:
    """Parses JSON; as in vLLM, errors quote the JSON parser's message.

    Raises:
        RequestError: the text is not valid JSON, or too large.
    """
    if len(text) > MAX_BYTES:
        raise RequestError(f"{name} is too large: {len(text)} characters, the limit is {MAX_BYTES} bytes.", _FIELD)
    try:
        return json.loads(text)
    except RecursionError:
        raise too_deep(name) from None
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}", _FIELD) from None


def too_deep(name: str) -> RequestError:
    """The error for JSON that is nested too deeply."""
    return RequestError(f"{name} is nested too deeply: the limit is {MAX_DEPTH} levels.", _FIELD)
