"""Training of EAGLE heads."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ascend_vllm.entrypoints.cli import main
from ascend_vllm.errors import ConfigError
from ascend_vllm.tools.train_eagle.data import read_samples
from ascend_vllm.tools.train_eagle.head import HeadShape, TargetWeights, TrainedHead, losses
from ascend_vllm.tools.train_eagle.states import StateReader
from ascend_vllm.tools.train_eagle.training import Trainer, TrainingPlan
from tests.eagle_heads import eagle_reference
from tests.tiny_models import VOCAB_SIZE, tiny_model

PLAN = TrainingPlan(num_steps=30, num_epochs=100, batch_tokens=512, max_length=64, batch_size=8, learning_rate=3e-3)
SENTENCES = [f"The server answers request {number} and the stream keeps moving." for number in range(40)]


def _reader(model: str) -> StateReader:
    return StateReader(
        model, device="cpu", dtype="float32", trust_remote_code=False, max_length=64, batch_tokens=512, batch_size=8
    )


@pytest.fixture(scope="module")
def reader() -> StateReader:
    return _reader(tiny_model("qwen2"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES))
    return path


def _samples(reader: StateReader, data: pathlib.Path) -> list:
    tokenizer = transformers.AutoTokenizer.from_pretrained(reader.config.model.tokenizer)
    return read_samples(str(data), tokenizer, PLAN.max_length)


def test_states_are_those_of_transformers(reader: StateReader) -> None:
    """Behind the last norm, of every token, whatever was computed before; weights too."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("qwen2")).eval()
    texts = [[5, 6, 7, 8, 9], list(range(20, 60)), [3]]
    reader.states(texts[::-1])
    with torch.inference_mode():
        for text, states in zip(texts, reader.states(texts), strict=True):
            expected = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
            torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    weights = reader.weights()
    assert torch.equal(weights.embedding, model.get_input_embeddings().weight)
    torch.testing.assert_close(weights.lm_head, model.get_output_embeddings().weight)


