"""Separates a model's thoughts from its answer, piece by piece as they are generated."""

from __future__ import annotations

from ascend_vllm.entrypoints.parsers.tools import held_back
from ascend_vllm.errors import ConfigError

THOUGHTS_START = "<think>"
THOUGHTS_END = "</think>"


class ReasoningParser:
    """Reads the text of one choice: thoughts between ``<think>`` and ``</think>``, then the answer.

    Args:
        thinking: the text begins inside the thoughts, without a tag of its own.
    """

    def __init__(self, thinking: bool) -> None:
        self._rest = ""  # text that is read but not told, behind `_blanks`
        self._blanks: list[str] = []  # white space at the beginning, while the opening tag may come
        self._thinking: bool | None = True if thinking else None  # None: not known yet
        self._may_start = True  # the opening tag may come, even when it is not needed

    def feed(self, text: str) -> tuple[str, str]:
        """Read the next piece; what of it is sure to be thoughts, and what is sure to be the answer."""
        self._rest += text
        return self._advance(final=False)

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> tuple[str, str]:
        if self._may_start and not self._skip_start(final):
            return "", ""
        if not self._thinking:
            return "", self._take(len(self._rest))
        end = self._rest.find(THOUGHTS_END)
        if end < 0:
            return self._take(len(self._rest) - (0 if final else held_back(self._rest, (THOUGHTS_END,)))), ""
        thoughts = self._take(end)
        self._take(len(THOUGHTS_END))
        self._thinking = False
        return thoughts, self._take(len(self._rest))

    def _skip_start(self, final: bool) -> bool:
        """Drop the opening tag at the beginning; False: more text is needed to know."""
        text = self._rest.lstrip()
        if len(text) < len(self._rest):
            self._blanks.append(self._rest[: len(self._rest) - len(text)])
            self._rest = text
        if text.startswith(THOUGHTS_START):
            self._rest = text[len(THOUGHTS_START) :]
            self._thinking = True
        elif not final and THOUGHTS_START.startswith(text):
            return False
        else:
            self._rest = "".join([*self._blanks, text])
            self._thinking = bool(self._thinking)
        self._blanks.clear()
        self._may_start = False
        return True

    def _take(self, size: int) -> str:
        text, self._rest = self._rest[:size], self._rest[size:]
        return text


# name of a format → whether all of its answers begin with thoughts, tag or not
REASONING_PARSERS: dict[str, bool] = {"deepseek_r1": True, "qwen3": False}


def check_reasoning_parser(name: str) -> None:
    """Raise `ConfigError` unless there is a parser of this name."""
    if name not in REASONING_PARSERS:
        known = ", ".join(sorted(REASONING_PARSERS))
        raise ConfigError(f"--reasoning-parser: invalid reasoning parser: {name} (chose from {{ {known} }})")


def make_reasoning_parser(name: str, prompt: str) -> ReasoningParser:
    """A parser for one choice.

    Args:
        name: of `REASONING_PARSERS`.
        prompt: the rendered prompt; a template may end it with the opening tag, or with empty thoughts.
    """
    return ReasoningParser(begins_with_thoughts(name, prompt) is True)


def begins_with_thoughts(name: str, prompt: str) -> bool | None:
    """Whether a text begins inside of thoughts; None: it may open them itself; False: it has none.

    Args:
        name: of `REASONING_PARSERS`.
        prompt: which it follows.
    """
    start, end = prompt.rfind(THOUGHTS_START), prompt.rfind(THOUGHTS_END)
    if prompt.rstrip().endswith(THOUGHTS_END):
        return False  # the template has written the thoughts
    return REASONING_PARSERS[name] or (start > end and prompt.rstrip().endswith(THOUGHTS_START)) or None
