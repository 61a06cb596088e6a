"""Reads the small files of a model directory; whatever untrusted files contain, errors are single lines.

Pipes and devices are rejected before they are opened, since reading them may block or never end.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from typing import Any, TypeVar

from ascend_vllm.errors import ModelLoadError

T = TypeVar("T", dict[str, Any], list[Any])

# of a JSON file; tokenizers with a million tokens are smaller
MAX_JSON_BYTES = 256 << 20
# of another library's error message
_MAX_CHARACTERS = 300


def one_line(error: object) -> str:
    """The message of an exception as one line of limited length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…"


def shown(value: object) -> str:
    """A value for an error message, truncated."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def needs_trust(path: pathlib.Path, part: str) -> str:
    """The error message for a part of a model that is Python code and not trusted."""
    return (
        f"{path}: the {part} is Python code of the model's repository; if you trust it, let it run by setting "
        "`trust_remote_code=True` in LLM or using the `--trust-remote-code` flag in the CLI."
    )


def check_file(path: pathlib.Path) -> int:
    """Size of a file in bytes.

    Raises:
        ModelLoadError: it does not exist, or is not a regular file.
    """
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{shown_path(path)} cannot be read: {_reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
        raise ModelLoadError(f"{path} cannot be read: it is {kind}")
    return status.st_size


def is_there(path: pathlib.Path) -> bool:
    """Whether a path exists, even if it is not a file or is a broken link."""
    return os.path.lexists(path)


def shown_path(path: pathlib.Path) -> str:
    """A path for an error message, truncated."""
    text = str(path)
    return text if text.isprintable() and len(text) <= _MAX_CHARACTERS else shown(text)


def read_json(path: pathlib.Path, kind: type[T]) -> T:
    """The object or list in a JSON file.

    Raises:
        ModelLoadError: the file cannot be read, or contains something else.
    """
    size = check_file(path)
    if size > MAX_JSON_BYTES:
        raise ModelLoadError(f"{path} has {size} bytes; a JSON file may have {MAX_JSON_BYTES} at most")
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {_reason(error)}") from error
    except RecursionError as error:
        raise ModelLoadError(f"{path} is nested too deeply") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {one_line(error)}") from error
    if not isinstance(loaded, kind):
        wanted = "object" if kind is dict else kind.__name__
        raise ModelLoadError(f"{path} must hold a JSON {wanted}, not a {type(loaded).__name__}")
    return loaded


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or one_line(error)