def test_logit_caps_are_applied_to_both_distributions() -> None:
    """Gemma 2 and 3 cap logits: the weights are found behind the cap, and it is applied to them again."""
    reader = _reader(tiny_model("gemma3"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model("gemma3")).eval()
    weights, text = reader.weights(), list(range(30))
    with torch.inference_mode():
        expected = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(weights.logits(reader.states([text])[0]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_passes", [1, 3])
def test_losses_are_the_published_ones(num_passes: int) -> None:
    """Smooth L1 of states and a tenth of the cross entropy, over the pairs that count, by the plain definition.

    In further passes the head reads what it predicted before, except of the first token.
    """
    torch.manual_seed(0)
    head = TrainedHead(HeadShape(64, 128, 4, 2, 16, 10000.0, 1e-5))
    target = TargetWeights(torch.randn(90, 64), torch.randn(90, 64), None)
    token_ids, states = torch.randint(90, (1, 12)), torch.randn(1, 12, 64)
    learned = torch.tensor([[False] * 5 + [True] * 7])
    noise = 0.1 * torch.randn(1, 10, 64)
    found = losses(head, target, token_ids, states, learned, noise, num_passes)
    tensors = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    wanted, inputs, features, tokens = states[0, 4:-1], states[0, :-2] + noise[0], [], []
    for _ in range(num_passes):
        every = eagle_reference(tensors, target.embedding, token_ids[0, 1:-1], inputs)
        predicted = every[3:]
        distance = (predicted - wanted).abs()
        features.append(torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean())
        log_p = (predicted @ target.lm_head.T).log_softmax(-1)
        tokens.append(-((wanted @ target.lm_head.T).softmax(-1) * log_p).sum(-1).mean())
        inputs = torch.cat((states[0, :1], every[:-1]))
    feature, token = torch.stack(features).mean(), torch.stack(tokens).mean()
    torch.testing.assert_close(found.feature, feature)
    torch.testing.assert_close(found.token, token)
    torch.testing.assert_close(found.total.detach(), feature + 0.1 * token)


def test_command_trains_a_head(
    tmp_path: pathlib.Path, data: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes SafeAILab's layout, in the model's dtype, and leaves no progress behind."""
    words = ["train-eagle", "--model", tiny_model("qwen2"), "--data", str(data), "--output", str(tmp_path / "head")]
    words += ["--num-steps", "2", "--batch-tokens", "256", "--max-length", "64", "--ttt-length", "2"]
    assert main(words) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "head")
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (config["architectures"], config["hidden_size"], config["num_hidden_layers"]) == (
        ["LlamaForCausalLM"],
        64,
        1,
    )
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["fc.weight"].shape == (64, 128)
    assert tensors["embed_tokens.weight"].shape == (VOCAB_SIZE, 64)
    assert {name.split(".")[0] for name in tensors} == {"fc", "layers", "embed_tokens"}


def test_a_head_is_trained_further(tmp_path: pathlib.Path, data: pathlib.Path, reader: StateReader) -> None:
    """It begins with what it knew, and a head of another kind or size is refused."""
    samples = _samples(reader, data)
    Trainer(reader, samples, PLAN, tmp_path / "first").run()
    plan = dataclasses.replace(PLAN, num_steps=1, initial_head=str(tmp_path / "first"))
    further = Trainer(reader, samples, plan, tmp_path / "further")
    kept = load_file(tmp_path / "first" / "model.safetensors")
    assert all(torch.equal(tensor, kept[name]) for name, tensor in further.head.state_dict().items())
    further.run()
    assert further.accuracy > 0.3
    assert not torch.equal(further.head.fc.weight, kept["fc.weight"])
    second_layer = "layers.1.mlp.up_proj.weight"
    for tensors, wrong in (
        ({"fc.weight": kept["fc.weight"]}, "fc.bias"),
        ({**kept, "fc.bias": torch.zeros(3)}, "fc.bias"),
        ({**kept, second_layer: torch.zeros(3)}, second_layer),
    ):
        save_file(tensors, tmp_path / "first" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ConfigError, match=rf"first: is no EAGLE-1 head for .* size: {re.escape(wrong)} is"):
            Trainer(reader, samples, plan, tmp_path / "refused")


def test_heads_learn_and_interrupted_trainings_go_on(
    tmp_path: pathlib.Path, data: pathlib.Path, reader: StateReader
) -> None:
    """The head finds more tokens than at the start; a training in two parts gives the same head as one in one."""
    samples = _samples(reader, data)
    whole = Trainer(reader, samples, PLAN, tmp_path / "whole")
    whole.run()
    assert whole.accuracy > 0.3

    class StopError(Exception):
        pass

    parts = Trainer(reader, samples, PLAN, tmp_path / "parts")
    steps = iter(range(17))
    compute = parts._step

    def step(number: int, batch: list) -> dict[str, str]:
        if next(steps, None) is None:
            raise StopError
        return compute(number, batch)

    parts._step = step
    with pytest.raises(StopError):
        parts.run()
    parts.save_progress()
    assert not (tmp_path / "parts" / "config.json").exists()
    Trainer(reader, samples, PLAN, tmp_path / "parts").run()
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_progress_of_another_training_is_not_gone_on_with(
    tmp_path: pathlib.Path, data: pathlib.Path, reader: StateReader
) -> None:
    """Whoever changes data or options is told."""
    samples = _samples(reader, data)
    Trainer(reader, samples, PLAN, tmp_path).save_progress()
    with pytest.raises(ConfigError, match="of a training with another model"):
        Trainer(reader, samples[:-1], PLAN, tmp_path)


def test_answers_of_conversations_count(tmp_path: pathlib.Path, reader: StateReader) -> None:
    """In all spellings, tokens of answers count and others do not; texts of every file of a directory are read."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(reader.config.model.tokenizer)
    messages = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "I am fine."}]
    (tmp_path / "a.json").write_text(json.dumps([{"messages": messages}]))
    turns = [{"from": "human", "value": "Hello!"}, {"from": "gpt", "value": "I am fine."}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"conversations": turns}))
    (tmp_path / "c.jsonl").write_text(json.dumps({"prompt": "Hello!", "completion": " I am fine."}))
    first, second, third = read_samples(str(tmp_path), tokenizer, 512)
    assert first == second
    answer = [token for token, counts in zip(first.token_ids, first.learned, strict=True) if counts]
    assert tokenizer.decode(answer) == "I am fine.<|im_end|>\n"
    assert third.learned == [False] * len(tokenizer.encode("Hello!")) + [True] * len(tokenizer.encode(" I am fine."))
    (tmp_path / "d.txt").write_text("word " * 400)
    assert all(len(sample.token_ids) <= 64 for sample in read_samples(str(tmp_path / "d.txt"), tokenizer, 64))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{}", "is no object with messages"), ("[", "texts.jsonl"), ('{"messages": [{"role": "user"}]}', "lacks")],
)
def test_broken_data_is_named(tmp_path: pathlib.Path, reader: StateReader, text: str, message: str) -> None:
    """With the file, and the line of it."""
    (tmp_path / "texts.jsonl").write_text(text)
    tokenizer = transformers.AutoTokenizer.from_pretrained(reader.config.model.tokenizer)
    with pytest.raises(ConfigError, match=message):
        read_samples(str(tmp_path / "texts.jsonl"), tokenizer, 64)
