"""Forced tool calls (``tool_choice``): guided decoding makes the output JSON, whatever the model's own format.

With a named function the output is the object of its arguments; with "required" it is an array of calls,
``[{"name": "f", "parameters": {...}}, ...]``. As in vLLM, a named function's finish reason stays "stop".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.entrypoints.parsers.tools import ToolParser
from ascend_vllm.entrypoints.parsers.tools_json import JsonToolParser

# the schema of functions without one
_ANY_OBJECT = {"type": "object"}


class RequiredToolParser(JsonToolParser):
    """``[{"name": "f", "parameters": {...}}, ...]``."""

    OPENERS = ("[",)
    SEPARATORS = (",", "]")
    BARE_AFTER_CALL = True

    def add_content(self, content: str) -> None:
        """Drops the text: it is a call that was truncated before its name."""


class NamedToolParser(ToolParser):
    """Parses the arguments of the function of this name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str) -> None:
        super().__init__(tools)
        self._name = name

    def advance(self, text: str, final: bool) -> None:  # noqa: ARG002 - nothing is buffered
        if self.num_calls == 0 and text:
            self.open_call(self._name)
        self.add_arguments(text)


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of a function's arguments."""
    return tool["function"].get("parameters") or _ANY_OBJECT


def calls_schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of an array of calls.

    Definitions in the functions' schemas move to the root, which their references are relative to.

    Args:
        tools: the functions that may be called.
        parallel: whether more than one call is allowed.

    Raises:
        ValueError: two functions define the same name differently.
    """
    definitions: dict[str, dict[str, Any]] = {}
    variants = []
    for tool in tools:
        schema = dict(arguments_schema(tool))
        for keyword in ("$defs", "definitions"):
            for name, definition in (schema.pop(keyword, None) or {}).items():
                known = definitions.setdefault(keyword, {}).setdefault(name, definition)
                if known != definition:
                    raise ValueError(f"Two of `tools` define '{name}' in their `{keyword}` differently.")
        function = {"name": {"type": "string", "enum": [tool["function"]["name"]]}, "parameters": schema}
        variants.append({"type": "object", "properties": function, "required": ["name", "parameters"]})
    array: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": variants}}
    return array | ({} if parallel else {"maxItems": 1}) | definitions
