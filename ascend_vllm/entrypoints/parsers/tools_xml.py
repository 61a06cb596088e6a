"""Tool calls written with tags for the function and each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_vllm.entrypoints.parsers.tools import MAX_HEAD, MarkedToolParser, partial_marker_length

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)\s*>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)\s*>")
_PARAMETER_END = "</parameter>"
_END = re.compile(r"\s*</(?:function|tool_call)>")
# tags that may follow the head of a call
_TAGS = ("<parameter=", "</function>", "</tool_call>")


class Qwen3XmlToolParser(MarkedToolParser):
    """Qwen3-Coder: ``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``.

    A parameter is emitted when it is complete. Its value is JSON unless its type in the function's schema is string.
    """

    OPENERS = ("<tool_call>",)
    SEPARATORS = ("</tool_call>",)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._schemas = {function.get("name"): _properties(function) for function in map(_function_of, tools)}
        self._name: str | None = None  # of the current call
        self._num_parameters = 0
        self._parameter: str | None = None  # name of the current parameter
        self._value_parts: list[str] = []
        self._is_malformed = False  # behind a parameter's tag that never ends

    def read_call(self, final: bool) -> bool:
        if self._is_malformed:
            self.rest = ""
            return False
        if self._name is None:
            return self._read_function(final)
        return self._read_tag(final) if self._parameter is None else self._read_value(self._parameter, final)

    def _read_function(self, final: bool) -> bool:
        if head := _FUNCTION.match(self.rest, 0, MAX_HEAD):
            self._name, self._num_parameters = head[1], 0
            self.open_call(self._name)
            self.rest = self.rest[head.end() :]
            return True
        text = self.rest.lstrip()
        has_tag = text.startswith("<function=") and not re.search(r"[<>]", text[10:])
        is_partial = "<function=".startswith(text) or has_tag
        return False if is_partial and not final and len(self.rest) < MAX_HEAD else self.reject_call()

    def _read_tag(self, final: bool) -> bool:
        """Reads the next parameter's tag, or the end of the call."""
        if head := _PARAMETER.match(self.rest, 0, MAX_HEAD):
            self._parameter = head[1]
            self.rest = self.rest[head.end() :]
            return True
        if end := _END.match(self.rest, 0, MAX_HEAD):
            return self._end(self.rest[end.end() :])
        text = self.rest.lstrip()
        if not text and len(self.rest) >= MAX_HEAD:
            return self._end(self.rest)
        if any(tag.startswith(text) or text.startswith(tag) for tag in _TAGS):
            if final:  # the answer was truncated, and the arguments stay so
                self.rest = ""
            self._is_malformed = len(self.rest) >= MAX_HEAD
            return False
        return self._end(self.rest)

    def _read_value(self, parameter: str, final: bool) -> bool:
        """Reads a parameter's value and emits it when it is complete."""
        end = self.rest.find(_PARAMETER_END)
        if end < 0:
            size = len(self.rest) - partial_marker_length(self.rest, (_PARAMETER_END,))
            self._value_parts.append(self.rest[:size])
            # at the end the answer was truncated, and the arguments stay so
            self.rest = "" if final else self.rest[size:]
            return False
        value = self._value_of(parameter, "".join([*self._value_parts, self.rest[:end]]))
        start = ", " if self._num_parameters else "{"
        self.add_arguments(f"{start}{json.dumps(parameter, ensure_ascii=False)}: {value}")
        self._num_parameters += 1
        self._parameter = None
        self._value_parts.clear()
        self.rest = self.rest[end + len(_PARAMETER_END) :]
        return True

    def _end(self, rest: str) -> bool:
        self.add_arguments("}" if self._num_parameters else "{}")
        self._name = None
        self.rest = rest
        return self.end_call()

    def _value_of(self, parameter: str, text: str) -> str:
        """A parameter's value as JSON, without the line breaks next to its tags."""
        text = text.removeprefix("\n").removesuffix("\n")
        schema = self._schemas.get(self._name, {}).get(parameter)
        kind = schema.get("type") if isinstance(schema, Mapping) else "string"
        if kind != "string":
            plain = text.strip()
            lowered = plain.lower()
            candidate = lowered if lowered in ("true", "false", "null") else plain
            try:
                return json.dumps(json.loads(candidate), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass  # not of the schema's type: passed as a string
        return json.dumps(text, ensure_ascii=False)


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of a function's parameters, by name."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
