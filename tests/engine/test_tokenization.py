"""Tokenizers: loading, encoding, and text from ids one step at a time."""

from __future__ import annotations

import copy
import functools
import pathlib
import subprocess
import sys

import pytest
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from ascend_vllm.engine.detokenization import ByteDetokenizer, WindowDetokenizer
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import ModelLoadError

KINDS = ["byte_level", "sentencepiece", "word_level"]
PROPERTY = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)


def increments(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool, prompt: list[int]) -> list[str]:
    """What a detokeniser returns for ids that arrive in groups of these sizes (cycled)."""
    detokenizer = tokenizer.make_detokenizer(prompt, skip_special_tokens=skip)
    texts, position, step = [], 0, 0
    while position < len(ids):
        size = sizes[step % len(sizes)]
        texts.append(detokenizer.push(ids[position : position + size]))
        position, step = position + size, step + 1
    return [*texts, detokenizer.finish()]


@PROPERTY
@given(data=st.data(), skip=st.booleans(), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_increments_of_random_ids_join_to_the_whole_text(
    byte_level: Tokenizer, data: st.DataObject, skip: bool, sizes: list[int]
) -> None:
    # Ids beyond the vocabulary too: a model's embedding may have more rows than its tokenizer has tokens.
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=60))
    expected = byte_level.hf.decode([i for i in ids if i < byte_level.vocab_size], skip_special_tokens=skip)
    assert "".join(increments(byte_level, ids, sizes, skip, [])) == expected


@PROPERTY
@given(
    pieces=st.lists(st.one_of(st.text(max_size=12), st.just("日本😀 né"), st.integers(0, 2)), max_size=8),
    skip=st.booleans(),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_increments_of_texts_and_special_tokens_join_to_the_whole_text(
    tokenizer: Tokenizer, pieces: list[str | int], skip: bool, sizes: list[int]
) -> None:
    specials = sorted(tokenizer.all_special_ids)
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(specials[piece % len(specials)])
        else:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    expected = tokenizer.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    texts = increments(tokenizer, ids, sizes, skip, [])
    assert "".join(texts) == expected
    if "\N{REPLACEMENT CHARACTER}" not in expected:
        assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts)


@PROPERTY
@given(prompt=st.text(min_size=1, max_size=20), output=st.text(max_size=20), skip=st.booleans())
@example(prompt="a\N{REPLACEMENT CHARACTER}", output=" b", skip=True)
@example(prompt="\N{REPLACEMENT CHARACTER}", output="\N{REPLACEMENT CHARACTER}a", skip=False)
def test_output_continues_the_prompt(tokenizer: Tokenizer, prompt: str, output: str, skip: bool) -> None:
    prompt_ids = tokenizer.encode("the quick " + prompt, add_special_tokens=True)
    ids = tokenizer.encode(output, add_special_tokens=False)
    whole = tokenizer.decode(prompt_ids + ids, skip)
    assert tokenizer.decode(prompt_ids, skip) + "".join(increments(tokenizer, ids, [1], skip, prompt_ids)) == whole


