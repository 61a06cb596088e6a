"""Incremental parsers that separate a model's reasoning from its answer."""

from __future__ import annotations

from ascend_vllm.entrypoints.parsers.tools import partial_marker_length
from ascend_vllm.errors import ConfigError

REASONING_START = "<think>"
REASONING_END = "</think>"


class ReasoningParser:
    """Parses the text of one choice: reasoning between ``<think>`` and ``</think>``, then the answer.

    Args:
        thinking: whether the text begins with reasoning even without an opening tag.
    """

    def __init__(self, thinking: bool) -> None:
        self._rest = ""  # buffered text, behind `_blanks`
        self._blanks: list[str] = []  # leading white space while an opening tag may follow
        self._thinking: bool | None = True if thinking else None  # None: not known yet
        self._may_start = True  # an opening tag may follow, whether needed or not

    def feed(self, text: str) -> tuple[str, str]:
        """Parse the next chunk; returns the reasoning and the answer that it completes."""
        self._rest += text
        return self._advance(final=False)

    def finish(self) -> tuple[str, str]:
        """Returns the buffered reasoning and answer at the end of the text."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> tuple[str, str]:
        if self._may_start and not self._skip_start(final):
            return "", ""
        if not self._thinking:
            return "", self._take(len(self._rest))
        end = self._rest.find(REASONING_END)
        if end < 0:
            num_buffered = 0 if final else partial_marker_length(self._rest, (REASONING_END,))
            return self._take(len(self._rest) - num_buffered), ""
        reasoning = self._take(end)
        self._take(len(REASONING_END))
        self._thinking = False
        return reasoning, self._take(len(self._rest))

    def _skip_start(self, final: bool) -> bool:
        """Drops an opening tag at the start; False: more text is needed."""
        text = self._rest.lstrip()
        if len(text) < len(self._rest):
            self._blanks.append(self._rest[: len(self._rest) - len(text)])
            self._rest = text
        if text.startswith(REASONING_START):
            self._rest = text[len(REASONING_START) :]
            self._thinking = True
        elif not final and REASONING_START.startswith(text):
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


# name of a format → whether its answers begin with reasoning even without a tag
REASONING_PARSERS: dict[str, bool] = {"deepseek_r1": True, "qwen3": False}


def check_reasoning_parser(name: str) -> None:
    """Raise `ConfigError` unless there is a parser of this name."""
    if name not in REASONING_PARSERS:
        known = ", ".join(sorted(REASONING_PARSERS))
        raise ConfigError(f"--reasoning-parser: invalid reasoning parser: {name} (chose from {{ {known} }})")


def make_reasoning_parser(name: str, prompt: str, continues: bool = False) -> ReasoningParser | None:
    """A parser for one choice; None: it continues an answer whose reasoning is over.

    Args:
        name: of `REASONING_PARSERS`.
        prompt: the rendered prompt; a template may end it with the opening tag, or with empty reasoning.
        continues: whether the answer continues the prompt's last message.
    """
    begins = begins_with_reasoning(name, prompt, continues)
    return None if continues and not begins else ReasoningParser(begins is True)


def begins_with_reasoning(name: str, prompt: str, continues: bool = False) -> bool | None:
    """Whether an answer begins with reasoning; None: it may, with an opening tag; False: it has none.

    Args:
        name: of `REASONING_PARSERS`.
        prompt: of the answer.
        continues: whether the answer continues the prompt's last message, which may have begun with reasoning.
    """
    start, end = prompt.rfind(REASONING_START), prompt.rfind(REASONING_END)
    if prompt.rstrip().endswith(REASONING_END):
        return False  # the template contains the reasoning
    if continues:
        return start > end
    return REASONING_PARSERS[name] or (start > end and prompt.rstrip().endswith(REASONING_START)) or None
