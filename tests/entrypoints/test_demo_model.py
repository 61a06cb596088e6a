"""The demo model's corpus and trainer, in a few steps of training."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ascend_vllm.args.engine_args import EngineArgs, all_flags
from ascend_vllm.entrypoints.demo_model import (
    demo_head_path,
    demo_model_path,
    ensure_demo_head,
    ensure_demo_model,
    with_demo_model,
)
from ascend_vllm.errors import ConfigError
from ascend_vllm.tools.demo import __main__ as demo_program
from ascend_vllm.tools.demo import training
from ascend_vllm.tools.demo.checkpoint import make_demo_model
from ascend_vllm.tools.demo.corpus import build_conversations, build_facts, build_passages
from ascend_vllm.tools.demo.training import DemoShape, TrainingPlan
from ascend_vllm.tools.training_progress import TrainingProgress

# the second step depends on what the first one left in the optimisers
SHORT = TrainingPlan(num_steps=2, batch_tokens=256, seed=1)


@pytest.fixture(scope="module", autouse=True)
def as_many_threads_as_before() -> Iterator[None]:
    """Training sets the number of threads, which would be in the way of other tests."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model of seed 1."""
    path = tmp_path_factory.mktemp("demo") / "a"
    make_demo_model(path, plan=SHORT)
    return path


def test_every_flag_and_every_documented_variable_is_a_fact() -> None:
    questions = {question for fact in build_facts() for question in fact.questions}
    missing = [flag.name for flag in all_flags() if f"What does {flag.name} do?" not in questions]
    assert missing == []
    assert "What does VLLM_CPU_KVCACHE_SPACE do?" in questions
    assert "hello" in questions


def test_no_question_has_two_answers() -> None:
    answers: dict[str, str] = {}
    for fact in build_facts():
        for question in fact.questions:
            assert answers.setdefault(question, fact.answer) == fact.answer, question
    assert len(answers) > 100


def test_conversations_repeat_from_a_seed() -> None:
    assert build_conversations(3) == build_conversations(3)
    assert build_conversations(3) != build_conversations(4)


def test_every_answer_continues_a_prompt_without_a_template() -> None:
    passages = build_passages(3)
    assert passages == build_passages(3)
    for fact in build_facts():
        below = {passage.prompt for passage in passages if passage.text == f"\n{fact.answer}"}
        assert below and below <= set(fact.questions)
    # the README's
    assert {"hello", ""} <= {passage.prompt for passage in passages}


def test_an_interrupted_training_goes_on(
    short_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps with an interruption between them give the same bytes as two in one go, and leave nothing behind."""
    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "is_due", True)
        batches = [SHORT.num_steps - 1]

        def collate(batch: list[training.Sample], collate: Any = training.collate) -> Any:
            if not batches.pop():
                raise KeyboardInterrupt
            batches.append(0)
            return collate(batch)

        patch.setattr(training, "collate", collate)
        with pytest.raises(KeyboardInterrupt):
            make_demo_model(tmp_path / "model", plan=SHORT)
    assert [path.name for path in tmp_path.iterdir()] == [".model.training.pt"]
    with pytest.raises(ConfigError, match="of a training with another model, other data or options"):
        make_demo_model(tmp_path / "model", plan=dataclasses.replace(SHORT, num_steps=3))
    make_demo_model(tmp_path / "model", plan=SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    expected, found = ((path / "model.safetensors").read_bytes() for path in (short_model, tmp_path / "model"))
    assert expected == found


def test_models_of_other_sizes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line names the sizes; what it leaves out is as in the demo model."""
    words = ["--output", str(tmp_path / "model"), "--hidden-size", "64", "--num-layers", "2", "--num-steps", "1"]
    monkeypatch.setattr("sys.argv", ["demo", *words, "--batch-tokens", "256"])
    demo_program.main()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (64, 2)
    assert config["intermediate_size"] == DemoShape().intermediate_size
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    monkeypatch.setattr("sys.argv", ["demo", "--hidden-size", "64"])
    with pytest.raises(SystemExit):
        demo_program.main()


@pytest.mark.slow
def test_training_repeats_from_a_seed(short_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name, seed in (("b", 1), ("c", 2)):
        make_demo_model(tmp_path / name, plan=dataclasses.replace(SHORT, seed=seed))
    directories = (short_model, tmp_path / "b", tmp_path / "c")
    first, again, other = ((directory / "model.safetensors").read_bytes() for directory in directories)
    assert first == again
    assert first != other


def test_the_directory_is_in_hugging_face_layout(short_model: pathlib.Path) -> None:
    config = json.loads((short_model / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(short_model)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "héllo 你好"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\nhéllo 你好<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert tokenizer.eos_token_id == config["eos_token_id"] == 2


@pytest.fixture
def cached(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache in which the demo model and its head seem to be."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in (demo_model_path(), demo_head_path()):
        path.mkdir()
        (path / "config.json").write_text("{}")
    return tmp_path


def test_a_model_in_the_cache_is_not_trained_again(cached: pathlib.Path) -> None:
    assert ensure_demo_model() == str(demo_model_path())
    assert ensure_demo_head() == str(demo_head_path())
    assert {demo_model_path().parent, demo_head_path().parent} == {cached}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ({"method": "eagle"}, {"method": "eagle", "model": "HEAD", "num_speculative_tokens": 3}),
        (
            {"method": "eagle", "num_speculative_tokens": 2},
            {"method": "eagle", "model": "HEAD", "num_speculative_tokens": 2},
        ),
        ({"method": "eagle", "model": "mine"}, {"method": "eagle", "model": "mine"}),
        ({"method": "ngram"}, {"method": "ngram"}),
    ],
)
@pytest.mark.usefixtures("cached")
def test_the_demo_model_brings_its_head(given: dict[str, Any] | None, found: dict[str, Any] | None) -> None:
    """Unless another one is named."""
    if found is not None and found.get("model") == "HEAD":
        found = found | {"model": str(demo_head_path())}
    args = with_demo_model(EngineArgs(model="demo", speculative_config=given))
    assert (args.model, args.served_model_name) == (str(demo_model_path()), ["demo"])
    assert args.speculative_config == found


def test_other_models_stay_as_they_are(cached: pathlib.Path) -> None:
    """So does a directory of the demo model's name."""
    args = EngineArgs(model="another", speculative_config={"method": "eagle"})
    assert with_demo_model(args) is args
    (cached / "demo").mkdir()
    args = EngineArgs(model="demo")
    assert with_demo_model(args) is args
