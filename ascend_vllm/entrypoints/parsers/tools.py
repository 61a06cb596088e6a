"""Incremental parsers of tool calls in generated text.

A parser is fed chunks of text and emits what they determine: content, a call's name, parts of its arguments. The
concatenated output does not depend on the chunks, so whole answers and streams use the same code. Text that looks
like a call but is not one becomes content. Parsing takes linear time whatever the text and the chunks: incomplete
text is not scanned again with every chunk.

Each model family has a format, named in `TOOL_PARSERS`. A plug-in file adds more::

    from ascend_vllm.entrypoints.parsers.tools import register_tool_parser
    from ascend_vllm.entrypoints.parsers.tools_json import JsonToolParser

    @register_tool_parser("arrows")
    class ArrowToolParser(JsonToolParser):
        OPENERS = ("==>",)
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import importlib
import runpy
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from ascend_vllm.errors import ConfigError

# name of a format → module and class of its parser
TOOL_PARSERS: dict[str, str] = {
    "hermes": "ascend_vllm.entrypoints.parsers.tools_json:HermesToolParser",
    "internlm": "ascend_vllm.entrypoints.parsers.tools_json:InternLMToolParser",
    "llama3_json": "ascend_vllm.entrypoints.parsers.tools_json:Llama3JsonToolParser",
    "mistral": "ascend_vllm.entrypoints.parsers.tools_json:MistralToolParser",
    "qwen": "ascend_vllm.entrypoints.parsers.tools_json:HermesToolParser",
    "qwen3_coder": "ascend_vllm.entrypoints.parsers.tools_xml:Qwen3XmlToolParser",
    "qwen3_xml": "ascend_vllm.entrypoints.parsers.tools_xml:Qwen3XmlToolParser",
}


# Most characters of a call up to its arguments, white space included. Longer text is not a call, which bounds the
# cost of matching the head again with every chunk.
MAX_HEAD = 1024
# longer texts are read in chunks of this size
_CHUNK_SIZE = 4096
# after so many openers with long text that is not a call, the rest is content
_MAX_FALSE_STARTS = 16


@dataclasses.dataclass(slots=True)
class ToolCallDelta:
    """Update of one call.

    Attributes:
        index: of the call within the message.
        arguments: next part of the arguments' JSON.
        id: of the call, in its first delta only.
        name: of the function, in the first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclasses.dataclass(slots=True)
class ToolDelta:
    """What a parser emits for a chunk of text: content, and updates of calls in order."""

    content: str = ""
    calls: list[ToolCallDelta] = dataclasses.field(default_factory=list)


class ToolParser(abc.ABC):
    """Parses the text of one choice.

    Args:
        tools: the request's tools, ``{"type": "function", "function": {"name": ..., ...}}``.

    Attributes:
        KEEPS_SPECIAL_TOKENS: whether the format uses special tokens, which must be kept in the text.
    """

    KEEPS_SPECIAL_TOKENS: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools
        self.num_calls = 0
        self._delta = ToolDelta()

    @abc.abstractmethod
    def advance(self, text: str, final: bool) -> None:
        """Parse more text and emit the result with `add_content`, `open_call` and `add_arguments`.

        Args:
            text: the next chunk.
            final: whether the text ends here, so that buffered text must be emitted.
        """

    def feed(self, text: str) -> ToolDelta:
        """Parse the next chunk of the text."""
        self.advance(text, final=False)
        return self._pop_delta()

    def finish(self) -> ToolDelta:
        """Emit buffered text at the end."""
        self.advance("", final=True)
        return self._pop_delta()

    def make_id(self) -> str:
        return f"chatcmpl-tool-{secrets.token_hex(16)}"

    def add_content(self, content: str) -> None:
        """Emit text outside of calls."""
        self._delta.content += content

    def open_call(self, name: str) -> None:
        """Emit the start of a call, to which the following arguments belong."""
        self._delta.calls.append(ToolCallDelta(self.num_calls, id=self.make_id(), name=name))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Emit the next part of the last call's arguments."""
        calls, index = self._delta.calls, self.num_calls - 1
        if not text:
            return
        if calls and calls[-1].index == index and calls[-1].id is None:
            calls[-1].arguments += text
        else:
            calls.append(ToolCallDelta(index, text))

    def _pop_delta(self) -> ToolDelta:
        delta, self._delta = self._delta, ToolDelta()
        return delta


