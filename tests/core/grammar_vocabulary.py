"""A vocabulary of bytes and some longer tokens, and ways to walk through grammars with it."""

from __future__ import annotations

import random

import numpy as np

from ascend_vllm.core.structured.grammar import Grammar
from ascend_vllm.core.structured.vocabulary import Vocabulary

_WORDS = ["ab", "true", '{"', '":', '", "', "no", "yes", " 1", "\r\n", "é", "日本", "null", "}}", "00", "</think>"]
# not a multiple of 32; some ids have no token
SIZE = 301
EOS = 290
SPECIAL = 291


def make_vocabulary(size: int = SIZE) -> Vocabulary:
    """Token i < 256 is the byte i; then come longer tokens, ids without a token, and two special ones."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in _WORDS]
    tokens += [b""] * (size - len(tokens))
    return Vocabulary(tokens, {EOS: "<eos>", SPECIAL: "<special>"}, [EOS])


def allowed(grammar: Grammar, vocabulary: Vocabulary) -> set[int]:
    """The token ids in a grammar's bitmask."""
    row = np.full(vocabulary.num_words, -1, np.int32)
    grammar.fill_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def spell(text: str, vocabulary: Vocabulary, *, longest: bool) -> list[int]:
    """A text's token ids, of the longest tokens or of single bytes."""
    data, ids = text.encode(), []
    known = {token: id_ for id_, token in reversed(list(enumerate(vocabulary.tokens))) if token}
    while data:
        length = max(n for n in range(1, 9) if data[:n] in known) if longest else 1
        ids.append(known[data[:length]])
        data = data[length:]
    return ids


def matches(grammar: Grammar, text: str, vocabulary: Vocabulary, *, longest: bool = False) -> bool:
    """Whether a whole text is accepted; checks that the bitmask agrees for each of its tokens.

    Where only one text is possible, the bitmask may have only one of the ways to tokenize it.
    """
    for token_id in spell(text, vocabulary, longest=longest):
        marked = allowed(grammar, vocabulary)
        if not grammar.accept_tokens([token_id]):
            assert token_id not in marked
            return False
        if token_id not in marked:
            (forced,) = marked
            token, other = vocabulary.tokens[token_id], vocabulary.tokens[forced]
            assert other.startswith(token) or token.startswith(other)
    return grammar.is_accepting


def random_text(grammar: Grammar, vocabulary: Vocabulary, rng: random.Random, max_tokens: int = 60) -> str | None:
    """A random text that a grammar accepts; None if it became too long."""
    data = b""
    for _ in range(max_tokens):
        if grammar.is_accepting and rng.random() < 0.5:
            return data.decode()
        ids = sorted(allowed(grammar, vocabulary))
        if not ids:
            assert grammar.is_accepting and grammar.is_terminated
            return data.decode()
        # printable bytes and longer tokens: random multi-byte characters are rarely complete
        token_id = rng.choice([id_ for id_ in ids if not 128 <= id_ < 256] or ids)
        assert grammar.accept_tokens([token_id])
        data += vocabulary.tokens[token_id]
    return None
