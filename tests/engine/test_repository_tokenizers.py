"""Tokenizers that are Python code of the model's repository."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.core.structured.vocabulary import Vocabulary
from ascend_vllm.engine.tokenization import Tokenizer
from ascend_vllm.errors import ModelLoadError
from tests.engine.repository_tokenizers import EARLY_SUPER, PIECES, RANKS, make_repository, marker_of
from tests.engine.tokenizers_for_tests import CHAT_TEMPLATE
from tests.tiny_models import tiny_model

CODES = {"pieces": PIECES, "ranks": RANKS}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TEXT = "the fox né 日本 👍 a b"


@pytest.fixture(params=CODES)
def tokenizer(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Tokenizer:
    directory = make_repository(tmp_path / request.param, CODES[request.param])
    return Tokenizer.from_directory(str(directory), trust_remote_code=True)


@pytest.mark.parametrize("auto_map", [None, ["tokenization_own.OwnTokenizer", None]])
def test_nothing_runs_without_trust(tmp_path: pathlib.Path, auto_map: object) -> None:
    directory = make_repository(tmp_path / "own", PIECES, auto_map)
    with pytest.raises(ModelLoadError, match="using the `--trust-remote-code` flag in the CLI") as caught:
        Tokenizer.from_directory(str(directory))
    assert str(directory / "tokenizer_config.json") in str(caught.value) and "\n" not in str(caught.value)
    assert not marker_of(directory).exists()
    assert not Tokenizer.from_directory(str(directory), trust_remote_code=True).is_fast
    assert marker_of(directory).exists()


def test_the_own_code_makes_the_tokens(tmp_path: pathlib.Path) -> None:
    pieces = Tokenizer.from_directory(str(make_repository(tmp_path / "pieces", PIECES)), trust_remote_code=True)
    size = 3 + 256 + 14
    assert pieces.encode("the fox") == [size, size + 1, *pieces.encode("the fox", add_special_tokens=False)]
    assert pieces.encode("the fox", add_special_tokens=False) == [3 + 256 + 1, 3 + 256 + 2]
    assert pieces.encode_pair("a", "a") == [size, size + 1, 262, 262]
    assert pieces.eos_token_id == 2
    assert pieces.convert_ids_to_tokens([260, 10**6]) == ["▁the", ""]
    assert pieces.decode([]) == ""
    ranks = Tokenizer.from_directory(str(make_repository(tmp_path / "ranks", RANKS)), trust_remote_code=True)
    assert ranks.encode("the fox<|im_end|>") == [256, 257, 262]
    assert ranks.decode([256, 262]) == "the<|im_end|>"
    assert ranks.decode([256, 262, 10**6], skip_special_tokens=True) == "the"
    assert ranks.convert_ids_to_tokens([256, 195, 262, 10**6]) == ["the", REPLACEMENT, "<|im_end|>", ""]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_streamed_text_joins_to_the_whole(tokenizer: Tokenizer, size: int) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    # wherever the prompt ends, also within a character
    for cut in range(len(ids)):
        detokenizer = tokenizer.make_detokenizer(ids[:cut])
        chunks = [detokenizer.push(ids[i : i + size]) for i in range(cut, len(ids), size)]
        given = tokenizer.decode(ids[:cut]).rstrip(REPLACEMENT)
        assert "".join([*chunks, detokenizer.finish()]) == TEXT[len(given) :]
        assert not any(REPLACEMENT in chunk for chunk in chunks)


def test_a_replacement_character_in_the_prompt_is_not_repeated(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{REPLACEMENT}", add_special_tokens=False)
    detokenizer = tokenizer.make_detokenizer(ids)
    assert detokenizer.push(tokenizer.encode("b", add_special_tokens=False)).strip() == "b"


def test_grammars_know_the_tokens(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary.from_tokenizer(tokenizer.hf, 384, [2])
    assert vocabulary.encode is not None
    ids = vocabulary.encode(TEXT)
    assert ids == tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(vocabulary.tokens[id_] for id_ in ids).decode().strip() == TEXT


def test_code_for_an_older_transformers_is_told_how_to_be_mended(tmp_path: pathlib.Path) -> None:
    directory = make_repository(tmp_path / "own", EARLY_SUPER)
    with pytest.raises(ModelLoadError, match="does not work with transformers 5") as caught:
        Tokenizer.from_directory(str(directory), trust_remote_code=True)
    message = str(caught.value)
    assert "In OwnTokenizer.__init__, move super().__init__(...) behind the lines that set attributes" in message
    assert "of tokenization_own.py: " in message and "\n" not in message
    # what it says helps
    file = directory / "tokenization_own.py"
    call = "        super().__init__(eos_token=eos_token, **kwargs)\n"
    first, _, last = file.read_text().partition(call)
    attributes, _, rest = last.partition("\n\n")
    file.write_text(f"{first}{attributes}\n{call}\n{rest}")
    tokenizer = Tokenizer.from_directory(str(directory), trust_remote_code=True)
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


@pytest.mark.parametrize(
    ("code", "auto_map", "message"),
    [
        ("import no_such_package_for_tokens", None, "needs packages that are not installed: no_such_package_for_to"),
        ("from transformers import NoSuchName", None, r"\(line 3 of tokenization_own.py: cannot import name"),
        ("OwnTokenizer = None", None, "Convert the tokenizer to tokenizer.json and give its directory by"),
        (
            PIECES.replace("def build_inputs_with", "def _decode(self):\n        pass\n\n    def build_inputs_with"),
            None,
            "does not work with transformers 5.*_decode.*Convert the tokenizer to tokenizer.json",
        ),
        ("", {"AutoTokenizer": ["tokenization_else.Own", None]}, "tokenization_else"),
        (
            "",
            {"AutoTokenizer": ["owner/name--tokenization_own.Own", None]},
            "is in another repository: .* Copy tokenization_own.py from owner/name into the directory, and write",
        ),
        ("", {"AutoTokenizer": "tokenization_own.OwnTokenizer"}, "'auto_map' must be an object, in it AutoTokenizer"),
        ("", {"AutoTokenizer": ["../x.Y", None]}, "'auto_map' must be an object, in it AutoTokenizer with the names"),
        ("", {"AutoTokenizer": [None, None]}, "'auto_map' must be an object"),
    ],
    ids=["package", "name", "class", "method", "file", "repository", "text", "path", "nothing"],
)
def test_what_cannot_be_used(tmp_path: pathlib.Path, code: str, auto_map: object, message: str) -> None:
    directory = make_repository(tmp_path / "own", code, auto_map)
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.from_directory(str(directory), trust_remote_code=True)


def test_the_slow_class_stands_in_for_a_fast_one_that_fails(
    tmp_path: pathlib.Path, package_log: pytest.LogCaptureFixture
) -> None:
    names = ["tokenization_own.OwnTokenizer", "tokenization_own.OwnTokenizerFast"]
    code = PIECES + "\nclass OwnTokenizerFast:\n    pass\n"
    directory = make_repository(tmp_path / "own", code, {"AutoTokenizer": names})
    assert Tokenizer.from_directory(str(directory), trust_remote_code=True).encode("a")
    assert "the tokenizer is tokenization_own.OwnTokenizer, since tokenization_own.OwnTokenizerFast fails" in (
        package_log.text
    )


def test_torch_is_imported_by_the_code_only(tmp_path: pathlib.Path) -> None:
    directory = make_repository(tmp_path / "own", PIECES)
    (directory / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "tokenization_own.C"}}')
    program = (
        "import sys\n"
        "from ascend_vllm.engine.tokenization import Tokenizer\n"
        f"Tokenizer.from_directory({str(directory)!r}, trust_remote_code=True).encode('a')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_model_is_served_with_its_own_tokenizer(tmp_path: pathlib.Path) -> None:
    directory = make_repository(tmp_path / "own", PIECES)
    options: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 16, "block_size": 16}
    options["dtype"], model = "float32", tiny_model("qwen2-tied")
    with pytest.raises(ModelLoadError, match="--trust-remote-code"):
        LLM(model, tokenizer=str(directory), **options)
    assert not marker_of(directory).exists()
    llm = LLM(model, tokenizer=str(directory), trust_remote_code=True, **options)
    (output,) = llm.chat(
        [{"role": "user", "content": "the fox"}],
        SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1),
        chat_template=CHAT_TEMPLATE,
    )
    (completion,) = output.outputs
    # the model has more ids than the tokenizer
    own = Tokenizer(llm.get_tokenizer())
    prompt = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    ids = own.encode(prompt, add_special_tokens=False)
    assert output.prompt_token_ids == ids
    assert completion.text == own.decode([*ids, *completion.token_ids], skip_special_tokens=True)[len(prompt) :]
