"""Prevents log injection: text from clients in log messages must not look like further log lines.

This is a filter of the loggers, not of handlers or formatters, so that it applies to any logging configuration.
"""

from __future__ import annotations

import logging
import re
import traceback

# of a message; longer ones are truncated
MAX_CHARACTERS = 8192
_MAX_TRACEBACK_CHARACTERS = 1 << 16

# control characters, line and paragraph separators, bidirectional controls, and surrogates, which cannot be encoded
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_ACCESS = "uvicorn.access"


def keep_safe(*names: str) -> None:
    """Make loggers write each message as one line of limited length with control characters escaped.

    Args:
        names: of the loggers; does not apply to their children.
    """
    for name in names:
        logging.getLogger(name).addFilter(_make_safe)


def _make_safe(record: logging.LogRecord) -> bool:
    """A logging filter that changes records and drops none."""
    try:
        message = record.getMessage()
    except Exception:
        return True  # wrong arguments, which the handler reports
    safe = one_line(message.rstrip("\n"))
    if safe != message:
        if record.name == _ACCESS and isinstance(record.args, tuple):
            # uvicorn's formatter reads the arguments
            record.args = tuple(one_line(item) if isinstance(item, str) else item for item in record.args)
        else:
            record.msg, record.args = safe, ()
    if record.exc_info and not record.exc_text:
        # formatters use this instead of formatting exc_info
        record.exc_text = _safe_traceback("".join(traceback.format_exception(*record.exc_info)))
    return True


def one_line(text: str) -> str:
    """A text on one line, truncated if it is too long, with control characters escaped.

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
    """A traceback with all lines indented, so that those of an exception's message do not look like log records."""
    half = _MAX_TRACEBACK_CHARACTERS // 2
    if len(text) > 2 * half:
        text = f"{text[:half]}\n… (cut, of {len(text)} characters)\n{text[-half:]}"
    return "\n".join("  " + _escaped(line) for line in text.rstrip("\n").split("\n"))
