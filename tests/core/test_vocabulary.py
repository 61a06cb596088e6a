"""The bytes of token ids, for tokenizers of all kinds."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.hf_tokenizer import load_hf_tokenizer
from tests.tiny_models import VOCAB_SIZE, tiny_model

TEXTS = ["Hello! How are you today?", " two  spaces\n\n and lines", "é 日本語 🙂", '{"a": [1, 2]}', "don't"]


def _sentencepiece(with_bytes: bool) -> Any:
    pieces = ["<unk>", "<s>", "</s>"]
    if with_bytes:
        pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyzHé日!?'", "▁H", "ell", "▁a", "▁▁"]
    vocabulary = {piece: id_ for id_, piece in enumerate(pieces)}
    merges = [("▁", "H"), ("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=with_bytes))
    if with_bytes:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    return _wrap(tokenizer, eos_token="</s>", unk_token="<unk>")


def _word_pieces() -> Any:
    pieces = ["[UNK]", "[SEP]", "a", "b", "play", "##ing", "##ed", "!"]
    tokenizer = Tokenizer(models.WordPiece({piece: id_ for id_, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _wrap(tokenizer, eos_token="[SEP]", unk_token="[UNK]")


def _wrap(tokenizer: Tokenizer, **special: str) -> Any:
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def text_of(vocabulary: Vocabulary, token_ids: list[int]) -> str:
    return b"".join(vocabulary.tokens[token_id] for token_id in token_ids).decode()


def test_byte_level() -> None:
    tokenizer = load_hf_tokenizer(tiny_model("qwen2"))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, VOCAB_SIZE + 10, [2])
    assert vocabulary.size == VOCAB_SIZE + 10 and vocabulary.num_words == 13
    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert text_of(vocabulary, token_ids) == text
        assert vocabulary.encode is not None and vocabulary.encode(text) == token_ids
    assert vocabulary.special_texts == {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    # padding and special tokens have no bytes
    assert [vocabulary.tokens[id_] for id_ in (0, 1, 2, VOCAB_SIZE, VOCAB_SIZE + 9)] == [b""] * 5
    # every byte has a token
    assert {token[0] for token in vocabulary.tokens if len(token) == 1} == set(range(256))


def test_fewer_logits_than_tokens() -> None:
    tokenizer = load_hf_tokenizer(tiny_model("qwen2"))
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 300, [2])
    assert len(vocabulary.tokens) == 300 and vocabulary.tokens[299]


@pytest.mark.parametrize("with_bytes", [True, False])
def test_pieces(with_bytes: bool) -> None:
    tokenizer = _sentencepiece(with_bytes)
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [2])
    texts = ["Hello! don't", " a  b", "é日"] + (["🙂\n"] if with_bytes else [])
    for text in texts:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        # such a tokenizer may put a space before a text, which its decoder removes
        assert text_of(vocabulary, token_ids) in (text, " " + text)
    ids = tokenizer.get_vocab()
    assert vocabulary.tokens[ids["▁H"]] == b" H" and vocabulary.tokens[ids["<tool>"]] == b"<tool>"
    assert vocabulary.tokens[ids["</s>"]] == b"" and vocabulary.special_texts[ids["</s>"]] == "</s>"
    if with_bytes:
        assert vocabulary.tokens[ids["<0x0A>"]] == b"\n" and vocabulary.tokens[ids["<0xFF>"]] == b"\xff"


def test_other_vocabularies_are_read_by_decoding() -> None:
    tokenizer = _word_pieces()
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [1])
    tokens = {token: vocabulary.tokens[id_] for token, id_ in tokenizer.get_vocab().items()}
    assert (tokens["play"], tokens["##ing"], tokens["[SEP]"]) == (b" play", b"ing", b"")
    assert text_of(vocabulary, tokenizer.encode("a playing", add_special_tokens=False)) == " a playing"
