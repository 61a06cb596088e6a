"""The flag --chat-template."""

from __future__ import annotations

import codecs
import pathlib

from ascend_vllm.errors import ConfigError


def load_chat_template(value: str | None) -> str | None:
    """The template of --chat-template: the contents of a file, or a literal with escapes such as ``\\n``.

    Raises:
        ConfigError: it can only be a path, and there is no such file.
    """
    if value is None:
        return None
    try:
        return pathlib.Path(value).read_text(encoding="utf-8")
    except OSError:
        # a literal may well be too long for a file's name
        if not any(character in value for character in "{}\n"):
            raise ConfigError(
                f"The supplied chat template string ({value}) appears path-like, but doesn't exist!"
            ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {value} is not a text file: {error}") from error
    return codecs.decode(value.encode("latin-1", "backslashreplace"), "unicode_escape")
