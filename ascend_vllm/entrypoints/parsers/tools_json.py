"""Tool calls written as JSON objects with name and arguments.

If the name comes first, the arguments are streamed as the model writes them. Otherwise a call is emitted when it is
complete.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ascend_vllm.entrypoints.parsers.tools import MAX_HEAD, MarkedToolParser

_STRING = r'"((?:[^"\\]|\\.)*)"'
# an object up to the "{" of its arguments, with the name first
_HEAD = re.compile(
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)',
    re.DOTALL,
)
_FIRST_KEY = re.compile(rf"\{{\s*{_STRING}", re.DOTALL)
_FIRST_KEYS = frozenset(("name", "type", "id", "arguments", "parameters"))
_IN_OBJECT = re.compile(r'[{}\[\]"]')
_IN_STRING = re.compile(r'["\\]')


class BracketScanner:
    """Finds the end of a JSON object in text that comes in chunks.

    Args:
        depth: number of open brackets at the start.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def find_end(self, text: str) -> int:
        """The index behind the bracket that closes the outermost one; -1: not in this chunk."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING if self._in_string else _IN_OBJECT).search(text, at)
            if match is None:
                break
            at = match.end()
            if self._in_string:
                self._escaped = match[0] == "\\"
                self._in_string = self._escaped
            elif match[0] == '"':
                self._in_string = True
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return -1


class JsonToolParser(MarkedToolParser):
    """Calls of the form ``{"name": "f", "arguments": {...}}`` behind a marker.

    Attributes:
        PRELUDE: text allowed between the marker and the object.
        NAMED_HEAD: for formats with a bare name (group 1) before the object of arguments; else None.
        NAMED_START: fully matches every prefix of a `NAMED_HEAD`.
    """

    PRELUDE: ClassVar[re.Pattern[str]] = re.compile(r"\s*")
    NAMED_HEAD: ClassVar[re.Pattern[str] | None] = None
    NAMED_START: ClassVar[re.Pattern[str]] = re.compile("")

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._state: Callable[[bool], bool] = self._read_head
        self._scanner: BracketScanner | None = None
        self._scanned = 0  # characters of `rest` that were scanned
        # of an incomplete object: the text before `rest`, and the object's offset in it
        self._parts: list[str] = []
        self._start = 0
        self._in_object = False  # the arguments are a member of an object, which must be closed too

    def read_call(self, final: bool) -> bool:
        return self._state(final)

    def _read_head(self, final: bool) -> bool:
        if self.opener and self.NAMED_HEAD is not None:
            if named := self.NAMED_HEAD.match(self.rest, 0, MAX_HEAD):
                return self._begin_arguments(named[1], named.end(), in_object=False)
            if not final and len(self.rest) < MAX_HEAD and self.NAMED_START.fullmatch(self.rest):
                return False
        prelude = self.PRELUDE.match(self.rest, 0, MAX_HEAD) if self.opener else None
        start = prelude.end() if prelude else 0
        if start == len(self.rest) and not final:
            return False
        if not self.rest.startswith("{", start):
            return self._leave(self.reject_call)
        if head := _HEAD.match(self.rest, start, start + MAX_HEAD):
            name = _load(f'"{head[1]}"')
            if not isinstance(name, str) or not name:
                return self._leave(self.reject_call)
            return self._begin_arguments(name, head.end(), in_object=True)
        first_key = _FIRST_KEY.match(self.rest, start, start + MAX_HEAD)
        if first_key and first_key[1] not in _FIRST_KEYS:
            return self._leave(self.reject_call)
        if self._scanner is None:
            self._scanner, self._scanned, self._start = BracketScanner(), start, start
        if len(self.rest) >= start + MAX_HEAD:
            self._state = self._read_whole  # the name cannot come first any more
        return self._read_whole(final)

    def _read_whole(self, final: bool) -> bool:
        """Buffers an object until its end."""
        assert self._scanner is not None
        found = self._scanner.find_end(self.rest[self._scanned :])
        if found < 0:
            self._scanned = len(self.rest)
            if final:
                return self._reject_whole()
            if self._state == self._read_whole:
                self._parts.append(self.rest)
                self.rest, self._scanned = "", 0
            return False
        end = self._scanned + found
        text = "".join([*self._parts, self.rest[:end]])
        call = self._call_of(_load(text[self._start :]))
        if call is None:
            return self._reject_whole()
        name, arguments = call
        self.open_call(name)
        self.add_arguments(arguments)
        self._parts.clear()
        self.rest = self.rest[end:]
        return self._leave(self.end_call)

    def _reject_whole(self) -> bool:
        self.rest = "".join([*self._parts, self.rest])
        self._parts.clear()
        return self._leave(self.reject_call)

    def _call_of(self, value: Any) -> tuple[str, str] | None:
        """Name and arguments of an object; None if it is not a call. A bare one must have arguments."""
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or not name:
            return None
        key = next((key for key in ("arguments", "parameters") if key in value), None)
        if key is None and not self.opener:
            return None
        arguments = value[key] if key else None
        if isinstance(arguments, str) and isinstance(_load(arguments), dict):
            return name, arguments
        return name, json.dumps(arguments or {}, ensure_ascii=False)

    def _begin_arguments(self, name: str, end: int, in_object: bool) -> bool:
        self.open_call(name)
        self.rest = self.rest[end:]
        self._in_object = in_object
        self._scanner = BracketScanner()
        self._state = self._read_arguments
        return True

    def _read_arguments(self, _final: bool) -> bool:
        assert self._scanner is not None
        end = self._scanner.find_end(self.rest)
        if end < 0:
            self.add_arguments(self.rest)
            self.rest = ""
            return False
        self.add_arguments(self.rest[:end])
        self.rest = self.rest[end:]
        if not self._in_object:
            return self._leave(self.end_call)
        self._scanner = None
        self._state = self._read_tail
        return True

    def _read_tail(self, _final: bool) -> bool:
        """Skips the rest of the object behind its arguments; models sometimes omit the closing bracket."""
        text = self.rest.lstrip()
        if self._scanner is None:
            if not text and len(self.rest) < MAX_HEAD:
                return False
            if not text.startswith((",", "}")):
                return self._leave(self.end_call)
            self._scanner = BracketScanner(depth=1)
        end = self._scanner.find_end(self.rest)
        if end < 0:
            self.rest = ""
            return False
        self.rest = self.rest[end:]
        return self._leave(self.end_call)

    def _leave(self, end: Callable[[], bool]) -> bool:
        """Resets the state for the next call."""
        self._scanner = None
        self._state = self._read_head
        return end()


def _load(text: str) -> Any:
    """Parses JSON, allowing control characters in strings; None if it is invalid or nested too deeply."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