def test_a_character_cut_by_the_end_of_the_prompt_is_part_of_the_output(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a\N{MATHEMATICAL SCRIPT CAPITAL C}", add_special_tokens=False)
    assert len(ids) == 5  # a letter, and four bytes nobody merged
    assert increments(byte_level, ids[3:], [1], True, ids[:3]) == ["", "\N{MATHEMATICAL SCRIPT CAPITAL C}", ""]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_incomplete_characters_wait_and_end_as_replacement_characters(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("😀𝒞", add_special_tokens=False)
    texts = increments(tokenizer, ids[:-1], [1], True, tokenizer.encode("hello"))
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in texts[:-1])
    assert "".join(texts[:-1]).strip() == "😀"
    assert texts[-1].strip("\N{REPLACEMENT CHARACTER}") == ""
    assert texts[-1]


def test_the_byte_detokeniser_serves_byte_level_vocabularies_only(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    assert isinstance(byte_level.make_detokenizer(), ByteDetokenizer)
    assert isinstance(sentencepiece.make_detokenizer(), WindowDetokenizer)


def test_text_of_single_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the lazy dog.", add_special_tokens=False)
    joined = "".join(tokenizer.token_text(i) for i in ids)
    assert joined.lstrip(" ") == tokenizer.decode(ids)
    assert tokenizer.token_text(tokenizer.eos_token_id).strip() == tokenizer.hf.eos_token


def test_ids_without_a_token_have_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.decode([2**31, *ids, 2**32, 10**30]) == tokenizer.decode(ids)


def test_encoding_equals_transformers(tokenizer: Tokenizer) -> None:
    text = f"The fox {tokenizer.hf.eos_token} jumps 日本\n  x"
    for special in (True, False):
        assert tokenizer.encode(text, special) == tokenizer.hf(text, add_special_tokens=special).input_ids


@settings(PROPERTY, max_examples=60)
@given(
    text=st.text(st.sampled_from("ab \N{GREEK SMALL LETTER ALPHA}\N{PARTY POPPER}"), max_size=20),
    most=st.integers(1, 9),
)
def test_a_shortened_text_is_a_beginning(byte_level: Tokenizer, text: str, most: int) -> None:
    def count(text: str) -> int:
        return len(byte_level.encode(text, add_special_tokens=False))

    short = byte_level.shorten(text, most)
    assert text.startswith(short)
    assert count(short) <= most
    if count(text) <= most:
        assert short == text


def test_a_shortened_text_has_the_first_tokens(byte_level: Tokenizer) -> None:
    text = "hello world, hello! \N{PARTY POPPER}"
    ids = byte_level.encode(text, add_special_tokens=False)
    whole = [count for count in range(1, len(ids)) if text.startswith(byte_level.decode(ids[:count]))]
    assert len(whole) >= 5
    assert len(whole) < len(ids) - 1  # some end within a character
    for count in whole:
        assert byte_level.shorten(text, count) == byte_level.decode(ids[:count])


def test_encoding_is_never_truncated(byte_level_directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hf = transformers.PreTrainedTokenizerFast.from_pretrained(byte_level_directory)
    hf.backend_tokenizer.enable_truncation(4)
    hf.save_pretrained(tmp_path)
    assert len(Tokenizer.from_directory(str(tmp_path)).encode("one two three four five six")) > 4


def test_direct_loading_equals_auto_tokenizer(tokenizer: Tokenizer) -> None:
    auto = transformers.AutoTokenizer.from_pretrained(tokenizer.hf.name_or_path)
    text = "The quick façade 日本 👩‍👩‍👧  <|im_end|> </s> x"
    ids = tokenizer.encode(text)
    assert ids == auto(text).input_ids
    assert tokenizer.decode(ids) == auto.decode(ids, clean_up_tokenization_spaces=False)
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (auto.eos_token_id, auto.bos_token_id)
    assert tokenizer.chat_template == auto.chat_template


@pytest.mark.parametrize("slow", [False, True])
def test_python_tokenizers(tmp_path: pathlib.Path, slow: bool) -> None:
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_directory(str(tmp_path), slow=slow)
    assert not tokenizer.is_fast
    ids = tokenizer.encode("né 日", add_special_tokens=False)
    assert "".join(increments(tokenizer, ids, [1], True, [])) == "né 日"
    assert tokenizer.decode([*ids, 10**6]) == "né 日"


async def test_async_calls(byte_level: Tokenizer) -> None:
    ids = await byte_level.encode_async("hello world")
    assert ids == byte_level.encode("hello world")
    assert await byte_level.decode_async(ids) == "hello world"


@pytest.mark.parametrize("token", ["<0x80>", "<0xE6>", "▁", "</s>", "▁a"])
def test_tokens_that_come_for_ever_are_not_decoded_again_and_again(sentencepiece: Tokenizer, token: str) -> None:
    """The time must not grow with the pending tokens: 4000 spaces took 12 s in the thread of all streams."""
    vocabulary = sentencepiece.hf.get_vocab()
    ids = [vocabulary[token]] * 3000 if token in vocabulary else sentencepiece.encode("a" * 3000)
    decoded: list[int] = []

    def decode(some: list[int]) -> str:
        decoded.append(len(some))
        return sentencepiece.decode(some, skip_special_tokens=True)

    detokenizer = WindowDetokenizer(decode, [vocabulary["a"]])
    text = "".join([*(detokenizer.push([id_]) for id_ in ids), detokenizer.finish()])
    assert text == sentencepiece.decode([vocabulary["a"], *ids], skip_special_tokens=True)[1:]
    assert max(decoded) < 64
    assert sum(decoded) < 64 * 3 * len(ids)


def test_bytes_that_are_no_characters_do_not_spoil_what_follows(sentencepiece: Tokenizer) -> None:
    vocabulary = sentencepiece.hf.get_vocab()
    ids = [vocabulary["<0x80>"]] * 100 + sentencepiece.encode("日 the fox", add_special_tokens=False)[1:]
    text = "".join(increments(sentencepiece, ids, [1], True, [vocabulary["a"]]))
    assert text.startswith("\N{REPLACEMENT CHARACTER}" * 90)
    assert text.endswith(" the fox")


def test_loading_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a directory"):
        Tokenizer.from_directory(str(tmp_path / "absent"))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    with pytest.raises(ModelLoadError, match="cannot load the tokenizer in"):
        Tokenizer.from_directory(str(tmp_path))


def test_code_of_a_directory_runs_only_when_trusted(
    byte_level_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "code.py").write_text(
        "import transformers\nclass Own(transformers.PreTrainedTokenizerFast):\n    own = True\n"
    )
    source = byte_level_directory / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|im_end|>", "tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [null, "code.Own"]}}'
    )
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        Tokenizer.from_directory(str(tmp_path))
    assert Tokenizer.from_directory(str(tmp_path), trust_remote_code=True).hf.own


