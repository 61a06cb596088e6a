"""Finds tool calls in the text of a model, piece by piece as it is generated.

A parser is a machine that is fed text and tells at once what of it is sure: content, a call's name, pieces of its
arguments. How the text is cut makes no difference to the sum of what it tells, so whole answers and streams use the
same code. What looks like a call and turns out not to be one becomes content. The work is in proportion to the text,
however it is cut and whatever it holds: no piece is read again and again while what follows it is waited for.

Each model family has its format; `TOOL_PARSERS` names them. A plug-in file adds more::

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

# name of a format → where its parser is
TOOL_PARSERS: dict[str, str] = {
    "hermes": "ascend_vllm.entrypoints.parsers.tools_json:HermesToolParser",
    "internlm": "ascend_vllm.entrypoints.parsers.tools_json:InternLMToolParser",
    "llama3_json": "ascend_vllm.entrypoints.parsers.tools_json:Llama3JsonToolParser",
    "mistral": "ascend_vllm.entrypoints.parsers.tools_json:MistralToolParser",
    "qwen": "ascend_vllm.entrypoints.parsers.tools_json:HermesToolParser",
    "qwen3_coder": "ascend_vllm.entrypoints.parsers.tools_xml:Qwen3XmlToolParser",
    "qwen3_xml": "ascend_vllm.entrypoints.parsers.tools_xml:Qwen3XmlToolParser",
}


# Most characters of what a call begins with, up to its arguments, white space included: what goes on for longer is
# none, so that looking at it again with every piece costs little.
MAX_HEAD = 1024
# a text is read in pieces of this size at most
_PIECE = 4096
# so many openers of something long that is no call; behind them no more calls are looked for
_MAX_FALSE_STARTS = 16


@dataclasses.dataclass(slots=True)
class ToolCallDelta:
    """News of one call.

    Attributes:
        index: the call's place among the calls of the message.
        arguments: a piece of the arguments' JSON.
        id: the call's id, with its first delta only.
        name: the function's name, with its first delta only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclasses.dataclass(slots=True)
class ToolDelta:
    """What a parser learned from a piece of text: content, and news of calls in their order."""

    content: str = ""
    calls: list[ToolCallDelta] = dataclasses.field(default_factory=list)


class ToolParser(abc.ABC):
    """Reads the text of one choice.

    Args:
        tools: the request's tools as they came, ``{"type": "function", "function": {"name": ..., ...}}``.

    Attributes:
        KEEPS_SPECIAL_TOKENS: the format is written with special tokens, which must then stay in the text.
    """

    KEEPS_SPECIAL_TOKENS: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools
        self.num_calls = 0
        self._delta = ToolDelta()

    @abc.abstractmethod
    def advance(self, text: str, final: bool) -> None:
        """Read more text and tell what is sure with `say`, `open_call` and `add_arguments`.

        Args:
            text: what follows the text before.
            final: nothing follows; what is held back must be told now.
        """

    def feed(self, text: str) -> ToolDelta:
        """Read the next piece of the text."""
        self.advance(text, final=False)
        return self._take()

    def finish(self) -> ToolDelta:
        """The text has ended: what was held back."""
        self.advance("", final=True)
        return self._take()

    def make_id(self) -> str:
        """An id for a new call."""
        return f"chatcmpl-tool-{secrets.token_hex(16)}"

    def say(self, content: str) -> None:
        """Tell text that is no part of a call."""
        self._delta.content += content

    def open_call(self, name: str) -> None:
        """Begin a call; the pieces of arguments that follow are its own."""
        self._delta.calls.append(ToolCallDelta(self.num_calls, id=self.make_id(), name=name))
        self.num_calls += 1

    def add_arguments(self, piece: str) -> None:
        """Tell a piece of the last call's arguments."""
        calls, index = self._delta.calls, self.num_calls - 1
        if not piece:
            return
        if calls and calls[-1].index == index and calls[-1].id is None:
            calls[-1].arguments += piece
        else:
            calls.append(ToolCallDelta(index, piece))

    def _take(self) -> ToolDelta:
        delta, self._delta = self._delta, ToolDelta()
        return delta


