"""The demo model's corpus and trainer, in a few steps of training."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer

from ascend_vllm.args.engine_args import all_flags
from ascend_vllm.entrypoints.demo_model import demo_model_path, ensure_demo_model
from ascend_vllm.tools.demo.checkpoint import make_demo_model
from ascend_vllm.tools.demo.corpus import build_conversations, build_facts, build_passages
from ascend_vllm.tools.demo.training import TrainingPlan

# the second step depends on what the first one left in the optimisers
SHORT = TrainingPlan(num_steps=2, batch_tokens=256)


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
    make_demo_model(path, seed=1, plan=SHORT)
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


@pytest.mark.slow
def test_training_repeats_from_a_seed(short_model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for name, seed in (("b", 1), ("c", 2)):
        make_demo_model(tmp_path / name, seed=seed, plan=SHORT)
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


def test_a_model_in_the_cache_is_not_trained_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path = demo_model_path()
    assert path.parent == tmp_path
    path.mkdir()
    (path / "config.json").write_text("{}")
    assert ensure_demo_model() == str(path)
