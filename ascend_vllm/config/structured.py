"""Structured output's section of the configuration."""

from __future__ import annotations

import msgspec


class StructuredOutputsConfig(msgspec.Struct, frozen=True):
    """How texts are kept to schemas and grammars.

    Attributes:
        backend: library that does it unless a request says otherwise; "auto" takes xgrammar, and llguidance for what
            xgrammar cannot do. The names of libraries that are not there mean "auto".
        disable_fallback: "auto" and requests without a backend of their own take one library only.
        disable_any_whitespace: JSON is written without whitespace that has no meaning.
        disable_additional_properties: objects have no properties that the schema does not name.
    """

    backend: str = "auto"
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