class MarkedToolParser(ToolParser):
    """A format whose calls begin with a marker.

    White space between the calls, and before the first one if there is no other content, is dropped.

    Attributes:
        OPENERS: markers that begin a call.
        SEPARATORS: markers between or behind calls, which are dropped.
        BARE_AT_START: whether a "{" at the start of the message begins a call.
        BARE_AFTER_CALL: whether a "{" right behind a call begins another one.
    """

    OPENERS: ClassVar[tuple[str, ...]] = ()
    SEPARATORS: ClassVar[tuple[str, ...]] = ()
    BARE_AT_START: ClassVar[bool] = False
    BARE_AFTER_CALL: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.rest = ""  # buffered text, behind `_blanks`
        self.opener: str | None = None  # of the current call; "" for a bare one; None: outside of calls
        self._lead = ""  # white space before the opener, emitted if this is not a call
        self._blank = True  # only white space since the start or the last call
        self._blanks: list[str] = []  # parts of that white space
        # texts not read yet, and the offset in the first one
        self._unread: collections.deque[str] = collections.deque()
        self._at = 0
        self._num_false_starts = 0

    @abc.abstractmethod
    def read_call(self, final: bool) -> bool:
        """Parse `rest`, which begins behind the opener, or with the "{" of a bare call.

        Ends with `end_call` or, before `open_call`, with `reject_call`. Returns whether there is more to parse
        without further text.
        """

    def advance(self, text: str, final: bool) -> None:
        self._unread.append(text)
        self._read_chunks()
        if final:
            self._read("", final=True)
            while self._unread:  # text behind the opener of an incomplete call, which was rejected
                self._read_chunks()
                self._read("", final=True)

    def end_call(self) -> bool:
        """Ends the current call; `rest` is the text behind it."""
        self.opener = None
        self._blank = True
        return True

    def reject_call(self) -> bool:
        """The current text is not a call: its opener becomes content, and so does the rest up to the next opener."""
        size = 0 if self.opener else 1
        self.add_content(self._lead + (self.opener or "") + self.rest[:size])
        self.rest = self.rest[size:]
        self.opener = None
        self._blank = False
        if len(self.rest) > _CHUNK_SIZE:
            self._num_false_starts += 1
            self._unread_rest()
        return True

    def _unread_rest(self) -> None:
        """Puts the buffered text back, to be read in chunks."""
        if self._at:
            self._unread[0] = self._unread[0][self._at :]
            self._at = 0
        self._unread.appendleft(self.rest)
        self.rest = ""

    def _read_chunks(self) -> None:
        while self._unread:
            text, start = self._unread[0], self._at
            self._at += _CHUNK_SIZE
            if self._at >= len(text):
                self._unread.popleft()
                self._at = 0
            self._read(text[start : start + _CHUNK_SIZE], final=False)

    def _read(self, text: str, final: bool) -> None:
        self.rest += text
        while self.rest or self._blanks or self.opener is not None:
            if not (self._read_text(final) if self.opener is None else self.read_call(final)):
                return

    def _read_text(self, final: bool) -> bool:
        if self._num_false_starts > _MAX_FALSE_STARTS:
            self.add_content(self._pop_blanks() + self.rest)
            self.rest = ""
            return False
        if self._blank:
            return self._read_blank(final)
        found = [(at, opener) for opener in self.OPENERS if (at := self.rest.find(opener)) >= 0]
        if found:
            at, opener = min(found)
            self.add_content(self.rest[:at])
            return self._begin_call("", opener, self.rest[at:])
        end = len(self.rest) if final else len(self.rest) - partial_marker_length(self.rest, self.OPENERS)
        self.add_content(self.rest[:end])
        self.rest = self.rest[end:]
        return False

    def _read_blank(self, final: bool) -> bool:
        """Reads while there was only white space since the start or the last call."""
        text = self.rest.lstrip()
        if len(text) < len(self.rest):
            self._blanks.append(self.rest[: len(self.rest) - len(text)])
            self.rest = text
        markers = self.OPENERS
        if self.num_calls:
            markers += self.SEPARATORS
            for separator in self.SEPARATORS:
                if text.startswith(separator):
                    self._blanks.clear()
                    self.rest = text[len(separator) :]
                    return True
        if text.startswith("{") and (self.BARE_AFTER_CALL if self.num_calls else self.BARE_AT_START):
            return self._begin_call(self._pop_blanks(), "", text)
        for opener in self.OPENERS:
            if text.startswith(opener):
                return self._begin_call(self._pop_blanks(), opener, text)
        if not final and any(marker.startswith(text) for marker in markers):  # true of an empty text
            return False
        if not text and self.num_calls:
            self._blanks.clear()
            return False
        self.rest = self._pop_blanks() + text
        self._blank = False
        return True

    def _pop_blanks(self) -> str:
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks

    def _begin_call(self, lead: str, opener: str, text: str) -> bool:
        self._lead, self.opener, self.rest = lead, opener, text[len(opener) :]
        return True


def partial_marker_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of a text that is a proper prefix of a marker.

    Example::

        partial_marker_length("so <thi", ("<think>",))  # 4
    """
    longest = min(len(text), max((len(marker) - 1 for marker in markers), default=0))
    for size in range(longest, 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


P = TypeVar("P", bound=type[ToolParser])
_registered: dict[str, type[ToolParser]] = {}


def register_tool_parser(name: str) -> Callable[[P], P]:
    """Class decorator for plug-in files: registers a parser under a name for --tool-call-parser."""

    def register(parser: P) -> P:
        _registered[name] = parser
        return parser

    return register


def load_tool_parser_plugin(path: str) -> None:
    """Run a plug-in file, whose parsers register themselves.

    Raises:
        ConfigError: it cannot be read, or raises an exception.
    """
    try:
        runpy.run_path(path)
    except Exception as error:  # whatever the user's program raises
        raise ConfigError(f"--tool-parser-plugin: cannot load {path}: {type(error).__name__}: {error}") from error


def find_tool_parser(name: str) -> type[ToolParser]:
    """The parser of a format.

    Raises:
        ConfigError: there is none of this name; the message lists all names.
    """
    if name in _registered:
        return _registered[name]
    if name not in TOOL_PARSERS:
        known = ", ".join(sorted(TOOL_PARSERS.keys() | _registered.keys()))
        raise ConfigError(f"--tool-call-parser: invalid tool call parser: {name} (chose from {{ {known} }})")
    module, _, attribute = TOOL_PARSERS[name].partition(":")
    parser: type[ToolParser] = getattr(importlib.import_module(module), attribute)
    return parser