class MarkedToolParser(ToolParser):
    """A format whose calls begin with a marker.

    White space alone, before the first call and between calls, is not content.

    Attributes:
        OPENERS: markers that begin a call.
        SEPARATORS: what may stand between or behind calls and is dropped there.
        BARE_AT_START: a "{" that begins the message begins a call.
        BARE_AFTER_CALL: so does a "{" right behind a call.
    """

    OPENERS: ClassVar[tuple[str, ...]] = ()
    SEPARATORS: ClassVar[tuple[str, ...]] = ()
    BARE_AT_START: ClassVar[bool] = False
    BARE_AFTER_CALL: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.rest = ""  # text that is read but not told, behind `_blanks`
        self.opener: str | None = None  # of the call that is being read; "" for a bare one; None: in text
        self._lead = ""  # white space before the opener, told if the call turns out not to be one
        self._blank = True  # nothing but white space since the beginning or the last call
        self._blanks: list[str] = []  # pieces of that white space
        # texts that are still to be read, and how much of the first one is
        self._unread: collections.deque[str] = collections.deque()
        self._at = 0
        self._num_false_starts = 0

    @abc.abstractmethod
    def read_call(self, final: bool) -> bool:
        """Read on in `rest`, which begins behind the opener, or with the "{" of a bare call.

        Ends with `end_call` or, before `open_call`, with `refuse_call`. Returns whether it should be called again
        without more text.
        """

    def advance(self, text: str, final: bool) -> None:
        """See `ToolParser.advance`."""
        self._unread.append(text)
        self._read_pieces()
        if final:
            self._read("", final=True)
            while self._unread:  # what is behind an opener whose call has no end
                self._read_pieces()
                self._read("", final=True)

    def end_call(self) -> bool:
        """The call is complete; `rest` is what follows it."""
        self.opener = None
        self._blank = True
        return True

    def refuse_call(self) -> bool:
        """It is no call: its opener is content, and so is what follows unless another opener is in it."""
        size = 0 if self.opener else 1
        self.say(self._lead + (self.opener or "") + self.rest[:size])
        self.rest = self.rest[size:]
        self.opener = None
        self._blank = False
        if len(self.rest) > _PIECE:
            self._num_false_starts += 1
            self._read_again()
        return True

    def _read_again(self) -> None:
        """Give back what was read but not told, to be read in pieces."""
        if self._at:
            self._unread[0] = self._unread[0][self._at :]
            self._at = 0
        self._unread.appendleft(self.rest)
        self.rest = ""

    def _read_pieces(self) -> None:
        """Read what is to be read."""
        while self._unread:
            text, start = self._unread[0], self._at
            self._at += _PIECE
            if self._at >= len(text):
                self._unread.popleft()
                self._at = 0
            self._read(text[start : start + _PIECE], final=False)

    def _read(self, text: str, final: bool) -> None:
        self.rest += text
        while self.rest or self._blanks or self.opener is not None:
            if not (self._read_text(final) if self.opener is None else self.read_call(final)):
                return

    def _read_text(self, final: bool) -> bool:
        if self._num_false_starts > _MAX_FALSE_STARTS:
            self.say(self._take_blanks() + self.rest)
            self.rest = ""
            return False
        if self._blank:
            return self._read_blank(final)
        found = [(at, opener) for opener in self.OPENERS if (at := self.rest.find(opener)) >= 0]
        if found:
            at, opener = min(found)
            self.say(self.rest[:at])
            return self._begin_call("", opener, self.rest[at:])
        end = len(self.rest) if final else len(self.rest) - held_back(self.rest, self.OPENERS)
        self.say(self.rest[:end])
        self.rest = self.rest[end:]
        return False

    def _read_blank(self, final: bool) -> bool:
        """Read where only white space came since the beginning or the last call."""
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
            return self._begin_call(self._take_blanks(), "", text)
        for opener in self.OPENERS:
            if text.startswith(opener):
                return self._begin_call(self._take_blanks(), opener, text)
        if not final and any(marker.startswith(text) for marker in markers):  # of an empty text too
            return False
        if not text and self.num_calls:
            self._blanks.clear()
            return False
        self.rest = self._take_blanks() + text
        self._blank = False
        return True

    def _take_blanks(self) -> str:
        """The white space that was held back."""
        blanks = "".join(self._blanks)
        self._blanks.clear()
        return blanks

    def _begin_call(self, lead: str, opener: str, text: str) -> bool:
        self._lead, self.opener, self.rest = lead, opener, text[len(opener) :]
        return True


def held_back(text: str, markers: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a marker.

    Example::

        held_back("so <thi", ("<think>",))  # 4
    """
    longest = min(len(text), max((len(marker) - 1 for marker in markers), default=0))
    for size in range(longest, 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


P = TypeVar("P", bound=type[ToolParser])
_registered: dict[str, type[ToolParser]] = {}


def register_tool_parser(name: str) -> Callable[[P], P]:
    """Decorator of a parser in a plug-in file: the name that --tool-call-parser knows it by."""

    def register(parser: P) -> P:
        _registered[name] = parser
        return parser

    return register


def load_tool_parser_plugin(path: str) -> None:
    """Run a plug-in file, whose parsers register themselves.

    Raises:
        ConfigError: it cannot be read or fails.
    """
    try:
        runpy.run_path(path)
    except Exception as error:  # whatever the user's program raises
        raise ConfigError(f"--tool-parser-plugin: cannot load {path}: {type(error).__name__}: {error}") from error


def find_tool_parser(name: str) -> type[ToolParser]:
    """The parser of a format.

    Raises:
        ConfigError: there is none of this name; the text lists all.
    """
    if name in _registered:
        return _registered[name]
    if name not in TOOL_PARSERS:
        known = ", ".join(sorted(TOOL_PARSERS.keys() | _registered.keys()))
        raise ConfigError(f"--tool-call-parser: invalid tool call parser: {name} (chose from {{ {known} }})")
    module, _, attribute = TOOL_PARSERS[name].partition(":")
    parser: type[ToolParser] = getattr(importlib.import_module(module), attribute)
    return parser
