"""Loads a model's tokenizer with transformers.

A self-contained `tokenizer.json` is loaded without `AutoTokenizer`, which would import torch into the API server
(seconds and hundreds of megabytes).
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

from ascend_vllm.errors import ModelLoadError
from ascend_vllm.model_files import check_file, is_there, needs_trust, one_line, read_json, shown

_CONFIG_FILE = "tokenizer_config.json"
# a class of a repository's module, possibly of another repository: owner/name--module.Class
_CLASS = re.compile(r"([\w.-]+(/[\w.-]+)?--)?\w+\.\w+")
# of sentencepiece vocabularies with byte fallback
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# files that transformers opens if they exist
_FILES = (
    _CONFIG_FILE,
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_template(value: Any) -> bool:
    """Whether a value is a chat template, or a list of named ones."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(
        isinstance(named, dict) and isinstance(named.get("name"), str) and isinstance(named.get("template"), str)
        for named in value
    )


def _is_class_list(value: Any) -> bool:
    """Whether a value names a slow and a fast tokenizer class, at least one of them."""
    named = value if isinstance(value, list) else []
    return len(named) == 2 and any(named) and all(_CLASS.fullmatch(name) for name in named if name is not None)


def _is_auto_map(value: Any) -> bool:
    """Whether a value is an `auto_map`: of class names, or in an old form only the tokenizer's two."""
    if isinstance(value, dict):
        return "AutoTokenizer" not in value or _is_class_list(value["AutoTokenizer"])
    return _is_class_list(value)


def _is_token_table(value: Any) -> bool:
    return isinstance(value, dict) and all(name.isdecimal() and _is_token(token) for name, token in value.items())


_TOKEN = ("a text, or an object with a text as its content", _is_token)
# fields of tokenizer_config.json, each of which may be null: description of the valid values, and a test
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "chat_template": ("a text, or a list of objects with a name and a template", _is_template),
    **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"), _TOKEN),
    "added_tokens_decoder": ("an object of tokens by their ids", _is_token_table),
    "auto_map": ("an object, in it AutoTokenizer with the names of two classes or null", _is_auto_map),
    "tokenizer_class": ("a text", lambda value: isinstance(value, str)),
    "extra_special_tokens": ("an object or a list", lambda value: isinstance(value, dict | list)),
    "additional_special_tokens": ("a list", lambda value: isinstance(value, list)),
}


def load_hf_tokenizer(directory: str, *, slow: bool = False, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer, fast or slow, in a directory.

    Args:
        directory: with tokenizer.json, tokenizer_config.json and so on.
        slow: use the Python implementation where transformers has one.
        trust_remote_code: run the directory's own tokenizer code, if it has any.

    Raises:
        ModelLoadError: there is no tokenizer, a file is broken, the tokenizer is code which is not trusted, or code
            which does not work.
    """
    path = pathlib.Path(directory)
    if not path.is_dir():
        raise ModelLoadError(f"cannot load a tokenizer: {directory} is not a directory")
    config = _read_config(path)
    if classes := _own_classes(config):
        if not trust_remote_code:
            raise ModelLoadError(needs_trust(path / _CONFIG_FILE, "tokenizer"))
        from ascend_vllm.repository_tokenizer import load_repository_tokenizer

        return load_repository_tokenizer(path, classes if slow else classes[::-1])
    try:
        if not slow and _is_self_contained(path, config):
            from transformers.tokenization_utils_tokenizers import TokenizersBackend

            return TokenizersBackend.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            directory, use_fast=not slow, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in tokenizers is a BaseException
        raise _diagnosis(path, error) from error


def _read_config(directory: pathlib.Path) -> dict[str, Any]:
    """tokenizer_config.json, {} if there is none; also checks that transformers will open regular files only.

    Raises:
        ModelLoadError: something is not a regular file, or a field has the wrong type.
    """
    for name in _FILES:
        if is_there(directory / name):
            check_file(directory / name)
    path = directory / _CONFIG_FILE
    if not is_there(path):
        return {}
    config = read_json(path, dict)
    for name, (words, test) in _FIELDS.items():
        value = config.get(name)
        if value is not None and not test(value):
            raise ModelLoadError(f"{path}: {name!r} must be {words}, got {shown(value)}")
    return config


def _own_classes(config: dict[str, Any]) -> list[str]:
    """The tokenizer's classes in the repository's own code, the slow one first."""
    auto_map = config.get("auto_map") or {}
    named = auto_map.get("AutoTokenizer") or [] if isinstance(auto_map, dict) else auto_map
    return [name for name in named if name is not None]


def slow_ids(tokenizer: Any, *texts: str, **options: Any) -> list[int]:
    """Token ids of a text or a pair from a slow tokenizer.

    Without the attention mask, which would be made by `_pad`: repositories' own have fewer parameters than
    transformers 5 passes.

    Args:
        tokenizer: a transformers tokenizer.
        texts: one or two.
        options: of the tokenizer's call.
    """
    return list(tokenizer(*texts, return_attention_mask=False, **options).input_ids)


def _diagnosis(directory: pathlib.Path, error: BaseException) -> ModelLoadError:
    """The error for a tokenizer that cannot be loaded; names the invalid file if there is one."""
    present = [name for name in _FILES if is_there(directory / name)]
    for name in present:
        try:
            if name.endswith(".json"):
                read_json(directory / name, dict)
            elif name.endswith(".jinja"):
                (directory / name).read_text(encoding="utf-8")
        except ModelLoadError as finding:
            return finding
        except (OSError, ValueError) as finding:
            return ModelLoadError(f"{directory / name} cannot be read: {one_line(finding)}")
    files = f" ({', '.join(present)})" if present else ""
    return ModelLoadError(f"cannot load the tokenizer in {directory}{files}: {one_line(error)}")


def _is_self_contained(directory: pathlib.Path, config: dict[str, Any]) -> bool:
    """Whether tokenizer.json and tokenizer_config.json define the tokenizer completely.

    They do not if the end-of-sequence token is a tokenizer class's default.
    """
    return (directory / "tokenizer.json").is_file() and "eos_token" in config


def is_byte_level(backend: Any) -> bool:
    """Whether a `tokenizers.Tokenizer` has a byte-level vocabulary."""
    return backend.decoder is not None and json.loads(backend.decoder.__getstate__())["type"] == "ByteLevel"


def byte_of_token(token: str | None) -> int | None:
    """The byte of a byte-fallback token like <0x0A>; None: the token is another one, or none."""
    found = None if token is None else _BYTE_TOKEN.fullmatch(token)
    return None if found is None else int(found[1], 16)


def bytes_of_token(token: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary; added tokens are plain text."""
    characters = _byte_characters()
    if all(character in characters for character in token):
        return bytes(characters[character] for character in token)
    return token.encode()


@functools.cache
def _byte_characters() -> dict[str, int]:
    """Character → byte of byte-level vocabularies, as in GPT-2's code.

    Printable Latin-1 bytes are their own characters; the other 68 are numbered from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
