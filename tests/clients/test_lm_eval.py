"""lm-eval's local-completions gets the same results from the server as from transformers."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from tests.server import Server

QUESTIONS = [
    ("one two three", [" four", " apple", " of the"], 0),
    ("the server answers", [" requests", " with a", " never again"], 1),
    ("a block of the cache", [" is", " holds tokens"], 0),
    ("hello", [" there", " world", " you two"], 2),
    ("tokens per", [" second", " step"], 1),
    ("what does the flag", [" do", " mean here"], 0),
    ("x = 1; y =", [" 2", " x + 1", " None"], 1),
    ("Ünïcödé and", [" émojis 🙂", " nothing"], 0),
]
TASK = """\
task: offline_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1.0
"""


def write_task(directory: pathlib.Path) -> None:
    """A task with its questions, as lm-eval reads it."""
    lines = [json.dumps({"question": text, "choices": choices, "label": label}) for text, choices, label in QUESTIONS]
    (directory / "questions.jsonl").write_text("\n".join(lines))
    (directory / "offline_choice.yaml").write_text(TASK.format(data=directory / "questions.jsonl"))


def continuation_logprobs(model_dir: str) -> list[list[float]]:
    """Log-probability of every choice after its question, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    found = []
    for question, choices, _ in QUESTIONS:
        context = tokenizer.encode(question)
        found.append([])
        for choice in choices:
            ids = tokenizer.encode(question + choice)
            with torch.no_grad():
                logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
            picked = logprobs[range(len(ids) - 1), ids[1:]]
            found[-1].append(float(picked[len(context) - 1 :].sum()))
    return found


# its imports alone take a quarter of a minute; tests/compat has the answers that it asks for
@pytest.mark.exhaustive
@pytest.mark.slow
def test_local_completions(
    client_command: Callable[..., str], clients_server: Server, clients_model_dir: str, tmp_path: pathlib.Path
) -> None:
    write_task(tmp_path)
    model_args = {
        "model": "demo",
        "base_url": f"{clients_server.url}/v1/completions",
        "tokenizer": clients_model_dir,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_length": 512,
    }
    client_command(
        "python",
        *["-m", "lm_eval", "--model", "local-completions", "--tasks", "offline_choice", "--batch_size", "2"],
        *["--model_args", ",".join(f"{name}={value}" for name, value in model_args.items())],
        *["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"],
    )
    (samples_file,) = (tmp_path / "out").rglob("samples_*.jsonl")
    (results_file,) = (tmp_path / "out").rglob("results_*.json")
    samples: list[dict[str, Any]] = [json.loads(line) for line in samples_file.read_text().splitlines()]
    samples.sort(key=lambda sample: sample["doc_id"])
    expected = continuation_logprobs(clients_model_dir)
    for sample, logprobs in zip(samples, expected, strict=True):
        measured = [float(answer[0]) for answer in sample["filtered_resps"]]
        assert measured == pytest.approx(logprobs, abs=1e-3)
    hits = [
        max(range(len(row)), key=row.__getitem__) == label
        for row, (_, _, label) in zip(expected, QUESTIONS, strict=True)
    ]
    accuracy = json.loads(results_file.read_text())["results"]["offline_choice"]["acc,none"]
    assert accuracy == pytest.approx(sum(hits) / len(hits))
    # a measure that any model passes, or none, would show nothing
    assert 0 < accuracy < 1