def test_loading_and_using_a_tokenizer_does_not_import_torch(byte_level_directory: pathlib.Path) -> None:
    program = (
        "import sys\n"
        "from ascend_vllm.engine.tokenization import Tokenizer\n"
        f"t = Tokenizer.from_directory({str(byte_level_directory)!r})\n"
        "t.decode(t.encode('hello')), t.make_detokenizer(), t.convert_ids_to_tokens([1])\n"
        "t.apply_chat_template([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@functools.cache
def pair_tokenizer(directory: pathlib.Path, side: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer with an end behind each of two texts, and a beginning before them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, truncation_side=side)
    start, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", start), ("<|im_end|>", end)],
    )
    return tokenizer


@functools.cache
def own_pair_tokenizer(directory: pathlib.Path) -> Tokenizer:
    """Ours of the same kind."""
    return Tokenizer(copy.deepcopy(pair_tokenizer(directory, "right")))


@settings(PROPERTY, max_examples=40)
@given(
    first=st.text("ab cd", min_size=1, max_size=30),
    second=st.text("ab cd", min_size=1, max_size=30),
    limit=st.integers(3, 40),
    side=st.sampled_from(["right", "left"]),
)
def test_pairs_are_cut_as_by_transformers(
    byte_level_directory: pathlib.Path, first: str, second: str, limit: int, side: str
) -> None:
    # two objects: the reference keeps the truncation that it was asked for last
    reference, tokenizer = pair_tokenizer(byte_level_directory, side), own_pair_tokenizer(byte_level_directory)
    cut = reference(first, text_pair=second, truncation="longest_first", max_length=limit).input_ids
    assert tokenizer.encode_pair(first, second, limit, side) == cut
    whole = reference(first, text_pair=second).input_ids
    assert tokenizer.encode_pair(first, second) == whole
