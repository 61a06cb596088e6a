"""--tokenizer-extension-path: a tokenizer that the user's own program supplies.

The file defines a class `VllmExtension` without constructor arguments and with two methods::

    class VllmExtension:
        def get_tokenizer(self, tokenizer_path): ...   # a tokenizer with the methods of transformers' ones
        def text_to_tokens(self, tokenizer, text): ... # the ids of a prompt

`text_to_tokens` tokenises prompts, and decides on special tokens; everything else, such as detokenisation, is done by
the tokenizer.
"""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import ConfigError

CLASS_NAME = "VllmExtension"
FILE_NAME = "vllm_extension.py"


class ExtensionTokenizer(Tokenizer):
    """A tokenizer whose `encode` calls an extension.

    Args:
        extension: the user's object.
        tokenizer: what its `get_tokenizer` returned.
    """

    def __init__(self, extension: Any, tokenizer: Any) -> None:
        super().__init__(tokenizer, one_thread=True)
        self._extension = extension

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - the extension decides
        return [int(token_id) for token_id in self._extension.text_to_tokens(self.hf, text)]


def load_extension(path: str, tokenizer_path: str) -> ExtensionTokenizer:
    """Imports an extension's file and makes its tokenizer.

    Args:
        path: of the file, or of a directory that holds vllm_extension.py.
        tokenizer_path: the directory of the model's tokenizer.

    Raises:
        ConfigError: the file or the class is missing, or fails.
    """
    file = pathlib.Path(path).expanduser().resolve()
    file = file / FILE_NAME if file.is_dir() else file
    flag = f"--tokenizer-extension-path {path}"
    spec = importlib.util.spec_from_file_location("vllm_extension", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"{flag}: there is no Python file {file}.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        extension = getattr(module, CLASS_NAME)()
        return ExtensionTokenizer(extension, extension.get_tokenizer(tokenizer_path))
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{flag} fails: {type(error).__name__}: {error}") from error


def tokenizer_of(config: ModelConfig) -> Tokenizer:
    """The tokenizer that a model's configuration names.

    Raises:
        ModelLoadError: it cannot be loaded.
        ConfigError: its extension fails.
    """
    if config.tokenizer_extension_path is not None:
        return load_extension(config.tokenizer_extension_path, config.tokenizer)
    slow = config.tokenizer_mode == "slow"
    return Tokenizer.from_directory(config.tokenizer, slow=slow, trust_remote_code=config.trust_remote_code)
