"""Lines of the log that nobody can forge: what clients send is in them, and must not look like lines of its own.

A filter of the loggers themselves, not of handlers or formatters: it holds for whatever log an operator configures.
"""

from __future__ import annotations

import logging
import re
import traceback

# of a message; what is more is cut
MAX_CHARACTERS = 8192
_MAX_TRACEBACK_CHARACTERS = 1 << 16

# Control characters, separators of lines and paragraphs, what turns the direction in which text is shown, and halves
# of characters, which no file can hold.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_ACCESS = "uvicorn.access"


def keep_safe(*names: str) -> None:
    """Let loggers write each message as one line, of limited length, that shows control characters as escapes.

    Args:
        names: of the loggers; it does not hold for those below them.
    """
    for name in names:
        logging.getLogger(name).addFilter(_make_safe)


def _make_safe(record: logging.LogRecord) -> bool:
    """A filter that lets every record pass, made safe."""
    try:
        message = record.getMessage()
    except Exception:
        return True  # a mistake of the caller, which the handler reports
    safe = one_line(message.rstrip("\n"))
    if safe != message:
        if record.name == _ACCESS and isinstance(record.args, tuple):
            # its formatter reads the arguments
            record.args = tuple(one_line(item) if isinstance(item, str) else item for item in record.args)
        else:
            record.msg, record.args = safe, ()
    if record.exc_info and not record.exc_text:
        # formatters take this instead of making one
        record.exc_text = _safe_traceback("".join(traceback.format_exception(*record.exc_info)))
    return True


def one_line(text: str) -> str:
    """A text as part of a line: cut if it is too long, control characters and the like escaped.

    Example::

        one_line("a\\nb")  # a, backslash, n, b
    """
    if len(text) <= MAX_CHARACTERS and text.isprintable():
        return text
    escaped = _escaped(text[:MAX_CHARACTERS])
    if max(len(text), len(escaped)) <= MAX_CHARACTERS:
        return escaped
    return f"{escaped[:MAX_CHARACTERS]} … (cut, of {len(text)} characters)"


def _escaped(text: str) -> str:
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _safe_traceback(text: str) -> str:
    """A traceback, which keeps its lines. All are indented: those of a message in it do not look like records."""
    half = _MAX_TRACEBACK_CHARACTERS // 2
    if len(text) > 2 * half:
        text = f"{text[:half]}\n… (cut, of {len(text)} characters)\n{text[-half:]}"
    return "\n".join("  " + _escaped(line) for line in text.rstrip("\n").split("\n"))
