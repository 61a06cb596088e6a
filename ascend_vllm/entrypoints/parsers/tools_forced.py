"""Tool calls that a request demands: the output is kept to JSON, which is read here whatever the model's own format.

A named function: the output is the object of its arguments. "required": it is an array of calls,
``[{"name": "f", "parameters": {...}}, ...]``. Both forms, and that a named function's finish reason stays "stop", are
vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.entrypoints.parsers.tools import ToolParser
from ascend_vllm.entrypoints.parsers.tools_json import JsonToolParser

# what a function without a schema takes
_ANY_OBJECT = {"type": "object"}


class RequiredToolParser(JsonToolParser):
    """``[{"name": "f", "parameters": {...}}, ...]``."""

    OPENERS = ("[",)
    SEPARATORS = (",", "]")
    BARE_AFTER_CALL = True

    def say(self, content: str) -> None:
        """Nothing is content: what is no call is one cut short before its name."""


class NamedToolParser(ToolParser):
    """The arguments of one function.

    Args:
        tools: the request's tools.
        name: the function's name.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], name: str) -> None:
        super().__init__(tools)
        self._name = name

    def advance(self, text: str, final: bool) -> None:  # noqa: ARG002 - the end tells nothing new
        """See `ToolParser.advance`."""
        if self.num_calls == 0 and text:
            self.open_call(self._name)
        self.add_arguments(text)


def arguments_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """JSON schema of a function's arguments."""
    return tool["function"].get("parameters") or _ANY_OBJECT


def calls_schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of an array of calls.

    Definitions of a function's own schema move to the root, where their references look for them.

    Args:
        tools: the functions that may be called.
        parallel: more than one call is allowed.

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
