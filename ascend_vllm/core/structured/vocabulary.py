"""What each token id adds to a text, in bytes: what grammars are matched against."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.hf_tokenizer import bytes_of_token, is_byte_level, load_hf_tokenizer

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# stands for a space in the vocabularies of sentencepiece
_SPACE_MARK = "▁"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        tokens: by id, as many as the model has logits; b"" for special tokens and for ids without a token, which
            are no part of a text.
        special_texts: special tokens, by id, as their vocabulary writes them.
        eos_token_ids: ids that end a text, the primary one first.
        encode: how the tokenizer would write a text, without tokens around it; None: there is no tokenizer.
    """

    tokens: list[bytes]
    special_texts: dict[int, str]
    eos_token_ids: list[int]
    encode: Callable[[str], list[int]] | None = None

    @property
    def size(self) -> int:
        """Number of logits."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """32-bit words of a bitmask."""
        return -(-self.size // 32)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token looks like, special ones too."""
        return self.tokens[token_id] or self.special_texts.get(token_id, "").encode()

    @classmethod
    def load(cls, model: ModelConfig) -> Vocabulary:
        """Reads a model's tokenizer.

        Raises:
            ModelLoadError: there is none, or it cannot be read.
        """
        tokenizer = load_hf_tokenizer(
            model.tokenizer, slow=model.tokenizer_mode == "slow", trust_remote_code=model.trust_remote_code
        )
        ids = model.eos_token_ids
        if ids is None:
            ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        eos_token_ids = [id_ for id_ in ids if 0 <= id_ < model.vocab_size]
        return cls.from_tokenizer(tokenizer, model.vocab_size, eos_token_ids)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, size: int, eos_token_ids: list[int]) -> Vocabulary:
        """The vocabulary of a transformers tokenizer.

        Args:
            tokenizer: fast or slow.
            size: number of logits; there may be more, or fewer, of them than tokens.
            eos_token_ids: ids that end a text.
        """
        added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= {*tokenizer.all_special_ids, *eos_token_ids}
        written = {id_: token for token, id_ in tokenizer.get_vocab().items()}
        read = _reader(tokenizer)
        tokens = [b""] * size
        special_texts = {}
        # once per process, in a thread of its own: a turn per token
        for id_, token in written.items():
            if not 0 <= id_ < size:
                continue
            if id_ in special:
                special_texts[id_] = str(token)
            else:
                tokens[id_] = added[id_].encode() if id_ in added else read(id_, token)
        return cls(tokens, special_texts, eos_token_ids, _encoder(tokenizer))


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if not tokenizer.is_fast:
        return functools.partial(tokenizer.encode, add_special_tokens=False)
    backend = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    return encode


class _ByteLevelReader:
    """Vocabularies in which each byte is a printable character."""

    def __call__(self, _token_id: int, token: str) -> bytes:
        return bytes_of_token(token)


class _PieceReader:
    """Vocabularies of sentencepiece: spaces are marked, and characters without a token are bytes like <0x0A>."""

    def __call__(self, _token_id: int, token: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(token)
        if match is not None:
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE_MARK, " ").encode()


class _BytesReader:
    """Vocabularies of Python tokenizers whose tokens are bytes."""

    def __call__(self, _token_id: int, token: str | bytes) -> bytes:
        return token if isinstance(token, bytes) else token.encode()


class _DecodingReader:
    """Any other: what decoding gives behind a letter, since decoders strip the space before a text's first word.

    Parts of characters are left out: they cannot be told from each other.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._letter = tokenizer.encode("a", add_special_tokens=False)
        self._length = len(self._decode(self._letter))

    def __call__(self, token_id: int, _token: str) -> bytes:
        text = self._decode([*self._letter, token_id])[self._length :]
        return b"" if _REPLACEMENT in text else text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def _reader(tokenizer: Any) -> Any:
    """What turns a tokenizer's tokens into bytes."""
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    vocabulary = tokenizer.get_vocab()
    if any(isinstance(token, bytes) for token in vocabulary):
        return _BytesReader()
    if backend is not None and is_byte_level(backend):
        return _ByteLevelReader()
    if "<0x0A>" in vocabulary or (backend is not None and _marks_spaces(backend)):
        return _PieceReader()
    return _DecodingReader(tokenizer)


def _marks_spaces(backend: Any) -> bool:
    """Whether a decoder does no more than to turn marks into spaces, and bytes into characters."""
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    decoders = state["decoders"] if state["type"] == "Sequence" else [state]
    return any(
        decoder["type"] == "Metaspace" or _SPACE_MARK in json.dumps(decoder.get("pattern", ""), ensure_ascii=False)
        for decoder in decoders
    )
