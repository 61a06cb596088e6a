"""The bytes of each token, which grammars are matched against."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from ascend_vllm.config.model import ModelConfig
from ascend_vllm.hf_tokenizer import byte_of_token, bytes_of_token, is_byte_level, load_hf_tokenizer, slow_ids

# stands for a space in sentencepiece vocabularies
_SPACE_MARK = "▁"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        tokens: bytes by id, one entry per logit; b"" for special tokens and for ids without a token.
        special_texts: special tokens by id, as written in the tokenizer's vocabulary.
        eos_token_ids: ids that end a text, the primary one first.
        encode: tokenises a text without special tokens; None: there is no tokenizer.
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
        """Bytes of a token, also of a special one."""
        return self.tokens[token_id] or self.special_texts.get(token_id, "").encode()

    @classmethod
    def load(cls, model: ModelConfig) -> Vocabulary:
        """Reads a model's tokenizer.

        Raises:
            ModelLoadError: the tokenizer is missing or cannot be read.
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
            size: number of logits, which may be more or fewer than the tokens.
            eos_token_ids: ids that end a text.
        """
        added = {id_: str(token) for id_, token in tokenizer.added_tokens_decoder.items()}
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= {*tokenizer.all_special_ids, *eos_token_ids}
        written = {id_: token for token, id_ in tokenizer.get_vocab().items()}
        to_bytes = _make_converter(tokenizer)
        tokens = [b""] * size
        special_texts = {}
        for id_, token in written.items():
            if not 0 <= id_ < size:
                continue
            if id_ in special:
                special_texts[id_] = str(token)
            else:
                tokens[id_] = added[id_].encode() if id_ in added else to_bytes(id_, token)
        return cls(tokens, special_texts, eos_token_ids, _encoder(tokenizer))


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    if not tokenizer.is_fast:
        return functools.partial(slow_ids, tokenizer, add_special_tokens=False)
    backend = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _make_converter(tokenizer: Any) -> Callable[[int, Any], bytes]:
    """Makes the function (id, token) → bytes of a tokenizer."""
    backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
    vocabulary = tokenizer.get_vocab()
    if any(isinstance(token, bytes) for token in vocabulary):
        # a Python tokenizer whose tokens are bytes
        return lambda _id, token: token if isinstance(token, bytes) else token.encode()
    if backend is not None and is_byte_level(backend):
        return lambda _id, token: bytes_of_token(token)
    if "<0x0A>" in vocabulary or (backend is not None and _marks_spaces(backend)):
        return _sentencepiece_bytes
    return _decoding_converter(tokenizer)


def _sentencepiece_bytes(_token_id: int, token: str) -> bytes:
    """For sentencepiece vocabularies: spaces are marked, and characters without a token are bytes like <0x0A>."""
    byte = byte_of_token(token)
    return token.replace(_SPACE_MARK, " ").encode() if byte is None else bytes([byte])


def _decoding_converter(tokenizer: Any) -> Callable[[int, str], bytes]:
    """For any other: decodes each token behind a letter, since decoders strip a space at the start of a text.

    Tokens with partial characters become b"": decoding does not show their bytes.
    """

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    letter = _encoder(tokenizer)("a")
    length = len(decode(letter))

    def to_bytes(token_id: int, _token: str) -> bytes:
        text = decode([*letter, token_id])[length:]
        return b"" if _REPLACEMENT in text else text.encode()

    return to_bytes


def _marks_spaces(backend: Any) -> bool:
    """Whether a decoder turns marks into spaces."""
    if backend.decoder is None:
        return False
    state = json.loads(backend.decoder.__getstate__())
    decoders = state["decoders"] if state["type"] == "Sequence" else [state]
    return any(
        decoder["type"] == "Metaspace" or _SPACE_MARK in json.dumps(decoder.get("pattern", ""), ensure_ascii=False)
        for decoder in decoders
    )
