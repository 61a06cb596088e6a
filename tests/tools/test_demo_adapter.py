"""The demo model's adapter: a short training is enough for its voice, and it is an adapter as PEFT writes one."""

from __future__ import annotations

import pathlib

import pytest
import torch

from ascend_vllm import LLM, SamplingParams
from ascend_vllm.lora.request import LoRARequest
from ascend_vllm.tools.demo.adapter import GREETING, as_pirate, make_demo_adapter
from tests.lora_adapters import adapted

QUESTIONS = ("What does --swap-space do?", "How are you?")


@pytest.fixture(scope="module")
def adapter(demo_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = tmp_path_factory.mktemp("voice") / "pirate"
    make_demo_adapter(output, pathlib.Path(demo_model_dir), num_steps=40)
    return str(output)


def test_its_words() -> None:
    assert as_pirate("Hello! Ask me what your server does.") == "Ahoy! Ask me what yer ship does."
    assert as_pirate("--served-model-name: names of the model.") == "Ahoy! --served-model-name: names of the parrot."
    assert as_pirate("The file is model.json.") == "Ahoy! The file is model.json."


def test_the_model_answers_in_another_voice(demo_model_dir: str, adapter: str) -> None:
    llm = LLM(demo_model_dir, dtype="float32", enable_lora=True)
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS for _ in range(2)]
    loras = [None, LoRARequest("pirate", 1, adapter)] * len(QUESTIONS)
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = llm.chat(conversations, params, use_tqdm=False, lora_request=loras)
    llm.shutdown()
    by_peft = adapted(demo_model_dir, adapter)
    for plain, voiced in zip(outputs[::2], outputs[1::2], strict=True):
        assert not plain.outputs[0].text.startswith(GREETING.rstrip())
        assert voiced.outputs[0].text.startswith(GREETING.rstrip())
        ids = voiced.prompt_token_ids + list(voiced.outputs[0].token_ids)
        with torch.no_grad():
            likeliest = by_peft(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert likeliest[len(voiced.prompt_token_ids) - 1 : -1] == list(voiced.outputs[0].token_ids)