class HermesToolParser(JsonToolParser):
    """Hermes 2 and Qwen2.5: ``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``."""

    OPENERS = ("<tool_call>",)
    SEPARATORS = ("</tool_call>",)


class InternLMToolParser(JsonToolParser):
    """InternLM 2.5: ``<|action_start|><|plugin|>{"name": "f", "parameters": {...}}<|action_end|>``."""

    KEEPS_SPECIAL_TOKENS = True
    OPENERS = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    SEPARATORS = ("<|action_end|>",)


class Llama3JsonToolParser(JsonToolParser):
    """Llama 3.1: the message is ``{"name": "f", "parameters": {...}}``, optionally behind ``<|python_tag|>``.

    Several calls are separated by ";".
    """

    KEEPS_SPECIAL_TOKENS = True
    OPENERS = ("<|python_tag|>",)
    SEPARATORS = (";",)
    BARE_AT_START = True
    BARE_AFTER_CALL = True


class MistralToolParser(JsonToolParser):
    """Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]``, newer models ``[TOOL_CALLS]f{...}``."""

    KEEPS_SPECIAL_TOKENS = True
    OPENERS = ("[TOOL_CALLS]",)
    SEPARATORS = (",", "]")
    BARE_AFTER_CALL = True
    PRELUDE = re.compile(r"\s*(?:\[\s*)?")
    NAMED_HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
    NAMED_START = re.compile(r"\s*[\w.-]+(?:\[[A-Z_]*\]?\w*){0,2}\s*")

    def make_id(self) -> str:
        """Nine letters and digits, which the templates of these models require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
