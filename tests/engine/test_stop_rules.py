"""The rules of stopping, through `LLM` with a real tiny model: ends of sequences, emitted tokens, and text."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.outputs import CompletionOutput
from ascend_vllm.sampling_params import RequestOutputKind
from tests.tiny_models import tiny_model

EOS, OTHER_EOS = 2, 1
MAX_MODEL_LEN = 48
PROMPT = [40, 90, 200, 17, 6]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint whose generation_config.json has two end-of-sequence ids."""
    path = tmp_path_factory.mktemp("two_ends") / "model"
    shutil.copytree(tiny_model("qwen2"), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, OTHER_EOS]}))
    return path


@pytest.fixture(scope="module", params=[1, 4], ids=["step by step", "four steps at once"])
def llm(directory: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM(
        str(directory), dtype="float32", max_model_len=MAX_MODEL_LEN, num_gpu_blocks_override=64, block_size=16,
        num_scheduler_steps=request.param,
    )  # fmt: skip
    yield llm
    assert llm.llm_engine.call_utility("audit")["num_free_blocks"] == 64
    llm.shutdown()


def ask(llm: LLM, **fields: Any) -> CompletionOutput:
    """A greedy answer."""
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | fields))
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return output.outputs[0]


def ids_of(llm: LLM, letters: str) -> list[int]:
    return [llm.get_tokenizer().convert_tokens_to_ids(letter) for letter in letters]


def spell(llm: LLM, letters: str, end: int | None = None) -> dict[str, Any]:
    """Parameters that make the model write some letters, then an id for ever (or the last letter)."""
    ids = [*ids_of(llm, letters), *([] if end is None else [end])]

    def script(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[ids[min(len(output_ids), len(ids) - 1)]] = 1000.0
        return logits

    return {"logits_processors": [script]}


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("end", "reason"), [(EOS, None), (OTHER_EOS, OTHER_EOS), (70, 70)])
def test_tokens_that_end(llm: LLM, end: int, reason: int | None, include: bool) -> None:
    """Ends of the model, the first without a reason, and of the user; they are tokens, and text only on request."""
    fields = spell(llm, "abc", end) | {"stop_token_ids": [70], "skip_special_tokens": False}
    found = ask(llm, **fields, include_stop_str_in_output=include)
    assert found.token_ids == [*ids_of(llm, "abc"), end]
    assert (found.finish_reason, found.stop_reason) == ("stop", reason)
    text = llm.get_tokenizer().decode([end])
    assert text
    assert found.text == "abc" + (text if include else "")
    # the same at the very last token there may be, and with fewer it is another end
    at_the_limit = ask(llm, **fields, max_tokens=4)
    assert (at_the_limit.finish_reason, at_the_limit.stop_reason) == ("stop", reason)
    before = ask(llm, **fields, max_tokens=3)
    assert (before.finish_reason, before.stop_reason, before.text) == ("length", None, "abc")


@pytest.mark.parametrize("include", [False, True])
def test_strings_that_end(llm: LLM, include: bool) -> None:
    fields = spell(llm, "abcdef", EOS) | {"include_stop_str_in_output": include}
    found = ask(llm, **fields, stop=["zz", "bcd", "cd"])
    # both end with the same letter: the first of the list is the reason
    assert (found.finish_reason, found.stop_reason) == ("stop", "bcd")
    assert found.text == ("abcd" if include else "a")
    assert found.token_ids == ids_of(llm, "abcd")
    found = ask(llm, **fields, stop=["cd", "bcd"])
    assert (found.text, found.stop_reason) == ("abcd" if include else "ab", "cd")
    # whichever is complete first ends it, wherever it is in the list
    assert ask(llm, **fields, stop=["def", "bc"]).stop_reason == "bc"
    at_the_limit = ask(llm, **fields, stop="cd", max_tokens=4)
    assert (at_the_limit.finish_reason, at_the_limit.stop_reason) == ("stop", "cd")
    before = ask(llm, **fields, stop="cd", max_tokens=3)
    assert (before.finish_reason, before.stop_reason, before.text) == ("length", None, "abc")


def test_a_token_comes_before_a_string(llm: LLM) -> None:
    """One token is both an end of its own and the end of a stop string, and a limit besides."""
    (end,) = ids_of(llm, "c")
    fields = spell(llm, "abcd") | {"max_tokens": 3, "stop": ["bc"]}
    found = ask(llm, **fields, stop_token_ids=[end])
    assert (found.finish_reason, found.stop_reason, found.text) == ("stop", end, "ab")
    assert ask(llm, **fields).stop_reason == "bc"
    # the end of the model comes before the user's
    found = ask(llm, **spell(llm, "ab", EOS), stop_token_ids=[EOS])
    assert (found.finish_reason, found.stop_reason) == ("stop", None)


def test_the_end_of_the_model_may_be_ignored(llm: LLM) -> None:
    """Both of its ids; the user's ids and strings are not."""
    for end in (EOS, OTHER_EOS):
        found = ask(llm, **(spell(llm, "ab", end) | {"ignore_eos": True}), max_tokens=6)
        assert found.token_ids == [*ids_of(llm, "ab"), *[end] * 4]
        assert (found.finish_reason, found.stop_reason, found.text) == ("length", None, "ab")
        found = ask(llm, **(spell(llm, "ab", end) | {"ignore_eos": True}), stop_token_ids=[end])
        assert (len(found.token_ids), found.finish_reason, found.stop_reason) == (3, "stop", end)
        found = ask(llm, **(spell(llm, "ab", end) | {"ignore_eos": True}), stop="ab")
        assert (found.token_ids, found.finish_reason, found.stop_reason) == (ids_of(llm, "ab"), "stop", "ab")


def test_min_tokens_hold_back_every_end(llm: LLM) -> None:
    for end in (EOS, OTHER_EOS, 70):
        found = ask(llm, **spell(llm, "ab", end), min_tokens=7, stop_token_ids=[70])
        assert found.token_ids[:2] == ids_of(llm, "ab")
        assert end not in found.token_ids[:7]
        assert found.finish_reason == "stop"
        assert len(found.token_ids) == 8
    fields = spell(llm, "abcdef", EOS)
    # complete before it counts: it is text, and does not end the sequence later either
    found = ask(llm, **fields, min_tokens=4, stop=["bc", "ef"])
    assert (found.text, found.stop_reason) == ("abcd", "ef")
    assert ask(llm, **fields, min_tokens=4, stop=["cd"]).text == "ab"


def test_the_length_of_the_model_ends(llm: LLM) -> None:
    """Without max_tokens there are as many tokens as the model has room for."""
    found = ask(llm, ignore_eos=True, max_tokens=None, logit_bias={70: 100.0})
    assert (found.finish_reason, found.stop_reason) == ("length", None)
    assert len(found.token_ids) == MAX_MODEL_LEN - len(PROMPT)


def test_no_text_without_detokenising(llm: LLM) -> None:
    found = ask(llm, **spell(llm, "abc", EOS), detokenize=False)
    assert (found.text, found.token_ids, found.finish_reason) == ("", [*ids_of(llm, "abc"), EOS], "stop")
    with pytest.raises(ValueError, match="stop strings are only supported when detokenize is True"):
        SamplingParams(stop="a", detokenize=False)


def test_special_tokens_are_hidden_in_text_only(llm: LLM) -> None:
    fields = spell(llm, "ab", OTHER_EOS) | {"ignore_eos": True, "max_tokens": 4}
    hidden, shown = ask(llm, **fields), ask(llm, **fields, skip_special_tokens=False)
    assert (hidden.text, shown.text) == ("ab", "ab" + "<|im_start|>" * 2)
    assert hidden.token_ids == shown.token_ids


def test_streams_hold_back_what_may_stop(llm: LLM) -> None:
    """One character less than the longest stop string; none if stop strings are shown."""

    def texts(**fields: Any) -> list[tuple[str, int]]:
        params = SamplingParams(
            **(spell(llm, "abcdef", EOS) | {"temperature": 0.0, "max_tokens": 12} | fields),
            output_kind=RequestOutputKind.DELTA,
        )
        llm.llm_engine.add_request("r", {"prompt_token_ids": PROMPT}, params)
        found: list[tuple[str, int]] = []
        while llm.llm_engine.has_unfinished_requests():
            deltas = [output.outputs[0] for output in llm.llm_engine.step()]
            found += [(delta.text, len(delta.token_ids)) for delta in deltas]
        return found

    for stops, held_back in ((["zzz"], 2), (["zz", "yyyy"], 3), (["x"], 0), ([], 0)):
        found = texts(stop=stops)
        num_tokens = told = 0
        for text, new in found[:-1]:
            num_tokens += new
            told += len(text)
            assert told == max(0, num_tokens - held_back)
        assert "".join(text for text, _ in found) == "abcdef"
    shown = texts(stop=["zzz"], include_stop_str_in_output=True)
    assert [len(text) for text, _ in shown[:-1]] == [new for _, new in shown[:-1]]


def test_incomplete_characters_are_never_told(llm: LLM) -> None:
    """Neither in the middle nor before the end; they may become a stop string."""
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("é日", add_special_tokens=False)
    assert len(ids) == 5

    def script(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[ids[len(output_ids) % 5]] = 1000.0
        return logits

    fields: dict[str, Any] = {"logits_processors": [script], "ignore_eos": True}
    for num_tokens, text in enumerate(("\N{REPLACEMENT CHARACTER}", "é", "é\N{REPLACEMENT CHARACTER}"), 1):
        assert ask(llm, **fields, max_tokens=num_tokens).text == text
    found = ask(llm, **fields, stop=["日", "\N{REPLACEMENT CHARACTER}"])
    assert (found.text, found.stop_reason, len(found.token_ids)) == ("é", "日", 5)


def test_nothing_left_to_sample_is_an_error(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """The request ends with an error; the engine goes on."""
    (a,) = ids_of(llm, "a")
    for fields in (
        {"allowed_token_ids": [a], "bad_words": ["a"]},
        {"allowed_token_ids": [EOS], "min_tokens": 2},
    ):
        found = ask(llm, **fields)
        assert (found.finish_reason, found.token_ids, found.text) == ("error", [], "")
        assert "No token is left to sample" in caplog.text
        caplog.clear()
    assert ask(llm, allowed_token_ids=[a], max_tokens=2).text == "aa"
