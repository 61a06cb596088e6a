"""Tool calls that models write with tags for the function and each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.entrypoints.parsers.tools import MarkedToolParser

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)\s*>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)\s*>(.*?)</parameter>", re.DOTALL)
_END = re.compile(r"\s*</(?:function|tool_call)>")
# what a call may go on with behind its head
_TAGS = ("<parameter=", "</function>", "</tool_call>")


class Qwen3XmlToolParser(MarkedToolParser):
    """Qwen3-Coder: ``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``.

    A parameter is told when it is complete. Its value is JSON unless the function's schema calls it a string.
    """

    OPENERS = ("<tool_call>",)
    SEPARATORS = ("</tool_call>",)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._schemas = {function.get("name"): _properties(function) for function in map(_function_of, tools)}
        self._name: str | None = None  # of the call that is being read
        self._num_parameters = 0

    def read_call(self, final: bool) -> bool:
        """See `MarkedToolParser.read_call`."""
        return self._read_function(final) if self._name is None else self._read_parameter(final)

    def _read_function(self, final: bool) -> bool:
        if head := _FUNCTION.match(self.rest):
            self._name, self._num_parameters = head[1], 0
            self.open_call(self._name)
            self.rest = self.rest[head.end() :]
            return True
        text = self.rest.lstrip()
        begun = "<function=".startswith(text) or (text.startswith("<function=") and not re.search(r"[<>]", text[10:]))
        return False if begun and not final else self.refuse_call()

    def _read_parameter(self, final: bool) -> bool:
        # a value may be long: the plain search is what is repeated for every token of it
        if "</parameter>" in self.rest and (parameter := _PARAMETER.match(self.rest)):
            value = self._value_of(parameter[1], parameter[2])
            start = ", " if self._num_parameters else "{"
            self.add_arguments(f"{start}{json.dumps(parameter[1], ensure_ascii=False)}: {value}")
            self._num_parameters += 1
            self.rest = self.rest[parameter.end() :]
            return True
        if end := _END.match(self.rest):
            return self._end(self.rest[end.end() :])
        text = self.rest.lstrip()
        if any(tag.startswith(text) or text.startswith(tag) for tag in _TAGS):
            if final:  # the answer was cut short, and so are the arguments
                self.rest = ""
            return False
        return self._end(self.rest)

    def _end(self, rest: str) -> bool:
        self.add_arguments("}" if self._num_parameters else "{}")
        self._name = None
        self.rest = rest
        return self.end_call()

    def _value_of(self, parameter: str, text: str) -> str:
        """A parameter's value as JSON; the line breaks next to its tags are not part of it."""
        text = text.removeprefix("\n").removesuffix("\n")
        schema = self._schemas.get(self._name, {}).get(parameter)
        kind = schema.get("type") if isinstance(schema, Mapping) else "string"
        if kind != "string":
            plain = text.strip()
            lowered = plain.lower()
            candidate = lowered if lowered in ("true", "false", "null") else plain
            try:
                return json.dumps(json.loads(candidate), ensure_ascii=False)
            except ValueError:
                pass  # the model did not keep to the schema: its text is all there is
        return json.dumps(text, ensure_ascii=False)


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's parameters, by name."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
