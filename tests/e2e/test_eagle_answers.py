"""EAGLE heads as a newcomer has them: trained for the demo model, converted or not, and served; and EAGLE-3's."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from ascend_vllm.entrypoints.cli import main
from ascend_vllm.entrypoints.demo_model import demo_head_path
from ascend_vllm.tools import convert_eagle_ckpt_to_vllm_compatible
from tests.eagle_heads import eagle3_tensors, head_config, save_head
from tests.server import OPENAI_SERVER, Server, running
from tests.tiny_models import VOCAB_SIZE, tiny_model

pytestmark = pytest.mark.slow

QUESTIONS = ["What does --block-size do?", "Explain --max-num-seqs.", "hello"]
FLAGS = ["--dtype", "float32", "--kv-cache-memory-bytes", "256M"]
NUM_STEPS = 30
# a larger batch than any: there are drafts, whatever they cost
ALWAYS = {"num_speculative_tokens": 3, "disable_by_batch_size": 100}


@pytest.fixture(scope="module")
def trained(demo_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A head after a short training, by the documented command."""
    directory = tmp_path_factory.mktemp("eagle") / "head"
    num_threads = torch.get_num_threads()
    words = ["train-eagle", "--model", "demo", "--data", "demo", "--output", str(directory)]
    assert main([*words, "--num-steps", str(NUM_STEPS)]) == 0
    yield directory
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def converted(trained: pathlib.Path, demo_model_dir: str) -> pathlib.Path:
    """The head as it would be published, with weights of torch.save, by the documented command.

    The demo model's LM head is its embedding.
    """
    directory = trained.with_name("converted")
    shutil.copytree(trained, directory)
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    words = ["--base-path", demo_model_dir, "--draft-path", str(directory)]
    words += ["--base-weight-name", "model.safetensors", "--draft-weight-name", "pytorch_model.bin"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["convert", *words])
        convert_eagle_ckpt_to_vllm_compatible.main()
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert "lm_head.weight" in load_file(directory / "model.safetensors")
    return directory


def _answers(server: Server, **fields: Any) -> list[dict[str, Any]]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        bodies = [
            {"model": "demo", "messages": [{"role": "user", "content": question}], "max_tokens": 60, **fields}
            for question in QUESTIONS
        ]
        return [http.post("/v1/chat/completions", json=body).raise_for_status().json() for body in bodies]


def _texts(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def _num_accepted(answers: list[dict[str, Any]]) -> int:
    return sum(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for answer in answers)


def _serve(settings: dict[str, Any]) -> list[str]:
    return ["--model", "demo", *FLAGS, "--speculative-config", json.dumps(settings)]


@pytest.mark.parametrize("head", ["trained", "converted"])
def test_answers_are_those_without_a_head(head: str, demo_server: Server, request: pytest.FixtureRequest) -> None:
    """Greedy and drawn with a seed; some drafts are right even after so short a training."""
    directory = request.getfixturevalue(head)
    with running(OPENAI_SERVER, _serve({"method": "eagle", "model": str(directory), **ALWAYS})) as server:
        for fields in ({"temperature": 0}, {"temperature": 0.7, "seed": 4}):
            answers = _answers(server, **fields)
            assert _texts(answers) == _texts(_answers(demo_server, **fields))
            assert _num_accepted(answers) > 0


@pytest.mark.exhaustive
def test_the_demo_model_has_a_head_of_its_own(demo_server: Server) -> None:
    """Without a name it is trained once, into the cache; more than half of its drafts are right."""
    with running(OPENAI_SERVER, _serve({"method": "eagle", **ALWAYS}), timeout_s=600) as server:
        answers = _answers(server, temperature=0)
        assert _texts(answers) == _texts(_answers(demo_server, temperature=0))
        details = [answer["usage"]["completion_tokens_details"] for answer in answers]
        num_rejected = sum(detail["rejected_prediction_tokens"] for detail in details)
        assert _num_accepted(answers) > num_rejected
    assert (demo_head_path() / "config.json").is_file()


def test_an_eagle_3_head(tmp_path: pathlib.Path) -> None:
    """With a vocabulary of its own and three of the target's states, as SafeAILab publishes them."""
    model, hidden, num_drafted = tiny_model("qwen2"), 64, 96
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}
    config = head_config(hidden, VOCAB_SIZE, draft_vocab_size=num_drafted, eagle_config=layers)
    save_head(tmp_path / "head", eagle3_tensors(hidden, VOCAB_SIZE, num_drafted), config)
    settings = {"method": "eagle3", "model": str(tmp_path / "head"), **ALWAYS}
    flags = ["--model", model, "--served-model-name", "tiny", "--dtype", "float32", "--num-gpu-blocks-override", "60"]
    body = {"model": "tiny", "prompt": list(range(5, 30)), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    token_ids = []
    for more in ([], ["--speculative-config", json.dumps(settings)]):
        with running(OPENAI_SERVER, [*flags, *more]) as server, httpx.Client(base_url=server.url) as http:
            answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
            token_ids.append(answer["choices"][0]["token_ids"])
    assert token_ids[0] == token_ids[1]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] > 0
