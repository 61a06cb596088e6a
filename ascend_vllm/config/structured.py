"""Structured output's section of the configuration."""

from __future__ import annotations

import msgspec


class StructuredOutputsConfig(msgspec.Struct, frozen=True):
    """Defaults for structured outputs.

    Attributes:
        backend: library for requests that name none; "auto" uses xgrammar, and llguidance for what xgrammar does not
            support. The names of other libraries mean "auto".
        disable_fallback: "auto" uses one library only.
        disable_any_whitespace: JSON has no insignificant whitespace.
        disable_additional_properties: objects have only the properties that the schema names.
    """

    backend: str = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
