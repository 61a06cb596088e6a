"""Constraints on outputs: `StructuredOutputsParams`, and vLLM 0.6.3's `GuidedDecodingParams`.

Names, defaults and the error for several constraints are vLLM's (0.32 and 0.6.3). The engine core compiles
constraints (core/structured).
"""

from __future__ import annotations

from typing import Any

import msgspec

# names of libraries; those that are not available mean "auto"
BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
# mutually exclusive fields
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# larger constraints are rejected before they are parsed
MAX_BYTES = 256 * 1024


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """A constraint on the text of an output.

    Args:
        json: a JSON schema, as a JSON string or decoded.
        regex: a regular expression that the whole text matches.
        choice: the text is one of these.
        grammar: a context-free grammar in EBNF (GBNF or Lark notation).
        json_object: True: any JSON object.
        disable_any_whitespace: JSON has no insignificant whitespace.
        disable_additional_properties: objects have only the properties that the schema names.
        whitespace_pattern: a regular expression for the whitespace between two tokens of JSON; None: at most a
            newline and 64 spaces.
        structural_tag: JSON of structural tags: schemas that apply between a start and an end text.
        backend: library that compiles the constraint, one of BACKENDS; None: the server's.
        begin_after: the constraint applies behind the first occurrence of this text in the output, such as the end
            of the reasoning; the output before it is unconstrained. None: it applies from the start.
        begin_within: the tokens of `begin_after` are written after so many other ones at the latest, with or without
            a constraint. None: there is no limit.
        begin_opener: `begin_within` is for outputs that begin with this text, but for white space, such as the start
            of the reasoning; "": for all.
        single_space: without a whitespace_pattern, at most one space between two tokens of JSON, as in vLLM 0.6.3.

    Raises:
        ValueError: several constraints, an empty choice or begin_after, a begin_within that is negative or without
            begin_after, an unknown backend, or a value that is not valid JSON or Unicode.

    Example::

        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = None
    begin_after: str | None = None
    begin_within: int | None = None
    begin_opener: str = ""
    single_space: bool = False

    def __post_init__(self) -> None:
        given = self.constraints()
        if len(given) > 1:
            raise ValueError(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{ {name: getattr(self, name) for name in given} }"
            )
        if self.choice is not None and not self.choice:
            raise ValueError("choice must hold at least one string, got [].")
        _check_plain({name: getattr(self, name) for name in (*CONSTRAINTS, "whitespace_pattern", "begin_after")})
        if self.begin_after == "":
            raise ValueError("begin_after cannot be an empty string.")
        if self.begin_within is not None and (self.begin_after is None or self.begin_within < 0):
            raise ValueError(f"begin_within needs begin_after, and must be at least 0, got {self.begin_within}.")
        if self.backend is not None and self.backend not in BACKENDS:
            names = ", ".join(f"'{name}'" for name in BACKENDS)
            raise ValueError(f"Unknown guided decoding backend '{self.backend}'. Must be one of {names}")

    @property
    def is_empty(self) -> bool:
        """Whether the output is left as it is."""
        return self.begin_within is None and not self.constraints()

    def constraints(self) -> list[str]:
        """Names of the constraints that are given."""
        return [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]


def _check_plain(fields: dict[str, Any]) -> None:
    """Checks that values can be sent to the engine core.

    Raises:
        ValueError: one cannot; names the field.
    """
    for name, value in fields.items():
        try:
            msgspec.msgpack.encode(value)
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is not valid Unicode text: {error}") from None
        except RecursionError:
            raise ValueError(f"{name} is nested too deeply.") from None
        except (TypeError, OverflowError) as error:
            raise ValueError(f"{name} cannot be written as JSON: {error}") from None


def GuidedDecodingParams(  # noqa: N802 - a class to its users, with the name and order of vLLM 0.6.3
    json: str | dict[str, Any] | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
    backend: str | None = None,
    whitespace_pattern: str | None = None,
) -> StructuredOutputsParams:
    """`StructuredOutputsParams` with vLLM 0.6.3's arguments.

    Raises:
        ValueError: several constraints are given.

    Example::

        SamplingParams(guided_decoding=GuidedDecodingParams(regex=r"[0-9]{4}"))
    """
    given = {"json": json, "regex": regex, "choice": choice, "grammar": grammar, "json_object": json_object}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(given) > 1:
        raise ValueError(f"You can only use one kind of guided decoding but multiple are specified: {given}")
    return StructuredOutputsParams(
        json,
        regex,
        choice,
        grammar,
        json_object,
        whitespace_pattern=whitespace_pattern,
        backend=backend,
        single_space="json" in given,
    )
