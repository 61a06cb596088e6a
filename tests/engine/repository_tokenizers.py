"""Repositories whose tokenizers are Python code, in the shape of the families that have them.

The code is written for these tests. Every module leaves a file `ran` beside the repository when it is executed.
"""

from __future__ import annotations

import base64
import json
import pathlib
import textwrap

# words, pieces and bytes; all ids are below the vocabulary of tests/tiny_models.py
WORDS = ("▁", "▁the", "▁fox", "▁a", "th", "e", "h", "o", "x", "a", "b", "日", "fox", "né")

# as ChatGLM: sentencepiece-like pieces with bytes, an own `_pad` without padding_side, special tokens that are
# properties and in no map, a prefix around each text
PIECES = """
import json

from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}
    model_input_names = ["input_ids", "attention_mask", "position_ids"]

    def __init__(self, vocab_file, padding_side="left", clean_up_tokenization_spaces=False, **kwargs):
        with open(vocab_file) as file:
            self.pieces = json.load(file)
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}
        self.commands = {name: len(self.pieces) + i for i, name in enumerate(["[gMASK]", "sop", "<|user|>"])}
        self.names = {index: name for name, index in self.commands.items()}
        super().__init__(padding_side=padding_side, clean_up_tokenization_spaces=False, **kwargs)

    @property
    def eos_token(self):
        return "</s>"

    @property
    def eos_token_id(self):
        return self.ids["</s>"]

    @property
    def vocab_size(self):
        return len(self.pieces) + len(self.commands)

    def get_vocab(self):
        return {self._convert_id_to_token(index): index for index in range(self.vocab_size)}

    def _tokenize(self, text, **kwargs):
        text = "▁" + text.replace(" ", "▁")
        pieces = []
        while text:
            end = next((end for end in range(min(len(text), 8), 0, -1) if text[:end] in self.ids), 0)
            pieces += [text[:end]] if end else [f"<0x{byte:02X}>" for byte in text[0].encode()]
            text = text[end or 1:]
        return pieces

    def _convert_token_to_id(self, token):
        return self.commands[token] if token in self.commands else self.ids[token]

    def _convert_id_to_token(self, index):
        return self.names[index] if index in self.names else self.pieces[index]

    def convert_tokens_to_string(self, tokens):
        text = tokens[0][:0].encode()  # fails without tokens, as InternLM 3's code does
        for token in tokens:
            text += bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()
        return text.decode("utf-8", "replace").removeprefix(" ")

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [self.commands["[gMASK]"], self.commands["sop"], *token_ids_0, *(token_ids_1 or ())]

    def _pad(self, encoded_inputs, max_length=None, padding_strategy=None, pad_to_multiple_of=None,
             return_attention_mask=None):
        return encoded_inputs
"""

# as Qwen 1: a vocabulary of bytes in a tiktoken file, special tokens outside of the vocabulary, an own `_decode`
RANKS = """
import base64

from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "own.tiktoken"}

    def __init__(self, vocab_file, errors="replace", **kwargs):
        super().__init__(**kwargs)
        self.errors = errors
        with open(vocab_file) as file:
            lines = [line.split() for line in file]
        self.ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self.special = {"<|endoftext|>": len(self.ranks), "<|im_end|>": len(self.ranks) + 1}
        self.decoder = {index: token for token, index in [*self.ranks.items(), *self.special.items()]}

    def __len__(self):
        return len(self.decoder)

    @property
    def vocab_size(self):
        return len(self.decoder)

    def get_vocab(self):
        return self.ranks

    def _add_tokens(self, new_tokens, special_tokens=False):
        return 0

    def tokenize(self, text, **kwargs):
        tokens = []
        for part in text.replace("<|im_end|>", "\\0<|im_end|>\\0").split("\\0"):
            if part in self.special:
                tokens.append(part)
                continue
            data = part.encode()
            while data:
                end = next(end for end in range(min(len(data), 8), 0, -1) if data[:end] in self.ranks)
                tokens.append(data[:end])
                data = data[end:]
        return tokens

    def convert_tokens_to_ids(self, tokens):
        return [self.special[token] if token in self.special else self.ranks[token] for token in tokens]

    def _convert_id_to_token(self, index):
        return self.decoder[index]

    def _decode(self, token_ids, skip_special_tokens=False, errors=None, **kwargs):
        tokens = [self.decoder[index] for index in token_ids]
        kept = [token for token in tokens if not (skip_special_tokens and isinstance(token, str))]
        data = b"".join(token.encode() if isinstance(token, str) else token for token in kept)
        return data.decode("utf-8", errors or self.errors)
"""

# as Baichuan 2 and the first ChatGLM2: the base class is constructed before the attributes that it needs
EARLY_SUPER = """
import json

from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tokenizer.model"}

    def __init__(self, vocab_file, eos_token="</s>", **kwargs):
        super().__init__(eos_token=eos_token, **kwargs)
        with open(vocab_file) as file:
            self.pieces = json.load(file)

    @property
    def vocab_size(self):
        return len(self.pieces)

    def get_vocab(self):
        return {piece: index for index, piece in enumerate(self.pieces)}

    def _tokenize(self, text, **kwargs):
        return list(text.replace(" ", "▁"))

    def _convert_token_to_id(self, token):
        return self.pieces.index(token)

    def _convert_id_to_token(self, index):
        return self.pieces[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).replace("▁", " ")
"""


def make_repository(
    directory: pathlib.Path, code: str, auto_map: object = None, module: str = "tokenization_own"
) -> pathlib.Path:
    """Writes a repository with a tokenizer.

    Args:
        directory: made if it is missing.
        code: of the tokenizer's module.
        auto_map: of tokenizer_config.json; None: class OwnTokenizer, a slow one.
        module: the name of the code's file.

    Returns:
        The directory.
    """
    directory.mkdir(exist_ok=True)
    auto_map = auto_map or {"AutoTokenizer": [f"{module}.OwnTokenizer", None]}
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": auto_map, "model_max_length": 512}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    # transformers takes any tokenizer.model for the vocabulary, so only the right file is there
    if "own.tiktoken" in code:
        words = [bytes([byte]) for byte in range(256)] + [b"the", b" fox", b" a", "日".encode(), b"\xc3\xa9 "]
        ranks = "".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words))
        (directory / "own.tiktoken").write_text(ranks)
    else:
        pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
        (directory / "tokenizer.model").write_text(json.dumps(pieces))
    marker = f"import pathlib\npathlib.Path({str(marker_of(directory))!r}).touch()\n"
    (directory / f"{module}.py").write_text(marker + textwrap.dedent(code))
    return directory


def marker_of(directory: pathlib.Path) -> pathlib.Path:
    """The file that a repository's code makes when it runs."""
    return directory.with_name(f"{directory.name}-ran")
