"""Fixtures of the engine's tests."""

from __future__ import annotations

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import tokenizers_for_tests

from ascend_vllm.engine.tokenization import Tokenizer


@pytest.fixture(scope="session")
def byte_level_directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Directory of a Qwen2-like tokenizer."""
    return tokenizers_for_tests.make_byte_level(tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="session")
def byte_level(byte_level_directory: pathlib.Path) -> Tokenizer:
    """A Qwen2-like tokenizer."""
    return Tokenizer.from_directory(str(byte_level_directory))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A Llama-2-like tokenizer."""
    return Tokenizer.from_directory(
        str(tokenizers_for_tests.make_sentencepiece(tmp_path_factory.mktemp("sentencepiece")))
    )


@pytest.fixture(scope="session")
def word_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer without a decoder."""
    return Tokenizer.from_directory(str(tokenizers_for_tests.make_word_level(tmp_path_factory.mktemp("words"))))
