"""Reading a model's tokenizer with transformers, for all processes that need one.

Where a directory holds a self-contained `tokenizer.json`, its `tokenizers` backend is loaded without going through
`AutoTokenizer`, whose import brings torch into the API-server process (seconds and hundreds of megabytes that serve
nothing there).
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from ascend_vllm.errors import ModelLoadError


def load_hf_tokenizer(directory: str, *, slow: bool = False, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer, fast or slow, in a directory.

    Args:
        directory: where tokenizer.json, tokenizer_config.json and so on are.
        slow: take the Python implementation where transformers has one.
        trust_remote_code: run the directory's own tokenizer code, if it has any.

    Raises:
        ModelLoadError: no tokenizer there, a broken file, or one that needs code which is not trusted.
    """
    path = pathlib.Path(directory)
    if not path.is_dir():
        raise ModelLoadError(f"cannot load a tokenizer: {directory} is not a directory")
    try:
        if not slow and _is_self_contained(path):
            from transformers.tokenization_utils_tokenizers import TokenizersBackend

            return TokenizersBackend.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            directory, use_fast=not slow, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers and tokenizers raise anything, down to bare Exception
        hint = "; pass --trust-remote-code to run its code" if "trust_remote_code" in str(error) else ""
        raise ModelLoadError(f"cannot load the tokenizer in {directory}: {error}{hint}") from error


def _is_self_contained(directory: pathlib.Path) -> bool:
    """Whether tokenizer.json and tokenizer_config.json say all that there is to know.

    They do not where the directory brings tokenizer code of its own, nor where the configuration leaves the
    end-of-text token to the defaults of a tokenizer class.
    """
    config_file = directory / "tokenizer_config.json"
    if not (directory / "tokenizer.json").is_file() or not config_file.is_file():
        return False
    config = json.loads(config_file.read_text(encoding="utf-8"))
    return "auto_map" not in config and "eos_token" in config


def is_byte_level(backend: Any) -> bool:
    """Whether the tokens of a `tokenizers.Tokenizer` are written in the characters that stand for bytes."""
    return backend.decoder is not None and json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel"


def bytes_of_token(token: str) -> bytes:
    """Bytes that a token of a byte-level vocabulary stands for; added tokens are written as they are."""
    characters = _byte_characters()
    if all(character in characters for character in token):
        return bytes(characters[character] for character in token)
    return token.encode()


@functools.cache
def _byte_characters() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (the GPT-2 paper's code).

    Printable Latin-1 bytes stand for themselves, the other 68 are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
