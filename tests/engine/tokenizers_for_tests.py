"""Small tokenizers of the kinds that models have, trained on the spot."""

from __future__ import annotations

import json
import pathlib

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. How does the block size change the throughput?",
    "Die Größe der Blöcke: naïve façade, jalapeño, 123 4567 !?",
    "日本語のテキストと中文文本 한국어 텍스트",
    "emoji 😀 👩‍👩‍👧 and\ttabs\nnew lines  two  spaces",
] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_byte_level(directory: pathlib.Path, vocab_size: int = 500) -> pathlib.Path:
    """A ChatML tokenizer as Qwen2's: byte-level BPE."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    backend.add_tokens([AddedToken("<tool call>", special=False), AddedToken("世界", special=False)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory


def make_sentencepiece(directory: pathlib.Path, vocab_size: int = 500) -> pathlib.Path:
    """A tokenizer as Llama 2's: words marked with "▁", unknown characters as bytes, text stripped of one space."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    backend.train_from_iterator([line for line in CORPUS if line.isascii()], trainer)
    vocab = backend.get_vocab()
    # Bytes are ordinary tokens: only the first three are special.
    merges = [tuple(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]
    rebuilt = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rebuilt.normalizer, rebuilt.decoder = backend.normalizer, backend.decoder
    rebuilt.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rebuilt, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )
    tokenizer.save_pretrained(directory)
    return directory


def make_word_level(directory: pathlib.Path) -> pathlib.Path:
    """A tokenizer of whole words without a decoder: words are joined by spaces."""
    words = sorted({word for line in CORPUS for word in line.split()})
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", "</s>", *words])}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["</s>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory
