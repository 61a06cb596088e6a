"""The comparison of servers with drafts and without, end to end on a tiny model, and its workloads."""

from __future__ import annotations

import json
import math
import pathlib
import random
from typing import Any

import pytest
import transformers

from ascend_vllm.engine.tokenization import Tokenizer
from tests.benchmark_modules import load_benchmark
from tests.server import ROOT
from tests.tiny_models import tiny_model


@pytest.fixture
def program() -> Any:
    return load_benchmark("compare_speculation")


@pytest.mark.slow
def test_a_row_is_measured_with_drafts_and_without(
    program: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers have the same number of tokens; the server with drafts says how many were right."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--model", tiny_model("qwen2"), "--rows", "ngram-t0-c1", "--starts", "2", "--rounds", "1"]
    words += ["--num-prompts", "1", "--input-len", "32", "--output-len", "24", "--max-model-len", "128"]
    words += ["--dtype", "float32", "--kv-cache-bytes", str(2**24), "--json", str(tmp_path / "r.json")]
    # a model so small computes tokens as fast as it checks them
    words += ["--ours-settings", '{"disable_by_batch_size": 100}']
    monkeypatch.setattr("sys.argv", ["compare_speculation.py", *words])
    program.main()
    content = json.loads((tmp_path / "r.json").read_text())
    assert (content["kind"], content["peer"]) == ("speculation", "without")
    (row,) = content["rows"]
    assert row["name"] == "ngram-t0-c1" and row["target"] == {"ratio_at_least": 1.8}
    assert row["ratio"] == row["ours"] / row["peer"]
    first, second = (mine / theirs for mine, theirs in zip(*row["readings"].values(), strict=True))
    assert row["ratio_of_pairs"][0] == pytest.approx(math.sqrt(first * second)), "one of each start"
    ours, peer = (row["figures"][side][0] for side in ("ours", "peer"))
    assert ours["mean_output_len"] == peer["mean_output_len"] == 24
    assert peer["num_drafts"] == 0 and peer["acceptance_length"] == 1
    assert 0 < ours["num_drafts"] < 24 and 1 <= ours["acceptance_length"] <= 5


def test_conversations_of_the_trained_models(program: Any) -> None:
    """The same question twice, with its answer between, or one alone; the same seed asks the same."""
    # with a template, and tokens for any text
    hf = transformers.AutoTokenizer.from_pretrained(tiny_model("qwen2"))
    tokenizer = Tokenizer(hf)
    subject = program.Subject("", tokenizer, 3, 128, 50, random.Random(1))
    again = program.Subject("", tokenizer, 3, 128, 50, random.Random(1))
    repeated, questions = program.repeated(subject), program.questions(subject)
    assert repeated == program.repeated(again)
    facts = {question: fact.answer for fact in program.build_facts() for question in fact.questions}
    for request, num_turns in ((repeated[0], 4), (questions[0], 2)):
        turns = [turn.partition("\n")[2] for turn in request.prompt.split("<|im_start|>")[1:]]
        *turns, last, to_come = [turn.removesuffix("<|im_end|>\n") for turn in turns]
        assert len(turns) + 2 == num_turns and to_come == ""
        if turns:
            first, answer = turns
            assert facts[first] == facts[last] == answer
        assert last in facts
        assert request.output_len == 50 and request.prompt_len > 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name at least one model"),
        (["--target", "t", "--head", "h", "--rows", "draft-t0-c1"], "name the models of draft-t0-c1"),
        (["--target", "t", "--head", "h", "--peer", "vllm", "--rows", "eagle-t0-c1"], "in the rows ngram only"),
        (["--model", "m", "--rounds", "0"], "--rounds must be at least 1"),
        (["--model", "m", "--concurrencies", "3"], "invalid choice: 3"),
        (["--model", "m", "--input-len", "16"], "--input-len must be above 16"),
    ],
)
def test_wrong_options(
    program: Any, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_speculation.py", *words])
    with pytest.raises(SystemExit):
        program._parse_args()
    assert message in capsys.readouterr().err


def test_rows_of_the_models_that_are_given(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["compare_speculation.py", "--target", "t", "--head", "h"])
    names = [row.name for row in program._parse_args().rows]
    assert names == [
        *("copy-t0-c1", "copy-t0-c32", "eagle-t0-c1", "eagle-t0-c32", "eagle-t0.7-c1", "eagle-t0.7-c32"),
    ]
    monkeypatch.setattr("sys.argv", ["compare_speculation.py", "--model", "m", "--concurrencies", "4", "1"])
    rows = program._parse_args().rows
    assert [(row.name, row.target_ratio) for row in rows] == [("ngram-t0-c1", 1.8), ("ngram-t0-c4", 0.95)]
